"""The closed form: at how many sequences a deployment runs a trace, what a token costs there, and which is the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .cost import BatchLoad, CostModel, halves
from .deployment import Deployment, DeviceMemory
from .model_facts import ModelFacts
from .tables import PriceBook
from .traces import RequestTrace

_BISECTIONS = 40


class Operating(NamedTuple):
    """A deployment under as much of a trace as it can hold, decoding only.

    batch: sequences, of all batches together; tbt_s: between two tokens of one; dollars: for 10^6 tokens; shares: of a
    round in which a pool is busy; bandwidth: bytes per second between the pools for messages to take 20 % of a step,
    0 where there is one pool; limit: what keeps it from more.
    """

    deployment: Deployment
    batch: float
    tbt_s: float
    tokens_s: float
    hour: float
    dollars: float
    compute_busy: float
    memory_busy: float
    bandwidth: float
    limit: str


class RefusedDeployment(NamedTuple):
    """A deployment that is not ranked, and why."""

    deployment: Deployment
    why: str


@dataclass(frozen=True)
class Ranking:
    """``points`` by dollars for a token, the cheapest first. ``trace``: what all of them were ranked on."""

    points: tuple[Operating, ...]
    refused: tuple[RefusedDeployment, ...]
    trace: RequestTrace

    def best(self, *, split: bool) -> Operating | None:
        """The cheapest of one kind."""
        return next((p for p in self.points if p.deployment.split == split), None)


class StoredTokens:
    """Of a running sequence of a trace, on average, by window; each is counted once."""

    def __init__(self, trace: RequestTrace, model: ModelFacts) -> None:
        self.of_one: Mapping[int, float] = {w: trace.stored(w) for w in model.windows}

    def times(self, count: float) -> dict[int, float]:
        """Of so many sequences."""
        return {w: count * tokens for w, tokens in self.of_one.items()}


@dataclass(frozen=True)
class Planner:
    """What all deployments are ranked by. ``slo_s``: the longest mean time between two tokens, 0 = any. ``most``:
    sequences at once, 0 = as many as fit.
    """

    costs: CostModel
    memory: DeviceMemory
    prices: PriceBook
    slo_s: float = 0.0
    most: int = 0

    def rank(self, asked: Iterable[Deployment], trace: RequestTrace) -> Ranking:
        """All that fit, on what of the trace fits all of them. Raises ValueError where nothing does."""
        able, refused = list[Deployment](), list[RefusedDeployment]()
        for deployment in asked:
            why = self.refusal(deployment)
            if why:
                refused.append(RefusedDeployment(deployment, why))
            else:
                able.append(deployment)
        able, kept, more = self._with_room(able, trace)
        refused += more
        stored = StoredTokens(kept, self.costs.model)
        points = []
        for deployment in able:
            point = self.operate(deployment, stored)
            if isinstance(point, RefusedDeployment):
                refused.append(point)
            else:
                points.append(point)
        points.sort(key=lambda p: (p.dollars, p.hour, p.deployment.label))
        return Ranking(tuple(points), tuple(refused), kept)

    def refusal(self, deployment: Deployment) -> str:
        """Why weights do not fit; empty if they do."""
        model, device = self.costs.model, deployment.compute
        if not self.memory.weights_fit(model, deployment):
            each = model.weight_bytes / deployment.ranks / 1e9
            return f"{each:.1f} GB of weights do not fit one {device.name} of {device.memory}"
        if self.memory.for_kv(model, deployment) <= 0:
            return f"weights leave no memory for KV on {deployment.ranks} {device.name}"
        return ""

    def operate(self, deployment: Deployment, stored: StoredTokens) -> Operating | RefusedDeployment:
        """At the most sequences that memory, the limits of the engine and the SLO allow."""
        of_one = self.costs.model.kv_bytes(stored.of_one)
        fit = self.memory.for_kv(self.costs.model, deployment) / of_one
        limits = {"memory holds no more": fit}
        if cap := (self.most if deployment.split else self.most or self.costs.baseline.most):
            limits["at most so many sequences"] = float(cap)
        limit = min(limits, key=lambda name: limits[name])
        batch = limits[limit]
        if batch < 1:
            return RefusedDeployment(deployment, f"memory holds {batch:.2f} sequences of this trace")

        def tbt(count: float) -> float:
            return self.costs.round(
                deployment, halves(BatchLoad(count, stored.times(count)), deployment.batches)
            ).seconds

        if self.slo_s and tbt(batch) > self.slo_s:
            if tbt(1.0) > self.slo_s:
                return RefusedDeployment(deployment, f"one sequence takes {tbt(1.0) * 1e3:.1f} ms a token")
            batch, limit = _most(tbt, self.slo_s, batch), "the SLO"
        return self._point(deployment, BatchLoad(batch, stored.times(batch)), limit)

    def _point(self, deployment: Deployment, load: BatchLoad, limit: str) -> Operating:
        dealt = halves(load, deployment.batches)
        took, hour = self.costs.round(deployment, dealt), deployment.price(self.prices)
        tokens_s = load.rows / took.seconds
        return Operating(
            deployment=deployment,
            batch=load.rows,
            tbt_s=took.seconds,
            tokens_s=tokens_s,
            hour=hour,
            dollars=hour / 3600 / tokens_s * 1e6,
            compute_busy=took.compute_busy,
            memory_busy=took.memory_busy,
            bandwidth=self.costs.message_bandwidth(deployment, dealt[0]) if deployment.split else 0.0,
            limit=f"{limit}; {took.limit}",
        )

    def _with_room(
        self, able: list[Deployment], trace: RequestTrace
    ) -> tuple[list[Deployment], RequestTrace, list[RefusedDeployment]]:
        """One list for all: requests that the smallest of the deployments cannot hold are dropped, from all. One that
        would drop more than a tenth of the trace is refused instead.
        """
        room = {d: self._longest(d, trace) for d in able}
        enough = [d for d in able if len(trace.within(room[d]).requests) >= 0.9 * len(trace.requests)]
        refused = [
            RefusedDeployment(d, "more than a tenth of the requests are longer than all its KV")
            for d in able
            if d not in enough
        ]
        if not enough:
            reason = f"; {refused[0].deployment.label}: {refused[0].why}" if refused else ""
            raise ValueError(
                f"--devices: nothing that can be built of these holds the model and this trace{reason}: add more"
            )
        return enough, trace.within(min(room[d] for d in enough)), refused

    def _longest(self, deployment: Deployment, trace: RequestTrace) -> float:
        """Tokens of the longest request that fits alone."""
        model = self.costs.model
        most = self.memory.for_kv(model, deployment)
        if model.windows == [0]:
            return most / model.kv_bytes_per_token
        lengths = sorted({r.prompt + r.answer for r in trace.requests})
        fits = [n for n in lengths if model.kv_bytes({w: min(n, w) if w else n for w in model.windows}) <= most]
        return fits[-1] if fits else 0.0

    def with_price(self, device: str, factor: float) -> Planner:
        """The same, but one device that many times as dear."""
        hours = {**self.prices.hours, device: self.prices.hours[device] * factor}
        return replace(self, prices=replace(self.prices, hours=hours))

    def with_link(self, factor: float) -> Planner:
        """The same, but a link of another rate; devices' own cards do not limit it."""
        link = replace(self.costs.link, rate=self.costs.link.rate * factor)
        return replace(self, costs=replace(self.costs, link=link))


def _most(tbt: Callable[[float], float], slo_s: float, high: float) -> float:
    """The most sequences, as a whole number, within the SLO; one is, ``high`` are not."""
    low = 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if tbt(middle) <= slo_s else (low, middle)
    return float(int(low))
