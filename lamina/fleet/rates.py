"""Memory workers' parts of the work, by what they have measured: at the start, and as they run. Policy: no I/O.

At the start each reads memory as fast as it can. Later its attention tells: the bytes of K and V that it has read, by
the seconds that this took. A stretch of some seconds says little, so parts become others only where several in a row
say that one worker is ``APART`` times as fast for its part as another one: noise of 10 % makes no two of them so, and
hides none that is throttled to a half. Who is as fast for its part as most are keeps it. Turns that read little measure
calls and not memory: they say nothing, and all parts stay.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median, median_high
from typing import NamedTuple

from lamina.engine.wire import Clock

log = logging.getLogger(__name__)
LEAST = 0.1  # of the fastest one's part
STRETCH_S = 5.0
STRETCHES = 5  # in a row that say the same; at its ends one of them may be half so
REST_S = 60.0  # behind a change, or one that could not be: streams pause for each
APART = 1.55
ALIKE = 1.25  # within which two are the same, but for noise
TURN_BYTES = 1 << 20  # of K and V, which a core reads in about 0.1 ms: a call takes some hundredths of that
BUSY = 0.05  # of a stretch that the slowest one attends, below which nobody would notice


def shared_weights(rates: Sequence[float], ranks: int) -> list[float]:
    """Of memory workers that read so many bytes a second, dealt to the ranks in turn: the same for every rank."""
    slowest = slowest_of(rates, ranks)
    weights = weights_of(slowest)
    texts = [f"{w:g} ({r / 1e9:.1f} GB/s)" for w, r in zip(weights, slowest, strict=True)]
    log.info("--memory-weights measured: %s", ", ".join(texts))
    return weights


def slowest_of(rates: Sequence[float], ranks: int) -> list[float]:
    """By memory worker, the rate of the slowest of those that have the same tokens, one of each rank."""
    return [min(rates[w - w % ranks :][:ranks]) for w in range(len(rates))]


def weights_of(rates: Sequence[float]) -> list[float]:
    """Parts of the work for memory workers that read so many bytes a second: of the fastest one's, in tenths, small
    ones in hundredths.

    Workers that differ by less than that are alike: rates that are measured never agree exactly, and equal parts are
    the better ones where heads are shared.
    """
    parts = [rate / max(rates) for rate in rates]
    return [max(LEAST, round(part, 1 if part > 0.35 else 2)) for part in parts]


class ReadSoFar(NamedTuple):
    """What attention of one memory worker has done by now, or in a stretch."""

    nbytes: float
    seconds: float
    turns: float


class Shares:
    """Whether parts should be others. One thread uses it, about once a second."""

    def __init__(self, ranks: int, clock: Clock) -> None:
        self._ranks, self._clock = ranks, clock
        self._begun: list[ReadSoFar] = []  # the readings at the beginning of the stretch
        self._begun_at = self._rests_until = clock()
        self._stretches = deque[list[float]](maxlen=STRETCHES)  # rates, by worker; of the fastest one's

    def look(self, weights: Sequence[float], counters: Sequence[Mapping[str, float]]) -> list[float] | None:
        """The parts that memory workers should have in place of ``weights``; None: these. ``counters``: of each, since
        its start. Whoever is told others counts as having taken them, or having been unable to.
        """
        now = self._clock()
        read = [ReadSoFar(c.get("stored_bytes", 0.0), c.get("attend_s", 0.0), c.get("turns", 0.0)) for c in counters]
        if len(read) != len(self._begun) or any(r.turns < b.turns for r, b in zip(read, self._begun, strict=True)):
            self._begin(read, now)  # some are new
        if now - self._begun_at < STRETCH_S:
            return None
        pairs = zip(read, self._begun, strict=True)
        stretch = [ReadSoFar(*(a - b for a, b in zip(new, old, strict=True))) for new, old in pairs]
        took_s, self._begun, self._begun_at = now - self._begun_at, read, now
        if not _tells(stretch, took_s):
            self._stretches.clear()
            return None
        rates = slowest_of([r.nbytes / r.seconds for r in stretch], self._ranks)
        self._stretches.append([rate / max(rates) for rate in rates])
        return self._wanted(weights, now)

    def _wanted(self, weights: Sequence[float], now: float) -> list[float] | None:
        enough = len(self._stretches) == STRETCHES and now >= self._rests_until
        if not enough or not all(apart(rates, weights) >= APART for rates in self._stretches):
            return None
        wanted = other_parts([median(each) for each in zip(*self._stretches, strict=True)], weights)
        self._begin(self._begun, now)
        self._rests_until = now + REST_S
        return None if wanted == [weight / max(weights) for weight in weights] else wanted

    def _begin(self, read: list[ReadSoFar], now: float) -> None:
        self._begun, self._begun_at = read, now
        self._stretches.clear()


def _tells(stretch: Sequence[ReadSoFar], took_s: float) -> bool:
    """Whether its rates say something, of all workers."""
    if not all(r.turns and r.seconds for r in stretch):
        return False
    return max(r.nbytes / r.turns for r in stretch) >= TURN_BYTES and max(r.seconds for r in stretch) >= BUSY * took_s


def apart(rates: Sequence[float], weights: Sequence[float]) -> float:
    """How many times as fast, for its part, the fastest is as the slowest. A part of LEAST is as small as can be."""
    each = _for_parts(rates, weights)
    return max(each) / min(each)


def _for_parts(rates: Sequence[float], weights: Sequence[float]) -> list[float]:
    parts = [weight / max(weights) for weight in weights]
    return [max(rate / max(rates), LEAST) / part for rate, part in zip(rates, parts, strict=True)]


def other_parts(rates: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Parts by rate in place of ``weights``, for those that are faster or slower for theirs than most are; all that are
    alike have the same then.
    """
    each = _for_parts(rates, weights)
    most = median_high(each)
    kept = [1 / ALIKE < x / most < ALIKE for x in each]
    parts = weights_of([w * most if keep else w * x for w, x, keep in zip(weights, each, kept, strict=True)])
    return [1.0 if part > 1 / ALIKE else part for part in parts]
