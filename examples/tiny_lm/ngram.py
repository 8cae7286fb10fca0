"""The baseline: an interpolated n-gram model with Kneser-Ney smoothing (Kneser and Ney, ICASSP 1995) in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class _Level:
    """Counts of one order: n-grams are numbered from the shortest up, and a longer one is (context number, symbol)."""

    def __init__(self, grams: Ids, counts: Ids, contexts: Ids) -> None:
        # ``grams`` are sorted; ``contexts[i]`` is the number of gram i's context.
        self.grams, self.counts = grams, counts.astype(np.float64)
        size = int(contexts.max()) + 1
        self.totals = np.bincount(contexts, self.counts, size)
        self.kinds = np.bincount(contexts, minlength=size).astype(np.float64)
        ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
        self.discount = ones / (ones + 2 * twos) if ones else 0.5

    def find(self, grams: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Row numbers of ``grams`` and which of them were seen."""
        rows = np.minimum(np.searchsorted(self.grams, grams), len(self.grams) - 1)
        return rows, self.grams[rows] == grams


class KneserNey:
    """Interpolated Kneser-Ney of order ``order`` over symbols 0..vocabulary-1.

    An n-gram is packed into 64 bits, so ``vocabulary ** order`` must stay under 2**63.
    """

    def __init__(self, symbols: Ids, vocabulary: int, order: int = 5) -> None:
        if vocabulary**order >= 2**63:
            raise ValueError(f"order={order} over {vocabulary} symbols does not fit 64 bits; lower the order")
        self._vocabulary, self._order = vocabulary, order
        self._levels: list[_Level] = []
        self._contexts: list[Ids] = []
        grams, counts = np.unique(self._pack(symbols, order), return_counts=True)
        for n in range(order, 0, -1):
            known, contexts = np.unique(grams // vocabulary, return_inverse=True)
            self._levels.insert(0, _Level(grams, counts, contexts))
            self._contexts.insert(0, known)
            # Below the top an n-gram counts once for each different symbol in front of it.
            grams, counts = np.unique(grams % vocabulary ** (n - 1), return_counts=True)

    def _pack(self, symbols: Ids, n: int) -> Ids:
        """The last ``n`` symbols at every position, as one number; positions before the start read as symbol 0."""
        padded = np.concatenate([np.zeros(n - 1, dtype=np.int64), symbols])
        packed = np.zeros(len(symbols), dtype=np.int64)
        for shift in range(n):
            packed = packed * self._vocabulary + padded[shift : shift + len(symbols)]
        return packed

    def bits(self, symbols: Ids) -> float:
        """Bits that the model needs for ``symbols``."""
        probability = np.full(len(symbols), 1.0 / self._vocabulary)
        for n, (level, known) in enumerate(zip(self._levels, self._contexts, strict=True), start=1):
            grams = self._pack(symbols, n)
            rows, seen = level.find(grams)
            context = np.minimum(np.searchsorted(known, grams // self._vocabulary), len(known) - 1)
            backed = known[context] == grams // self._vocabulary
            count = np.where(seen, np.maximum(level.counts[rows] - level.discount, 0.0), 0.0)
            spread = level.discount * level.kinds[context] * probability
            probability = np.where(backed, (count + spread) / level.totals[context], probability)
        return float(-np.log2(probability).sum())
