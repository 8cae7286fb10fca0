"""Whether to split at all, why, and the price, length or link at which that would turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .cost_model import CostModel
from .deployment import Deployment
from .ranking import OperatingPoint, Planner, Ranking
from .request_traces import RequestTrace
from .tables import modelling_errors

_RANGE = 32.0 * (1 + 1e-9)  # turning points are looked for up to this factor, both ways
_STEP = math.sqrt(2.0)
_BISECTIONS = 8
_SHORTLIST = 8  # split deployments that are ranked anew


class TurningPoint(NamedTuple):
    """``what`` times ``factor`` is where the verdict is another one, ``value`` in words; None: nowhere between ``low``
    and ``high`` times, as far as there is something to compare.
    """

    what: str
    factor: float | None
    value: str
    low: float
    high: float


class PlanVerdict(NamedTuple):
    """``gain``: tokens for a dollar of the best split beside the best homogeneous one, less one; None where there is
    only one of the two. ``width``: a smaller gain is a tie.
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
        """In two or three words."""
        return "split" if self.should_split else "do not disaggregate here"


def decide_split(planner: Planner, ranking: Ranking) -> PlanVerdict:
    """The verdict on a ranking of some deployments. Raises ValueError where nothing was ranked."""
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
    """Share of their dollars for a token within which nobody can say which is cheaper: the greatest error of them."""
    known = modelling_errors()
    has = (costs.tables.has("linear", d.compute.name, d.ranks) for d in deployments)
    names = ("table" if h else f"roofline_{d.ranks}" for h, d in zip(has, deployments, strict=True))
    return max(known[name] for name in names)


def decide_by_simulation(planner: Planner, verdict: PlanVerdict, points: Sequence[OperatingPoint]) -> PlanVerdict:
    """The verdict by runs that were played, ``points`` with their tokens and dollars, where both kinds are among them.
    Turns are those of the closed form, none where it says otherwise.
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
    """Of the split ones, and of the others."""
    kinds = ([p for p in points if p.deployment.is_split == kind] for kind in (True, False))
    return [min(kind, key=lambda p: p.dollars, default=None) for kind in kinds]


def best_reachable(ranking: Ranking) -> str:
    """One line on the refused deployment that came closest."""
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
    """``tie``: its width, if it is one."""
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
    """Each moves one thing and ranks all anew, the requests that were ranked."""

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
        turns.append(_turn(f"price of {memory.name}", dearer, lambda f: f"${hour * f:.2f}/h"))
    mean, rate = trace.mean_prompt, planner.costs.link.rate * 8 / 1e9
    longer = _turn(
        "length of prompts", lambda f: anew(planner, trace.scaled(f)), lambda f: f"{mean * f:.0f} tokens on average"
    )
    faster = _turn("rate of the link", lambda f: anew(planner.with_link(f), trace), lambda f: f"{rate * f:.0f} Gbps")
    return [*turns, longer, faster]


def _turn(what: str, of: Callable[[float], float], describe: Callable[[float], str]) -> TurningPoint:
    """The one nearest to 1, and where the verdict turns back behind it."""
    crossings, low, high = _crossings(of)
    factor = min(crossings, key=lambda f: abs(math.log(f)), default=None)
    if factor is None:
        return TurningPoint(what, None, "", low, high)
    behind = [f for f in crossings if f != factor and (f > factor) == (factor > 1)]
    back = min(behind, key=lambda f: abs(math.log(f)), default=None)
    return TurningPoint(what, factor, describe(factor) + (f", and back at {describe(back)}" if back else ""), low, high)


def gain_by_price(planner: Planner, ranking: Ranking, device: str, factor: float) -> float:
    """The gain of splitting where one device is ``factor`` times as dear; NaN where there is no such gain."""
    return _gain(planner.costs, _repriced(planner, ranking.points, device, factor))[0]


def _repriced(planner: Planner, points: Sequence[OperatingPoint], device: str, factor: float) -> list[OperatingPoint]:
    return [planner.repriced(p, device, factor) for p in points]


def _gain(costs: CostModel, points: Sequence[OperatingPoint]) -> tuple[float, float]:
    """And the width of a tie."""
    split, alone = _cheapest(points)
    if split is None or alone is None:
        return math.nan, 0.0  # nothing to compare with
    return alone.dollars / split.dollars - 1, tie_width(costs, split.deployment, alone.deployment)


def _crossings(of: Callable[[float], float]) -> tuple[list[float], float, float]:
    """The factors behind which ``of`` is on the other side of 0, up to _RANGE both ways, as far as it is a number; and
    the least and the greatest factor that were looked at.
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
    """On the other side, by less than a thousandth."""
    for _ in range(_BISECTIONS):
        middle = math.sqrt(same * other)
        same, other = (middle, other) if (of(middle) >= 0) == sign else (same, middle)
    return other
