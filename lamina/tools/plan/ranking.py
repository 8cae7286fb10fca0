"""The closed form: with how many sequences a deployment runs a trace, the cost of a token, and the best deployment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from lamina.tools.request_traces import RequestTrace

from .cost_model import BatchLoad, CostModel, split_load
from .deployment import Deployment, DeviceMemory
from .model_facts import ModelFacts
from .tables import PriceBook, dollars_of

_BISECTIONS = 20
_FEWER = 1.5
_MULTIPLES = 8


class OperatingPoint(NamedTuple):
    """A deployment with as much of a trace as it can hold, decoding only.

    batch: sequences, of all batches together.
    tbt_s: between two tokens of one; dollars: for 10^6 tokens.
    compute_busy, memory_busy: shares of a round in which a pool is busy.
    bandwidth: bytes per second between the pools with which messages take 20 % of a step, 0 if there is one pool.
    limit: the reason why it has no more sequences.
    room: tokens of the longest request that it holds. refused: the share of the trace's tokens that are answers to
    longer ones; ``elsewhere`` serves these, the cheapest deployment that holds all, for ``elsewhere_dollars``. So
    dollars are those of the whole trace, while all else is of the requests that it holds.
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
    room: float = math.inf
    refused: float = 0.0
    elsewhere: Deployment | None = None
    elsewhere_dollars: float = 0.0

    def dollars_at(self, own_dollars: float, refused: float | None = None) -> float:
        """Return the dollars for 10^6 tokens of the whole trace. ``own_dollars``: for those that it serves itself.
        ``refused``: instead of its own share.
        """
        share = self.refused if refused is None else refused
        return (1 - share) * own_dollars + share * self.elsewhere_dollars


class RefusedDeployment(NamedTuple):
    """A deployment that is not ranked, and why. ``missing_bytes``: bytes that its devices lack, or ``tbt_s``: the best
    mean time between two tokens, which the SLO forbids; 0 if that is not the reason.
    """

    deployment: Deployment
    why: str
    missing_bytes: float = 0.0
    tbt_s: float = 0.0


@dataclass(frozen=True)
class Ranking:
    """``points`` by dollars for a token, the cheapest first. ``trace``: the requests of the ranking."""

    points: tuple[OperatingPoint, ...]
    refused: tuple[RefusedDeployment, ...]
    trace: RequestTrace

    def trace_of(self, point: OperatingPoint) -> RequestTrace:
        """Return the requests that a deployment holds."""
        return self.trace.within(point.room)

    def best(self, *, split: bool) -> OperatingPoint | None:
        """Return the cheapest deployment of one kind."""
        return next((p for p in self.points if p.deployment.is_split == split), None)

    def nearest(self, *, split: bool | None = None) -> RefusedDeployment | None:
        """Return the refused deployment, of one kind or of any, that came closest: within the SLO, else
        within memory.
        """
        return nearest([r for r in self.refused if split in (None, r.deployment.is_split)])


def nearest(refused: Sequence[RefusedDeployment]) -> RefusedDeployment | None:
    """Return the one that came closest."""
    return min(refused, key=lambda r: (not r.tbt_s, r.tbt_s, r.missing_bytes), default=None)


class MeanStoredTokens:
    """Stored tokens of a running sequence of a trace, on average, by window; each token counts once. ``chunk``: rows of
    a prompt that are computed at once, next to the rows that decode; 0 = prompts are computed elsewhere.
    """

    def __init__(self, trace: RequestTrace, model: ModelFacts, chunk: int = 0) -> None:
        self.of_one: Mapping[int, float] = {w: trace.stored(w) for w in model.windows}
        self._prompt = trace.mean_prompt / trace.mean_answer if chunk else 0.0  # rows for each row that decodes
        self._pairs = {w: trace.pairs(w) / trace.mean_answer if chunk else 0.0 for w in model.windows}
        self._chunk = max(1, chunk)

    def times(self, count: float) -> dict[int, float]:
        """Return the stored tokens of so many sequences."""
        return {w: count * tokens for w, tokens in self.of_one.items()}

    def load(self, count: float) -> BatchLoad:
        """Return the average load of a round in which ``count`` sequences decode. A chunk reads once all that its rows
        attend.
        """
        more = {w: count * (pairs / self._chunk + self._prompt / 2) for w, pairs in self._pairs.items()}
        stored = {w: tokens + more[w] * bool(self._prompt) for w, tokens in self.times(count).items()}
        pairs = {w: tokens + count * self._pairs[w] for w, tokens in self.times(count).items()}
        return BatchLoad(count * (1 + self._prompt), stored, pairs)


@dataclass(frozen=True)
class Planner:
    """The common terms of a ranking. ``slo_s``: the longest mean time between two tokens, 0 = any. ``max_sequences``:
    sequences at once, 0 = as many as fit. ``chunk``: see MeanStoredTokens.
    """

    costs: CostModel
    memory: DeviceMemory
    prices: PriceBook
    slo_s: float = 0.0
    max_sequences: int = 0
    chunk: int = 0

    def rank(self, asked: Iterable[Deployment], trace: RequestTrace) -> Ranking:
        """Rank all deployments that hold the model, by all requests of the trace that one of them can hold. Raises
        ValueError if none does.
        """
        able, refused = list[Deployment](), list[RefusedDeployment]()
        for deployment in asked:
            refusal = self.refusal(deployment)
            if refusal:
                refused.append(refusal)
            else:
                able.append(deployment)
        trace = self._known(trace)
        room, more = self._with_room(able, refused, trace)
        refused += more
        stored, points = dict[int, MeanStoredTokens](), list[OperatingPoint]()
        for deployment, most in room.items():
            own = trace.within(most)
            if len(own.requests) not in stored:
                stored[len(own.requests)] = MeanStoredTokens(own, self.costs.model, self.chunk)
            point = self.operating_point(deployment, stored[len(own.requests)])
            if isinstance(point, RefusedDeployment):
                refused.append(point)
            else:
                points.append(point._replace(room=most))
        kept = trace.within(max((p.room for p in points), default=0.0))
        points = sorted(self._charged(points, kept), key=lambda p: (p.dollars, p.hour, p.deployment.label))
        return Ranking(tuple(points), tuple(refused), kept if points else trace)

    def _charged(self, points: Sequence[OperatingPoint], trace: RequestTrace) -> Iterator[OperatingPoint]:
        """Yield the points, with dollars for the whole trace: what one cannot hold is served elsewhere."""
        whole = sorted((p for p in points if p.room >= trace.longest), key=lambda p: p.dollars) if points else []
        charges = dict[int, tuple[Deployment, float]]()
        for point in points:
            rest = trace.beyond(point.room)
            if not rest.requests:
                yield point
                continue
            if len(rest.requests) not in charges:
                stored = MeanStoredTokens(rest, self.costs.model, self.chunk)
                each = (self.operating_point(p.deployment, stored) for p in whole)
                serves = next((p for p in each if isinstance(p, OperatingPoint)), whole[0])
                charges[len(rest.requests)] = serves.deployment, serves.dollars
            elsewhere, dollars = charges[len(rest.requests)]
            point = point._replace(
                refused=rest.num_answer_tokens / trace.num_answer_tokens,
                elsewhere=elsewhere,
                elsewhere_dollars=dollars,
            )
            yield point._replace(dollars=point.dollars_at(point.dollars))

    def refusal(self, deployment: Deployment) -> RefusedDeployment | None:
        """Return a refusal if the weights do not fit."""
        model, device = self.costs.model, deployment.compute
        lacks = self.memory.missing_weight_bytes(model, deployment)
        if lacks > 0:
            each = model.weight_bytes / deployment.ranks / 1e9
            why = f"{each:.1f} GB of weights do not fit one {device.name} of {device.memory}"
            return RefusedDeployment(deployment, why, lacks * deployment.ranks)
        if (left := self.memory.kv_bytes(model, deployment)) <= 0:
            return RefusedDeployment(
                deployment, f"weights leave no memory for KV on {deployment.ranks} {device.name}", 1 - left
            )
        return None

    def operating_point(self, deployment: Deployment, stored: MeanStoredTokens) -> OperatingPoint | RefusedDeployment:
        """Return a deployment at the number of sequences that gives the most tokens, within memory, the engine's limits
        and the SLO.
        """
        of_one = self.costs.model.kv_bytes(stored.of_one)
        fit = self.memory.kv_bytes(self.costs.model, deployment) / of_one
        limits = {"memory holds no more": fit}
        if cap := (
            self.max_sequences if deployment.is_split else self.max_sequences or self.costs.baseline.max_sequences
        ):
            limits["at most so many sequences"] = float(cap)
        limit = min(limits, key=lambda name: limits[name])
        high = limits[limit]
        if high < 1:
            return RefusedDeployment(deployment, f"memory holds {high:.2f} sequences of this trace", (1 - fit) * of_one)

        @cache
        def tbt(count: float) -> float:
            return self.costs.round(deployment, split_load(stored.load(count), deployment.batches)).seconds

        counts = _counts(high, deployment.batches)
        quickest = min(counts, key=tbt)
        if self.slo_s and tbt(quickest) > self.slo_s:
            took = tbt(quickest)
            return RefusedDeployment(deployment, f"a token takes {took * 1e3:.1f} ms", tbt_s=took)
        best = max(counts, key=lambda n: n / tbt(n))
        if best < high:
            limit = "more are slower"
        if self.slo_s and tbt(best) > self.slo_s:
            within = [n for n in counts if tbt(n) <= self.slo_s]
            within.append(_most(tbt, self.slo_s, quickest, best))
            best, limit = max(within, key=lambda n: n / tbt(n)), "the SLO"
        return self._point(deployment, best, stored.load(best), limit)

    def _point(self, deployment: Deployment, batch: float, load: BatchLoad, limit: str) -> OperatingPoint:
        dealt = split_load(load, deployment.batches)
        took, hour = self.costs.round(deployment, dealt), deployment.price(self.prices)
        tokens_s = batch / took.seconds
        return OperatingPoint(
            deployment=deployment,
            batch=batch,
            tbt_s=took.seconds,
            tokens_s=tokens_s,
            hour=hour,
            dollars=dollars_of(hour, tokens_s),
            compute_busy=took.compute_busy,
            memory_busy=took.memory_busy,
            bandwidth=self.costs.message_bandwidth(deployment, dealt[0]) if deployment.is_split else 0.0,
            limit=f"{limit}; {took.limit}",
        )

    def _known(self, trace: RequestTrace) -> RequestTrace:
        """Return the trace without requests that exceed the model's own limit. Raises ValueError if none is left."""
        limit = self.costs.model.max_len
        kept = trace.within(limit) if limit else trace
        if not kept.requests:
            raise ValueError(
                f"--trace: all requests are longer than the {limit} tokens that {self.costs.model.name} takes"
            )
        return kept

    def _with_room(
        self, able: list[Deployment], before: list[RefusedDeployment], trace: RequestTrace
    ) -> tuple[dict[Deployment, float], list[RefusedDeployment]]:
        """Return the deployments with the tokens of the longest request that each holds. One that cannot hold more than
        a tenth of the trace is refused.
        """
        room = {d: self._longest(d, trace) for d in able}
        enough = [d for d in able if len(trace.within(room[d]).requests) >= 0.9 * len(trace.requests)]
        each = self.costs.model.kv_bytes_per_token
        refused = [
            RefusedDeployment(
                d, "more than a tenth of the requests are longer than all its KV", each * (trace.longest - room[d])
            )
            for d in able
            if d not in enough
        ]
        if not enough:
            close = nearest([*before, *refused])
            reason = f"; the closest is {close.deployment.label}: {close.why}" if close else ""
            raise ValueError(
                f"--devices: nothing that can be built of these holds the model and this trace{reason}: add more"
            )
        return {d: room[d] for d in enough}, refused

    def _longest(self, deployment: Deployment, trace: RequestTrace) -> float:
        """Return the tokens of the longest request that fits alone."""
        model = self.costs.model
        most = self.memory.kv_bytes(model, deployment)
        if model.windows == [0]:
            return most / model.kv_bytes_per_token
        lengths = sorted({r.prompt + r.answer for r in trace.requests})
        fits = [n for n in lengths if model.kv_bytes({w: min(n, w) if w else n for w in model.windows}) <= most]
        return fits[-1] if fits else 0.0

    def with_price(self, device: str, factor: float) -> Planner:
        """Return the same planner with the price of one device multiplied by ``factor``."""
        hours = {**self.prices.hours, device: self.prices.hours[device] * factor}
        return replace(self, prices=replace(self.prices, hours=hours))

    def repriced(self, point: OperatingPoint, device: str, factor: float) -> OperatingPoint:
        """Return the same point with the price of one device multiplied by ``factor``: the best number of sequences
        stays.
        """
        prices, other = self.with_price(device, factor).prices, point.elsewhere
        hour = point.deployment.price(prices)
        if other is not None:
            rise = other.price(prices) / other.price(self.prices)
            point = point._replace(elsewhere_dollars=point.elsewhere_dollars * rise)
        return point._replace(hour=hour, dollars=point.dollars_at(dollars_of(hour, point.tokens_s)))

    def with_link(self, factor: float) -> Planner:
        """Return the same planner with the link's rate, and that of the devices' own cards, multiplied by
        ``factor``.
        """
        link = replace(self.costs.link, rate=self.costs.link.rate * factor, cards=self.costs.link.cards * factor)
        return replace(self, costs=replace(self.costs, link=link))


def _counts(high: float, batches: int) -> list[float]:
    """Return numbers of sequences to try, up to ``high``. Each is two thirds of the one before; some have a multiple of
    64 in a batch, at which products are the fastest.
    """
    counts, at = {high}, high
    while at > 1:
        counts.add(float(math.ceil(at)))
        at /= _FEWER
    step = 64 * batches * max(1, int(high) // (64 * batches * _MULTIPLES))
    counts |= {float(n) for n in range(step, int(high) + 1, step)}
    return sorted(n for n in counts if 1 <= n <= high)


def _most(tbt: Callable[[float], float], slo_s: float, low: float, high: float) -> float:
    """Return the most sequences, as a whole number, within the SLO; ``low`` are, ``high`` are not."""
    if low > high:
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if tbt(middle) <= slo_s else (low, middle)
    return max(1.0, float(int(low)))
