"""Whether to split at all, why, and the price, length or link at which that would turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .deployment import Deployment
from .rank import Operating, Planner, Ranking
from .traces import RequestTrace

TIE = 0.15  # of dollars for a token: the model's error on one and two ranks, docs/planner.md
_RANGE = 32.0  # turning points are looked for up to this factor, both ways
_STEP = math.sqrt(2.0)
_BISECTIONS = 10
_SHORTLIST = 12  # split deployments that are ranked anew


class TurningPoint(NamedTuple):
    """``what`` times ``factor`` is where the verdict is another one; None: nowhere within the range."""

    what: str
    factor: float | None
    value: str


class PlanVerdict(NamedTuple):
    """``gain``: tokens for a dollar of the best split beside the best homogeneous one, less one; None where there is
    only one of the two.
    """

    split: bool
    tie: bool
    gain: float | None
    words: str
    turns: Sequence[TurningPoint]

    @property
    def headline(self) -> str:
        """In two or three words."""
        return "split" if self.split else "do not disaggregate here"


def decide(planner: Planner, ranking: Ranking, trace: RequestTrace) -> PlanVerdict:
    """Of a ranking of some deployments on ``trace``. Raises ValueError where nothing was ranked."""
    split, alone = ranking.best(split=True), ranking.best(split=False)
    if split is None or alone is None:
        return _only(split, alone, ranking)
    gain = alone.dollars / split.dollars - 1
    tie = abs(gain) < TIE
    pays = gain >= TIE
    splits = [p.deployment for p in ranking.points if p.deployment.split][:_SHORTLIST]
    others = [p.deployment for p in ranking.points if not p.deployment.split]
    turns = _turns(planner, [*splits, *others], ranking.trace, split.deployment)
    return PlanVerdict(pays, tie, gain, _why(split, alone, gain, tie=tie), turns)


def _only(split: Operating | None, alone: Operating | None, ranking: Ranking) -> PlanVerdict:
    if split is not None:
        why = next((r.why for r in ranking.refused if not r.deployment.split), "none can be built of these devices")
        return PlanVerdict(True, False, None, f"no homogeneous deployment is left: {why}", [])
    why = next((r.why for r in ranking.refused if r.deployment.split), "none can be built of these devices")
    if alone is None:
        raise ValueError(f"--slo-tbt: no deployment is within it; {best_reachable(ranking)}")
    return PlanVerdict(False, False, None, f"no split deployment is left: {why}", [])


def best_reachable(ranking: Ranking) -> str:
    """Of those that an SLO has refused, the one that is closest to it."""
    slow = [r for r in ranking.refused if r.why.endswith("ms a token")]
    if not slow:
        return "; ".join(sorted({r.why for r in ranking.refused}))
    best = min(slow, key=lambda r: float(r.why.split()[-4]))
    return f"the best is {best.deployment.label}, where {best.why}"


def _why(split: Operating, alone: Operating, gain: float, *, tie: bool) -> str:
    names = f"{split.deployment.label} against {alone.deployment.label}"
    more = f"{gain:+.1%} tokens for a dollar: {names}"
    batch = (
        f"{split.batch / alone.batch:.2f} times the sequences at {split.tbt_s / alone.tbt_s:.2f} times the time a token"
    )
    price = f"{split.hour / alone.hour:.2f} times the price"
    if tie:
        return f"{more}; a tie, since the model is off by up to {TIE:.0%}, and one pool is simpler. {batch}, {price}"
    return f"{more}; {batch}, {price}"


def _turns(planner: Planner, asked: Sequence[Deployment], trace: RequestTrace, best: Deployment) -> list[TurningPoint]:
    """Each moves one thing and ranks all anew, the requests that were ranked."""

    def beyond(other: Planner, on: RequestTrace) -> float:
        try:
            ranking = other.rank(asked, on)
        except ValueError:
            return float("nan")
        split, alone = ranking.best(split=True), ranking.best(split=False)
        if split is None or alone is None:
            return float("nan")  # nothing to compare with
        return alone.dollars / split.dollars - 1 - TIE

    turns = []
    memory = best.memory
    if memory is not None and memory != best.compute:
        hour = planner.prices.hour(memory)
        factor = _root(lambda f: beyond(planner.with_price(memory.name, f), trace))
        turns.append(TurningPoint(f"price of {memory.name}", factor, f"${hour * factor:.2f}/h" if factor else ""))
    factor = _root(lambda f: beyond(planner, trace.scaled(f)))
    turns.append(
        TurningPoint(
            "length of prompts", factor, f"{trace.mean_prompt * factor:.0f} tokens on average" if factor else ""
        )
    )
    factor = _root(lambda f: beyond(planner.with_link(f), trace))
    rate = planner.costs.link.rate
    turns.append(TurningPoint("rate of the link", factor, f"{rate * factor * 8 / 1e9:.0f} Gbps" if factor else ""))
    return turns


def _root(of: Callable[[float], float]) -> float | None:
    """The factor nearest to 1 behind which ``of`` is on the other side of 0, up to _RANGE both ways, as far as it is a
    number.
    """
    here, found = of(1.0) >= 0, list[float]()
    for step in (_STEP, 1 / _STEP):
        before, at = 1.0, step
        while 1 / _RANGE <= at <= _RANGE and not math.isnan(there := of(at)):
            if (there >= 0) != here:
                found.append(_between(of, before, at, here))
                break
            before, at = at, at * step
    return min(found, key=lambda f: abs(math.log(f)), default=None)


def _between(of: Callable[[float], float], same: float, other: float, sign: bool) -> float:
    """On the other side, by less than a thousandth."""
    for _ in range(_BISECTIONS):
        middle = math.sqrt(same * other)
        same, other = (middle, other) if (of(middle) >= 0) == sign else (same, middle)
    return other
