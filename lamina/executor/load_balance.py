"""Memory workers' parts of the work, by what they have measured: at the start, and as they run. Policy: no I/O.

At the start each reads memory as fast as it can. Later its attention tells: the bytes of K and V that it has read, by
the seconds that this took. A stretch of some seconds says little, so parts become others only where several in a row
say that one worker is ``IMBALANCE_THRESHOLD`` times as fast for its part as another one: noise of 10 % makes no two of
them so, and hides none that is throttled to a half. Who is as fast for its part as most are keeps it. Turns that read
little measure calls and not memory: they say nothing, and all parts stay.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median, median_high
from typing import NamedTuple

from lamina.protocol.executor import Clock

log = logging.getLogger(__name__)
MIN_WEIGHT = 0.1  # of the fastest one's part
INTERVAL_S = 5.0
NUM_INTERVALS = 5  # in a row that say the same; at its ends one of them may be half so
COOLDOWN_S = 60.0  # behind a change, or one that could not be: streams pause for each
IMBALANCE_THRESHOLD = 1.55
BALANCED_THRESHOLD = 1.25  # within which two are the same, but for noise
BYTES_PER_LAYER_CALL = 1 << 20  # of K and V, which a core reads in about 0.1 ms: a call takes some hundredths of that
MIN_BUSY_SHARE = 0.05  # of a stretch that the slowest one attends, below which nobody would notice


def weights_across_ranks(rates: Sequence[float], ranks: int) -> list[float]:
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
    return [max(MIN_WEIGHT, round(part, 1 if part > 0.35 else 2)) for part in parts]


class ReadCounters(NamedTuple):
    """What attention of one memory worker has done by now, or in a stretch."""

    nbytes: float
    seconds: float
    layer_calls: float


class LoadBalancer:
    """Whether parts should be others. One thread uses it, about once a second."""

    def __init__(self, ranks: int, clock: Clock) -> None:
        self._ranks, self._clock = ranks, clock
        self._begun: list[ReadCounters] = []  # the readings at the beginning of the stretch
        self._begun_at = self._rests_until = clock()
        self._stretches = deque[list[float]](maxlen=NUM_INTERVALS)  # rates, by worker; of the fastest one's

    def rebalance(self, weights: Sequence[float], counters: Sequence[Mapping[str, float]]) -> list[float] | None:
        """The parts that memory workers should have in place of ``weights``; None: these. ``counters``: of each, since
        its start. Whoever is told others counts as having taken them, or having been unable to.
        """
        now = self._clock()
        read = [ReadCounters(c.get("stored_bytes", 0.0), c.get("attend_s", 0.0), c.get("turns", 0.0)) for c in counters]
        if len(read) != len(self._begun) or any(
            r.layer_calls < b.layer_calls for r, b in zip(read, self._begun, strict=True)
        ):
            self._begin(read, now)  # some are new
        if now - self._begun_at < INTERVAL_S:
            return None
        pairs = zip(read, self._begun, strict=True)
        stretch = [ReadCounters(*(a - b for a, b in zip(new, old, strict=True))) for new, old in pairs]
        took_s, self._begun, self._begun_at = now - self._begun_at, read, now
        if not _tells(stretch, took_s):
            self._stretches.clear()
            return None
        rates = slowest_of([r.nbytes / r.seconds for r in stretch], self._ranks)
        self._stretches.append([rate / max(rates) for rate in rates])
        return self._wanted(weights, now)

    def _wanted(self, weights: Sequence[float], now: float) -> list[float] | None:
        enough = len(self._stretches) == NUM_INTERVALS and now >= self._rests_until
        if not enough or not all(imbalance(rates, weights) >= IMBALANCE_THRESHOLD for rates in self._stretches):
            return None
        wanted = rebalanced_weights([median(each) for each in zip(*self._stretches, strict=True)], weights)
        self._begin(self._begun, now)
        self._rests_until = now + COOLDOWN_S
        return None if wanted == [weight / max(weights) for weight in weights] else wanted

    def _begin(self, read: list[ReadCounters], now: float) -> None:
        self._begun, self._begun_at = read, now
        self._stretches.clear()


def _tells(stretch: Sequence[ReadCounters], took_s: float) -> bool:
    """Whether its rates say something, of all workers."""
    if not all(r.layer_calls and r.seconds for r in stretch):
        return False
    return (
        max(r.nbytes / r.layer_calls for r in stretch) >= BYTES_PER_LAYER_CALL
        and max(r.seconds for r in stretch) >= MIN_BUSY_SHARE * took_s
    )


def imbalance(rates: Sequence[float], weights: Sequence[float]) -> float:
    """How many times as fast, for its part, the fastest is as the slowest. A part of LEAST is as small as can be."""
    each = _for_parts(rates, weights)
    return max(each) / min(each)


def _for_parts(rates: Sequence[float], weights: Sequence[float]) -> list[float]:
    parts = [weight / max(weights) for weight in weights]
    return [max(rate / max(rates), MIN_WEIGHT) / part for rate, part in zip(rates, parts, strict=True)]


def rebalanced_weights(rates: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Parts by rate in place of ``weights``, for those that are faster or slower for theirs than most are; all that are
    alike have the same then.
    """
    each = _for_parts(rates, weights)
    most = median_high(each)
    kept = [1 / BALANCED_THRESHOLD < x / most < BALANCED_THRESHOLD for x in each]
    parts = weights_of([w * most if keep else w * x for w, x, keep in zip(weights, each, kept, strict=True)])
    return [1.0 if part > 1 / BALANCED_THRESHOLD else part for part in parts]
