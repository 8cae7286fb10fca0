"""Which blocks of a sequence are kept: scores to blocks. Pure policy: no torch, no I/O, no clock.

Blocks are kept whole, and alike in all heads and layers that drop some. A block counts as much as the best of it and
its neighbours: what is asked for next often lies beside what was attended (pooling, arXiv 2404.14469 section 4). The
first ones (sinks, arXiv 2309.17453) and the most recent ones are always kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.protocol.options.sparsity import SparsityOptions

DECODE_ROWS = 8  # that are scored before blocks are dropped again


class Budget(NamedTuple):
    """What a sequence keeps in each sparse layer, or a query attends; in tokens, in whole blocks of ``block_size``."""

    tokens: int
    sink: int
    recent: int
    block_size: int


def budget_of(options: SparsityOptions, block_size: int) -> Budget:
    """Of an engine."""
    return Budget(options.kv_budget, options.kv_sink, options.kv_recent, block_size)


class PastDrop(NamedTuple):
    """What a sequence lost once it had ``length`` tokens."""

    length: int
    blocks: list[int]


@dataclass
class BlockScores:
    """The scores of a sequence's blocks since it began, and the blocks that it has lost. A sequence that is computed
    again, behind a preemption or a loss, loses the same blocks at the same tokens: so its tokens attend the same blocks
    as before.
    """

    due: int  # tokens that it has when blocks are dropped next
    window: int  # rows before that which are scored
    left: int = 0  # reports to come
    rows: int = 0  # that were scored since blocks were dropped
    fresh: list[int] = field(default_factory=list)  # sums over these rows, by block
    before: list[int] = field(default_factory=list)  # scores by which blocks were dropped last
    dropped: list[int] = field(default_factory=list)  # ascending
    past: list[PastDrop] = field(default_factory=list)  # the oldest first
    again: list[PastDrop] = field(default_factory=list)  # drops of these that are to be repeated

    @property
    def stop(self) -> int:
        """Tokens that the sequence has when it loses blocks next: no step has rows behind them."""
        return self.again[0].length if self.again else self.due

    def add(self, scores: Sequence[int]) -> None:
        """What one memory worker has told of its heads."""
        self.fresh += [0] * (len(scores) - len(self.fresh))
        for number, score in enumerate(scores):
            self.fresh[number] += score

    def drop(self, length: int, budget: Budget) -> list[int]:
        """The blocks that the sequence of ``length`` tokens loses now; what was scored before counts half."""
        size = -(-length // budget.block_size)
        now, old = (x + [0] * (size - len(x)) for x in (self.fresh, self.before))
        self.before = [a // max(1, self.rows) + b // 2 for a, b in zip(now, old, strict=True)]
        gone = choose(self.before, self.dropped, length, budget)
        self.dropped = sorted([*self.dropped, *gone])
        self.past.append(PastDrop(length, gone))
        self.fresh, self.rows = [], 0
        return gone

    def begin_again(self) -> None:
        """Nothing of the sequence is stored any more, and no report will come."""
        self.fresh, self.rows, self.left, self.again = [], 0, 0, list(self.past)


def free_blocks(length: int, budget: Budget) -> tuple[int, int, int]:
    """Of a sequence of ``length`` tokens the blocks ``low .. high`` that need not stay, and how many of them may."""
    size = budget.block_size
    low, whole = -(-budget.sink // size), -(-length // size)
    high = max(low, (length - budget.recent) // size)
    return low, high, budget.tokens // size - (whole - (high - low))


def choose(scores: Sequence[int], dropped: Collection[int], length: int, budget: Budget) -> list[int]:
    """The blocks that a sequence of ``length`` tokens loses, ascending. ``scores``: by block; ``dropped``: those that
    it has lost before.
    """
    gone, (low, high, _) = set(dropped), free_blocks(length, budget)
    kept = [n for n in range(-(-length // budget.block_size)) if n not in gone]
    free = {n: scores[n] for n in kept if low <= n < high}
    room = budget.tokens // budget.block_size - (len(kept) - len(free))
    if len(free) <= room:
        return []
    pooled = pool(free)
    best = sorted(free, key=lambda n: (pooled[n], scores[n], n), reverse=True)[: max(0, room)]
    return sorted(free.keys() - set(best))


def pool(scores: Mapping[int, int]) -> dict[int, int]:
    """By block: the best score of it and its neighbours."""
    return {n: max(scores.get(m, 0) for m in (n - 1, n, n + 1)) for n in scores}
