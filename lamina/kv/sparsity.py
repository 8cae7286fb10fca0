"""Which blocks of a sequence are kept: scores to blocks. Pure policy: no torch, no I/O, no clock.

Blocks are kept whole, and alike in all heads and layers that drop some. A block counts as much as the best of it and
its neighbours: what is asked for next often lies beside what was attended (pooling, arXiv 2404.14469 section 4). The
first ones (sinks, arXiv 2309.17453) and the most recent ones are always kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.config.sparsity import SparsityOptions

OBSERVED_DECODE_ROWS = 8  # that are scored before blocks are dropped again


class KvBudget(NamedTuple):
    """What a sequence keeps in each sparse layer, or a query attends; in tokens, in whole blocks of ``block_size``."""

    tokens: int
    sink: int
    recent: int
    block_size: int


def kv_budget(options: SparsityOptions, block_size: int) -> KvBudget:
    """Of an engine."""
    return KvBudget(options.kv_budget, options.kv_sink, options.kv_recent, block_size)


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

    num_due: int  # tokens that it has when blocks are dropped next
    observation_window: int  # rows before that which are scored
    num_missing_reports: int = 0  # reports to come
    num_rows: int = 0  # that were scored since blocks were dropped
    new_scores: list[int] = field(default_factory=list)  # sums over these rows, by block
    earlier_scores: list[int] = field(default_factory=list)  # scores by which blocks were dropped last
    dropped_blocks: list[int] = field(default_factory=list)  # ascending
    past_drops: list[PastDrop] = field(default_factory=list)  # the oldest first
    drops_to_repeat: list[PastDrop] = field(default_factory=list)  # drops of these that are to be repeated

    @property
    def next_drop_length(self) -> int:
        """Tokens that the sequence has when it loses blocks next: no step has rows behind them."""
        return self.drops_to_repeat[0].length if self.drops_to_repeat else self.num_due

    def add(self, scores: Sequence[int]) -> None:
        """What one memory worker has told of its heads."""
        self.new_scores += [0] * (len(scores) - len(self.new_scores))
        for number, score in enumerate(scores):
            self.new_scores[number] += score

    def drop(self, length: int, budget: KvBudget) -> list[int]:
        """The blocks that the sequence of ``length`` tokens loses now; what was scored before counts half."""
        size = -(-length // budget.block_size)
        now, old = (x + [0] * (size - len(x)) for x in (self.new_scores, self.earlier_scores))
        self.earlier_scores = [a // max(1, self.num_rows) + b // 2 for a, b in zip(now, old, strict=True)]
        gone = choose_dropped(self.earlier_scores, self.dropped_blocks, length, budget)
        self.dropped_blocks = sorted([*self.dropped_blocks, *gone])
        self.past_drops.append(PastDrop(length, gone))
        self.new_scores, self.num_rows = [], 0
        return gone

    def reset(self) -> None:
        """Nothing of the sequence is stored any more, and no report will come."""
        self.new_scores, self.num_rows, self.num_missing_reports, self.drops_to_repeat = [], 0, 0, list(self.past_drops)


def droppable_blocks(length: int, budget: KvBudget) -> tuple[int, int, int]:
    """Of a sequence of ``length`` tokens the blocks ``low .. high`` that need not stay, and how many of them may."""
    size = budget.block_size
    low, whole = -(-budget.sink // size), -(-length // size)
    high = max(low, (length - budget.recent) // size)
    return low, high, budget.tokens // size - (whole - (high - low))


def choose_dropped(scores: Sequence[int], dropped: Collection[int], length: int, budget: KvBudget) -> list[int]:
    """The blocks that a sequence of ``length`` tokens loses, ascending. ``scores``: by block; ``dropped``: those
    that it has lost before.
    """
    gone, (low, high, _) = set(dropped), droppable_blocks(length, budget)
    kept = [n for n in range(-(-length // budget.block_size)) if n not in gone]
    free = {n: scores[n] for n in kept if low <= n < high}
    room = budget.tokens // budget.block_size - (len(kept) - len(free))
    if len(free) <= room:
        return []
    pooled = pool_neighbours(free)
    best = sorted(free, key=lambda n: (pooled[n], scores[n], n), reverse=True)[: max(0, room)]
    return sorted(free.keys() - set(best))


def pool_neighbours(scores: Mapping[int, int]) -> dict[int, int]:
    """By block: the best score of it and its neighbours."""
    return {n: max(scores.get(m, 0) for m in (n - 1, n, n + 1)) for n in scores}
