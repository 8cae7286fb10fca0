"""Laws with coefficients that are not negative, by weighted least squares of relative errors. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


class LeastSquares:
    """The normal equations of a law: sums of products of features, and of features with what they should give."""

    def __init__(self, features: int) -> None:
        self._products = [[0.0] * features for _ in range(features)]
        self._targets = [0.0] * features

    def add(self, features: Sequence[float], target: float, size: float, weight: float = 1.0) -> None:
        """Errors count in parts of ``size``: of the expected seconds, so that slow and fast ones weigh alike."""
        scaled = [x / size for x in features]
        for i, x in enumerate(scaled):
            self._targets[i] += weight * x * target / size
            for j, y in enumerate(scaled):
                self._products[i][j] += weight * x * y

    def decay(self, kept: float) -> None:
        """Have all that was added weigh so many times as much."""
        self._products = [[x * kept for x in row] for row in self._products]
        self._targets = [x * kept for x in self._targets]

    def solution(self) -> list[float]:
        """Coefficients: of the best of each subset of the features, those of the least error."""
        count = len(self._targets)
        best, least = [0.0] * count, 0.0
        for size in range(1, count + 1):
            for used in combinations(range(count), size):
                coefficients = _solve(
                    [[self._products[i][j] for j in used] for i in used], [self._targets[i] for i in used]
                )
                if coefficients is None or min(coefficients) < 0:
                    continue
                gain = sum(x * self._targets[i] for x, i in zip(coefficients, used, strict=True))
                if gain > least:
                    least, best = gain, [0.0] * count
                    for x, i in zip(coefficients, used, strict=True):
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
    solution = [0.0] * size
    for at in reversed(range(size)):
        solution[at] = (rows[at][size] - sum(rows[at][j] * solution[j] for j in range(at + 1, size))) / rows[at][at]
    return solution
