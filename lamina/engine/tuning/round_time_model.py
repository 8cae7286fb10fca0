"""What a round of n batches takes, by laws that were fitted to rounds of one batch. Pure policy: no torch, no I/O.

    slices of a step      a + b rows
    attention of a step   c + d rows + e tokens

A round is bound as a plan of the rotation is (scheduler.rotation.pipeline.lower_bound), and as a round of the
planner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lamina.scheduler.conductor.latency_model import LatencyFit
from lamina.scheduler.rotation.pipeline import lower_bound

_TOKENS = 1024.0  # features of one order of magnitude


class RoundMeasurement(NamedTuple):
    """Of one batch: rows of a step, tokens that its attention reads. Seconds of a step: in slices and sampling; in
    attention, on the memory worker that took the longest; from one token to the next.
    """

    rows: int
    tokens: float
    slices_s: float
    attention_s: float
    round_s: float


class RoundTimeModel(NamedTuple):
    """Seconds. ``between_s``: of a step that is neither slices nor attention, for messages and the driver; below 0
    where both overlap. ``extra_batch_s``: by number of batches, how many times as long a measured round took as the
    laws say, since pools that work at once may take something from each other.
    """

    slices: tuple[float, float]
    attention: tuple[float, float, float]
    between_s: float
    replicas: int
    extra_batch_s: dict[int, float]

    def slices_s(self, rows: float) -> float:
        """Of a step."""
        return self.slices[0] + self.slices[1] * rows

    def attention_s(self, rows: float, tokens: float) -> float:
        """Of a step."""
        return self.attention[0] + self.attention[1] * rows + self.attention[2] * tokens

    def seconds(self, n: int, rows: float, tokens: float) -> float:
        """Of a round of n batches, which have so many rows and tokens together: attention of all, slices of all over
        the replicas, or one batch's chain.
        """
        slices, attention = [self.slices_s(rows / n)], [self.attention_s(rows / n, tokens / n)]
        return self.extra_batch_s.get(n, 1.0) * lower_bound(n, slices, attention, self.between_s, self.replicas)

    def describe(self) -> str:
        """In words."""
        (a, b), (c, d, e) = ((x * 1e3 for x in law) for law in (self.slices, self.attention))
        return (
            f"slices {a:.2f} ms and {b:.3f} for a row, attention {c:.2f} ms, {d:.3f} for a row and {e * 1024:.3f} for "
            f"1024 tokens, link and driver {self.between_s * 1e3:.2f} ms"
        )


def fit_round_times(measured: Sequence[RoundMeasurement], replicas: int) -> RoundTimeModel:
    """Of at least one measured number of rows. Errors count in parts."""
    slices, attention = LatencyFit(2), LatencyFit(3)
    for m in measured:
        slices.add((1.0, float(m.rows)), m.slices_s, m.slices_s or 1.0)
        attention.add((1.0, float(m.rows), m.tokens / _TOKENS), m.attention_s, m.attention_s or 1.0)
    a, b = slices.coefficients()
    c, d, e = attention.coefficients()
    laws = RoundTimeModel((a, b), (c, d, e / _TOKENS), 0.0, replicas, {})
    rest = median(m.round_s - laws.slices_s(m.rows) - laws.attention_s(m.rows, m.tokens) for m in measured)
    return laws._replace(between_s=rest)
