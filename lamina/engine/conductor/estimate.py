"""How long a prefill worker takes for a prompt, and decoding for a step: laws of three coefficients, and their
refinement by what was measured.

    seconds(tokens, prefix) = a + b (tokens - prefix) + c (tokens^2 - prefix^2)

The rows of a prompt cost b each; row i attends i tokens, which is the quadratic term (Mooncake, section 5.1: "the
computation pattern of a Transformer is regular"). Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .overload import TokenTime
from .squares import Squares

_UNIT = 1024.0  # tokens: features of one order of magnitude, so that sums of their products lose no digits
_KEPT = 0.96  # of the weight of what was measured before, with each new measurement
_PRIOR = 1.0  # measurements that the first law weighs as much as
_PRIOR_PROMPTS = ((1, 0), (512, 0), (4096, 0), (32768, 0), (32768, 16384))
_FEW = 8  # measurements, from which on
_KEPT_STEPS = 0.998  # the same of steps
_OFTEN = 8
_MOST_OUTLIER = 4.0  # times the prediction is the most that a measurement counts: one stall spoils no law


class PrefillTime(NamedTuple):
    """Seconds: ``a`` of a prompt, ``b`` of a token, ``c`` of a pair of tokens. None is negative."""

    a: float
    b: float
    c: float

    def seconds(self, tokens: int, prefix: int = 0) -> float:
        """The seconds of computing a prompt whose first ``prefix`` tokens have K and V already."""
        return self.a + self.b * (tokens - prefix) + self.c * (tokens * tokens - prefix * prefix)


class StagedPrefill(NamedTuple):
    """``stages`` workers compute a prompt together, in chunks of so many tokens: a law then says how long each of them
    is at it, which is how long others wait for it.
    """

    stages: int = 1
    chunk: int = 1

    def fill_s(self, tokens: int, prefix: int, seconds: float) -> float:
        """Until the last stage can begin with a prompt that takes it so many seconds, where all have nothing to do: N
        chunks end after N + X - 1 of a stage's times.
        """
        return (self.stages - 1) * seconds / self._chunks(tokens, prefix)

    def own_part(self, tokens: int, prefix: int) -> float:
        """Of the time from a prompt's beginning, where all had nothing to do, to its end: what one stage was at it."""
        chunks = self._chunks(tokens, prefix)
        return chunks / (chunks + self.stages - 1)

    def _chunks(self, tokens: int, prefix: int) -> int:
        return max(1, -(-(tokens - prefix) // self.chunk))


ONE_STAGE = StagedPrefill()


class PrefillFit:
    """A law that follows what is measured: weighted least squares of relative errors, the old forgotten by and by."""

    def __init__(self, law: PrefillTime, *, trusted: bool = True) -> None:
        """``law``: until something is measured. ``trusted``: it is worth one measurement then, else nothing."""
        self.law = law
        self._sums, self._count = Squares(3), 0
        for tokens, prefix in _PRIOR_PROMPTS if trusted else ():
            seconds = law.seconds(tokens, prefix)
            if seconds > 0:
                _add(self._sums, tokens, prefix, seconds, seconds, _PRIOR / len(_PRIOR_PROMPTS))

    def observe(self, tokens: int, prefix: int, seconds: float) -> None:
        """A prompt took so long on a worker that did nothing else."""
        if seconds <= 0 or tokens <= prefix:
            return
        expected = self.law.seconds(tokens, prefix)
        size = seconds
        if self._count >= _FEW and expected > 0:
            seconds, size = min(seconds, expected * _MOST_OUTLIER), expected
        self._count += 1
        self._sums.forget(_KEPT)
        _add(self._sums, tokens, prefix, seconds, size)
        self.law = _law(self._sums)


class StepFit:
    """The law of a decoding step, that follows what steps take. It is solved anew once in _OFTEN steps."""

    def __init__(self) -> None:
        self.law = TokenTime(0.0, 0.0, 0.0)
        self._sums, self._count = Squares(3), 0

    def observe(self, rows: int, stored: float, seconds: float) -> None:
        """A step of so many rows, whose attention read so many tokens, took so long."""
        if seconds <= 0 or rows < 1:
            return
        expected, size = self.law.seconds(rows, stored), seconds
        if expected > 0:
            seconds, size = min(seconds, expected * _MOST_OUTLIER), expected
        self._count += 1
        self._sums.forget(_KEPT_STEPS)
        self._sums.add((1.0, float(rows), stored / _UNIT), seconds, size)
        if self._count % _OFTEN == 0:
            a, b, c = self._sums.solution()
            self.law = TokenTime(a, b, c / _UNIT)


def fit_law(measured: Iterable[tuple[int, int, float]]) -> PrefillTime:
    """The law of prompts that took (tokens, prefix, seconds). Raises ValueError for none of them."""
    sums, count = Squares(3), 0
    for tokens, prefix, seconds in measured:
        _add(sums, tokens, prefix, seconds, seconds)
        count += 1
    if not count:
        raise ValueError("a law of prefill needs at least one measured prompt")
    return _law(sums)


def _features(tokens: int, prefix: int) -> tuple[float, float, float]:
    t, p = tokens / _UNIT, prefix / _UNIT
    return 1.0, t - p, t * t - p * p


def _add(sums: Squares, tokens: int, prefix: int, seconds: float, size: float, weight: float = 1.0) -> None:
    sums.add(_features(tokens, prefix), seconds, size, weight)


def _law(sums: Squares) -> PrefillTime:
    a, b, c = sums.solution()
    return PrefillTime(a, b / _UNIT, c / _UNIT**2)
