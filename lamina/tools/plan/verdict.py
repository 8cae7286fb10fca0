"""Decides whether to split at all, why, and at which price, length or link the verdict changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lamina.tools.request_traces import RequestTrace

from .cost_model import CostModel
from .deployment import Deployment
from .ranking import OperatingPoint, Planner, Ranking
from .tables import modelling_errors

_RANGE = 32.0 * (1 + 1e-9)  # turning points are searched up to this factor, both ways
_STEP = math.sqrt(2.0)
_BISECTIONS = 8
_SHORTLIST = 8  # split deployments that are ranked again


class TurningPoint(NamedTuple):
    """The verdict changes at ``what`` times ``factor``, ``value`` in words; None: nowhere between ``low`` and ``high``
    times, as far as there is something to compare.
    """

    what: str
    factor: float | None
    value: str
    low: float
    high: float


class PlanVerdict(NamedTuple):
    """``gain``: tokens for a dollar of the best split deployment over the best homogeneous one, minus one; None if only
    one of the two exists. ``width``: a smaller gain is a tie.
    """

    should_split: bool
    is_tie: bool
    gain: float | None
    words: str
    turning_points: Sequence[TurningPoint]
    width: float = 0.0
    chosen: Deployment | None = None  # the split one that it is about

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        return "split" if self.should_split else "do not disaggregate here"


def decide_split(planner: Planner, ranking: Ranking) -> PlanVerdict:
    """Return the verdict on a ranking of some deployments. Raises ValueError if nothing was ranked."""
    split, alone = ranking.best(split=True), ranking.best(split=False)
    if split is None or alone is None:
        return _only(split, alone, ranking)
    splits = [p.deployment for p in ranking.points if p.deployment.is_split][:_SHORTLIST]
    others = [p.deployment for p in ranking.points if not p.deployment.is_split]
    return _compare(planner, split, alone, _turns(planner, [*splits, *others], ranking.trace, split.deployment))


def _compare(
    planner: Planner, split: OperatingPoint, alone: OperatingPoint, turns: Sequence[TurningPoint]
) -> PlanVerdict:
    gain, width = _gain(planner.costs, [split, alone])
    tie = abs(gain) < width
    words = _why(split, alone, gain, width if tie else 0.0)
    return PlanVerdict(gain >= width, tie, gain, words, turns, width, split.deployment)


def tie_width(costs: CostModel, *deployments: Deployment) -> float:
    """Return the relative difference of dollars for a token below which neither is known to be cheaper: their greatest
    error.
    """
    known = modelling_errors()
    has = (costs.tables.has("linear", d.compute.name, d.ranks) for d in deployments)
    names = ("table" if h else f"roofline_{d.ranks}" for h, d in zip(has, deployments, strict=True))
    return max(known[name] for name in names)


def decide_by_simulation(planner: Planner, verdict: PlanVerdict, points: Sequence[OperatingPoint]) -> PlanVerdict:
    """Return the verdict by simulated runs, ``points`` with their tokens and dollars, if both kinds are among them.
    Turning points are those of the closed form, none if its verdict differs.
    """
    split, alone = _cheapest(points)
    if split is None or alone is None:
        return verdict
    played = _compare(planner, split, alone, verdict.turning_points)
    words = f"played, {played.words}"
    if played.should_split == verdict.should_split:
        return played._replace(words=words)
    return played._replace(words=f"{words}; by the closed form {verdict.gain or 0.0:+.1%}", turning_points=[])


def _cheapest(points: Sequence[OperatingPoint]) -> list[OperatingPoint | None]:
    """Return the cheapest split one, and the cheapest homogeneous one."""
    kinds = ([p for p in points if p.deployment.is_split == kind] for kind in (True, False))
    return [min(kind, key=lambda p: p.dollars, default=None) for kind in kinds]


def best_reachable(ranking: Ranking) -> str:
    """Return one line on the refused deployment that came closest."""
    close = ranking.nearest()
    if close is None:
        return "nothing can be built of these devices"
    best = "the best is" if close.tbt_s else "the closest is"
    return f"{best} {close.deployment.label}, where {close.why}"


def _only(split: OperatingPoint | None, alone: OperatingPoint | None, ranking: Ranking) -> PlanVerdict:
    if split is None and alone is None:
        raise ValueError(f"--slo-tbt: no deployment is within it; {best_reachable(ranking)}")
    missing = ranking.nearest(split=split is None)
    why = f"{missing.deployment.label}: {missing.why}" if missing else "none can be built of these devices"
    kind = "homogeneous" if split is not None else "split"
    chosen = split.deployment if split else None
    return PlanVerdict(split is not None, False, None, f"no {kind} deployment is left: {why}", [], 0.0, chosen)


def _why(split: OperatingPoint, alone: OperatingPoint, gain: float, tie: float) -> str:
    """Return the reason in words. ``tie``: its width, if it is one."""
    names = f"{split.deployment.label} against {alone.deployment.label}"
    more = f"{gain:+.1%} tokens for a dollar: {names}"
    batch = (
        f"{split.batch / alone.batch:.2f} times the sequences at {split.tbt_s / alone.tbt_s:.2f} times the time a token"
    )
    price = f"{split.hour / alone.hour:.2f} times the price"
    if tie:
        return f"{more}; a tie, since the model is off by up to {tie:.0%}, and one pool is simpler. {batch}, {price}"
    return f"{more}; {batch}, {price}"


def _turns(planner: Planner, asked: Sequence[Deployment], trace: RequestTrace, best: Deployment) -> list[TurningPoint]:
    """Return the turning points. Each changes one thing and ranks all again, on the requests that were ranked."""

    def beyond(points: Sequence[OperatingPoint]) -> float:
        gain, width = _gain(planner.costs, points)
        return gain - width

    def anew(other: Planner, on: RequestTrace) -> float:
        try:
            return beyond(other.rank(asked, on).points)
        except ValueError:
            return math.nan

    def dearer(factor: float) -> float:
        return beyond(_repriced(planner, ranked, memory.name, factor)) if memory else math.nan

    turns = []
    memory, ranked = best.memory, planner.rank(asked, trace).points
    if memory is not None and memory != best.compute:
        hour = planner.prices.hour(memory)
        turns.append(turning_point(f"price of {memory.name}", dearer, lambda f: f"${hour * f:.2f}/h"))
    mean, rate = trace.mean_prompt, planner.costs.link.rate * 8 / 1e9
    longer = turning_point(
        "length of prompts", lambda f: anew(planner, trace.scaled(f)), lambda f: f"{mean * f:.0f} tokens on average"
    )
    faster = turning_point(
        "rate of the link", lambda f: anew(planner.with_link(f), trace), lambda f: f"{rate * f:.0f} Gbps"
    )
    return [*turns, longer, faster]


def turning_point(what: str, of: Callable[[float], float], describe: Callable[[float], str]) -> TurningPoint:
    """Return the turning point nearest to 1, and where the verdict turns back after it."""
    crossings, low, high = _crossings(of)
    factor = min(crossings, key=lambda f: abs(math.log(f)), default=None)
    if factor is None:
        return TurningPoint(what, None, "", low, high)
    behind = [f for f in crossings if f != factor and (f > factor) == (factor > 1)]
    back = min(behind, key=lambda f: abs(math.log(f)), default=None)
    return TurningPoint(what, factor, describe(factor) + (f", and back at {describe(back)}" if back else ""), low, high)


def _repriced(planner: Planner, points: Sequence[OperatingPoint], device: str, factor: float) -> list[OperatingPoint]:
    return [planner.repriced(p, device, factor) for p in points]


def _gain(costs: CostModel, points: Sequence[OperatingPoint]) -> tuple[float, float]:
    """Return the gain, and the width of a tie."""
    split, alone = _cheapest(points)
    if split is None or alone is None:
        return math.nan, 0.0  # nothing to compare with
    return alone.dollars / split.dollars - 1, tie_width(costs, split.deployment, alone.deployment)


def _crossings(of: Callable[[float], float]) -> tuple[list[float], float, float]:
    """Return the factors after which ``of`` changes its sign, up to _RANGE both ways, as far as it is a number. Also
    returns the least and the greatest factor that were tried.
    """
    crossings, ends = list[float](), list[float]()
    for step in (_STEP, 1 / _STEP):
        here, before, at = of(1.0) >= 0, 1.0, step
        while 1 / _RANGE <= at <= _RANGE and not math.isnan(there := of(at)):
            if (there >= 0) != here:
                crossings.append(_between(of, before, at, here))
                here = there >= 0
            before, at = at, at * step
        ends.append(before)
    return crossings, min(ends), max(ends)


def _between(of: Callable[[float], float], same: float, other: float, sign: bool) -> float:
    """Return a factor on the other side, off by less than a thousandth."""
    for _ in range(_BISECTIONS):
        middle = math.sqrt(same * other)
        same, other = (middle, other) if (of(middle) >= 0) == sign else (same, middle)
    return other
