"""How long a prefill worker takes for a prompt: a law of three coefficients, and its refinement by what was measured.

    seconds(tokens, prefix) = a + b (tokens - prefix) + c (tokens^2 - prefix^2)

The rows of a prompt cost b each; row i attends i tokens, which is the quadratic term (Mooncake, section 5.1: "the
computation pattern of a Transformer is regular"). Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

_UNIT = 1024.0  # tokens: features of one order of magnitude, so that sums of their products lose no digits
_KEPT = 0.96  # of the weight of what was measured before, with each new measurement
_PRIOR = 1.0  # measurements that the first law weighs as much as
_PRIOR_PROMPTS = ((1, 0), (512, 0), (4096, 0), (32768, 0), (32768, 16384))
_FEW = 8  # measurements, from which on
_MOST_OUTLIER = 4.0  # times the prediction is the most that a measurement counts: one stall spoils no law


class PrefillTime(NamedTuple):
    """Seconds: ``a`` of a prompt, ``b`` of a token, ``c`` of a pair of tokens. None is negative."""

    a: float
    b: float
    c: float

    def seconds(self, tokens: int, prefix: int = 0) -> float:
        """Of a prompt of which the first ``prefix`` tokens have K and V."""
        return self.a + self.b * (tokens - prefix) + self.c * (tokens * tokens - prefix * prefix)


class PrefillFit:
    """A law that follows what is measured: weighted least squares of relative errors, the old forgotten by and by."""

    def __init__(self, law: PrefillTime, *, trusted: bool = True) -> None:
        """``law``: until something is measured. ``trusted``: it is worth one measurement then, else nothing."""
        self.law = law
        self._sums, self._count = _Sums(), 0
        for tokens, prefix in _PRIOR_PROMPTS if trusted else ():
            seconds = law.seconds(tokens, prefix)
            if seconds > 0:
                self._sums.add(tokens, prefix, seconds, seconds, _PRIOR / len(_PRIOR_PROMPTS))

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
        self._sums.add(tokens, prefix, seconds, size)
        self.law = self._sums.law()


def fit_law(measured: Iterable[tuple[int, int, float]]) -> PrefillTime:
    """The law of prompts that took (tokens, prefix, seconds). Raises ValueError for none of them."""
    sums, count = _Sums(), 0
    for tokens, prefix, seconds in measured:
        sums.add(tokens, prefix, seconds, seconds)
        count += 1
    if not count:
        raise ValueError("a law of prefill needs at least one measured prompt")
    return sums.law()


class _Sums:
    """The normal equations of the law: sums of products of features, and of features with what they should give."""

    def __init__(self) -> None:
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3

    def add(self, tokens: int, prefix: int, seconds: float, size: float, weight: float = 1.0) -> None:
        """Errors count in parts of ``size``: of the expected seconds, so that slow and fast ones weigh alike."""
        scaled = [x / size for x in _features(tokens, prefix)]
        for i in range(3):
            self._targets[i] += weight * scaled[i] * seconds / size
            for j in range(3):
                self._products[i][j] += weight * scaled[i] * scaled[j]

    def forget(self, kept: float) -> None:
        self._products = [[x * kept for x in row] for row in self._products]
        self._targets = [x * kept for x in self._targets]

    def law(self) -> PrefillTime:
        a, b, c = _least_squares(self._products, self._targets)
        return PrefillTime(a, b / _UNIT, c / _UNIT**2)


def _features(tokens: int, prefix: int) -> tuple[float, float, float]:
    t, p = tokens / _UNIT, prefix / _UNIT
    return 1.0, t - p, t * t - p * p


def _least_squares(products: list[list[float]], targets: list[float]) -> list[float]:
    """Coefficients without a negative one: of the best of each subset of the three, the one of the least error."""
    best, least = [0.0] * 3, 0.0
    for size in (1, 2, 3):
        for used in combinations(range(3), size):
            found = _solve([[products[i][j] for j in used] for i in used], [targets[i] for i in used])
            if found is None or min(found) < 0:
                continue
            gain = sum(x * targets[i] for x, i in zip(found, used, strict=True))
            if gain > least:
                least, best = gain, [0.0] * 3
                for x, i in zip(found, used, strict=True):
                    best[i] = x
    return best


def _solve(matrix: list[list[float]], targets: list[float]) -> list[float] | None:
    """Gauss, by the largest pivot; None where the rows depend on each other."""
    size = len(targets)
    rows = [[*row, target] for row, target in zip(matrix, targets, strict=True)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda i: abs(rows[i][at]))
        if abs(rows[pivot][at]) <= 1e-12 * max(abs(matrix[pivot][pivot]), 1e-300):
            return None
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            rows[below] = [x - factor * y for x, y in zip(rows[below], rows[at], strict=True)]
    found = [0.0] * size
    for at in reversed(range(size)):
        found[at] = (rows[at][size] - sum(rows[at][j] * found[j] for j in range(at + 1, size))) / rows[at][at]
    return found
