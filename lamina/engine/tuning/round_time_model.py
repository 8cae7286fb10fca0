"""Predicts the time of a round of n batches, from measured rounds of one batch. Pure policy: no torch, no I/O.

    slices of a step      a + b rows
    attention of a step   c + d rows + e tokens

The bound of a round is ``scheduler.rotation.pipeline.lower_bound``, which the planner uses, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lamina.scheduler.conductor.latency_model import LatencyFit
from lamina.scheduler.rotation.pipeline import lower_bound

_TOKENS = 1024.0  # features of one order of magnitude


class RoundMeasurement(NamedTuple):
    """A measured round of one batch, with the seconds of each step."""

    rows: int  # of a step
    tokens: float  # that attention of a step reads
    slices_s: float  # slices and sampling
    attention_s: float  # attention on the slowest memory worker
    round_s: float  # from one token to the next


class RoundTimeModel(NamedTuple):
    """The coefficients of a round's time, in seconds.

    ``between_s``: the rest of a step, for messages and the driver; below 0 if slices and attention overlap.
    ``extra_batch_s``: by number of batches, measured time over predicted time, since the pools may share cores.
    """

    slices: tuple[float, float]
    attention: tuple[float, float, float]
    between_s: float
    replicas: int
    extra_batch_s: dict[int, float]

    def slices_s(self, rows: float) -> float:
        """The seconds of a step in slices."""
        return self.slices[0] + self.slices[1] * rows

    def attention_s(self, rows: float, tokens: float) -> float:
        """The seconds of a step in attention."""
        return self.attention[0] + self.attention[1] * rows + self.attention[2] * tokens

    def seconds(self, n: int, rows: float, tokens: float) -> float:
        """The seconds of a round of ``n`` batches with ``rows`` and ``tokens`` in all.

        It is the longest of three: attention of all batches, slices of all over the replicas, one batch's chain.
        """
        slices, attention = [self.slices_s(rows / n)], [self.attention_s(rows / n, tokens / n)]
        return self.extra_batch_s.get(n, 1.0) * lower_bound(n, slices, attention, self.between_s, self.replicas)

    def describe(self) -> str:
        """The coefficients in one line, for the log."""
        (a, b), (c, d, e) = ((x * 1e3 for x in law) for law in (self.slices, self.attention))
        return (
            f"slices {a:.2f} ms and {b:.3f} for a row, attention {c:.2f} ms, {d:.3f} for a row and {e * 1024:.3f} for "
            f"1024 tokens, link and driver {self.between_s * 1e3:.2f} ms"
        )


def fit_round_times(measured: Sequence[RoundMeasurement], replicas: int) -> RoundTimeModel:
    """Fits the model to at least one measurement, by relative errors."""
    slices, attention = LatencyFit(2), LatencyFit(3)
    for m in measured:
        slices.add((1.0, float(m.rows)), m.slices_s, m.slices_s or 1.0)
        attention.add((1.0, float(m.rows), m.tokens / _TOKENS), m.attention_s, m.attention_s or 1.0)
    a, b = slices.coefficients()
    c, d, e = attention.coefficients()
    laws = RoundTimeModel((a, b), (c, d, e / _TOKENS), 0.0, replicas, {})
    rest = median(m.round_s - laws.slices_s(m.rows) - laws.attention_s(m.rows, m.tokens) for m in measured)
    return laws._replace(between_s=rest)
