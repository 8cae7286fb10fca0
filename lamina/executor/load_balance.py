"""The weights of memory workers, measured at the start and rebalanced while they run. Policy: no I/O.

At the start each worker reads memory as fast as it can. Later its attention is the measure: bytes of K and V read,
divided by the seconds. One interval proves little, so weights change only after several intervals in a row. In each of
them one worker must be ``IMBALANCE_THRESHOLD`` times as fast for its weight as another one. Noise of 10 % never reaches
that, and a worker throttled to a half always does. A worker that is as fast for its weight as most keeps its weight.
Intervals in which little is read measure calls and not memory, so they change nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median, median_high
from typing import NamedTuple

from lamina.protocol.executor import Clock

log = logging.getLogger(__name__)
MIN_WEIGHT = 0.1  # relative to the fastest worker
INTERVAL_S = 5.0
NUM_INTERVALS = 5  # in a row that must agree; one at either end may be affected in part
COOLDOWN_S = 60.0  # after a change or a failed one, since each pauses streams
IMBALANCE_THRESHOLD = 1.55
BALANCED_THRESHOLD = 1.25  # two workers within this factor count as equal, except for noise
# K and V that a core reads in about 0.1 ms; a call itself takes a few hundredths of that.
BYTES_PER_LAYER_CALL = 1 << 20
MIN_BUSY_SHARE = 0.05  # of an interval in attention, for the slowest worker; below that a change has no effect


def weights_across_ranks(rates: Sequence[float], ranks: int) -> list[float]:
    """Return the weights of memory workers from their rates in bytes a second, the same for every rank. Workers belong
    to the ranks in turn.
    """
    slowest = slowest_of(rates, ranks)
    weights = weights_of(slowest)
    texts = [f"{w:g} ({r / 1e9:.1f} GB/s)" for w, r in zip(weights, slowest, strict=True)]
    log.info("--memory-weights measured: %s", ", ".join(texts))
    return weights


def slowest_of(rates: Sequence[float], ranks: int) -> list[float]:
    """Return, by memory worker, the rate of the slowest worker with the same tokens; there is one of each rank."""
    return [min(rates[w - w % ranks :][:ranks]) for w in range(len(rates))]


def weights_of(rates: Sequence[float]) -> list[float]:
    """Return weights from rates in bytes a second, relative to the fastest worker, in tenths, small ones in hundredths.

    Workers that differ by less count as equal: measured rates never agree exactly, and equal weights are better where
    heads are shared.
    """
    parts = [rate / max(rates) for rate in rates]
    return [max(MIN_WEIGHT, round(part, 1 if part > 0.35 else 2)) for part in parts]


class ReadCounters(NamedTuple):
    """The work that attention of one memory worker has done since its start, or in an interval."""

    nbytes: float
    seconds: float
    layer_calls: float


class LoadBalancer:
    """Decides whether weights should change. One thread calls it, about once a second."""

    def __init__(self, ranks: int, clock: Clock) -> None:
        self._ranks, self._clock = ranks, clock
        self._begun: list[ReadCounters] = []  # the readings at the beginning of the interval
        self._begun_at = self._rests_until = clock()
        self._stretches = deque[list[float]](maxlen=NUM_INTERVALS)  # by worker, rates relative to the fastest

    def rebalance(self, weights: Sequence[float], counters: Sequence[Mapping[str, float]]) -> list[float] | None:
        """Return new weights that should replace ``weights``; None: no change. ``counters``: of each worker, since its
        start. After new weights are returned, none follow for COOLDOWN_S, whether or not they were applied.
        """
        now = self._clock()
        read = [ReadCounters(c.get("stored_bytes", 0.0), c.get("attend_s", 0.0), c.get("turns", 0.0)) for c in counters]
        if len(read) != len(self._begun) or any(
            r.layer_calls < b.layer_calls for r, b in zip(read, self._begun, strict=True)
        ):
            self._begin(read, now)  # some workers are new
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
    """Return whether the rates of an interval are meaningful, for all workers."""
    if not all(r.layer_calls and r.seconds for r in stretch):
        return False
    return (
        max(r.nbytes / r.layer_calls for r in stretch) >= BYTES_PER_LAYER_CALL
        and max(r.seconds for r in stretch) >= MIN_BUSY_SHARE * took_s
    )


def imbalance(rates: Sequence[float], weights: Sequence[float]) -> float:
    """Return how many times as fast, for its weight, the fastest worker is as the slowest. MIN_WEIGHT bounds rates."""
    each = _for_parts(rates, weights)
    return max(each) / min(each)


def _for_parts(rates: Sequence[float], weights: Sequence[float]) -> list[float]:
    parts = [weight / max(weights) for weight in weights]
    return [max(rate / max(rates), MIN_WEIGHT) / part for rate, part in zip(rates, parts, strict=True)]


def rebalanced_weights(rates: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return weights by rate for workers that are faster or slower for their weight than most; all other workers keep
    theirs. Equal workers get equal weights.
    """
    each = _for_parts(rates, weights)
    most = median_high(each)
    kept = [1 / BALANCED_THRESHOLD < x / most < BALANCED_THRESHOLD for x in each]
    parts = weights_of([w * most if keep else w * x for w, x, keep in zip(weights, each, kept, strict=True)])
    return [1.0 if part > 1 / BALANCED_THRESHOLD else part for part in parts]
