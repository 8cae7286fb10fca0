"""The blocks of a sequence that KV sparsity keeps, chosen by scores. Pure policy: no torch, no I/O, no clock.

Whole blocks are kept, the same in all sparse heads and layers. A block counts as much as the best of it and its
neighbours, since queries often need tokens next to those attended before (pooling, arXiv 2404.14469 section 4). The
first blocks (sinks, arXiv 2309.17453) and the most recent ones are always kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.config.sparsity import SparsityOptions

OBSERVED_DECODE_ROWS = 8  # rows that are scored before blocks are dropped again


class KvBudget(NamedTuple):
    """The tokens that a sequence keeps in each sparse layer, or that a query attends, in blocks of ``block_size``."""

    tokens: int
    sink: int
    recent: int
    block_size: int


def kv_budget(options: SparsityOptions, block_size: int) -> KvBudget:
    """Return the budget of an engine."""
    return KvBudget(options.kv_budget, options.kv_sink, options.kv_recent, block_size)


class PastDrop(NamedTuple):
    """The blocks that a sequence dropped when it had ``length`` tokens."""

    length: int
    blocks: list[int]


@dataclass
class BlockScores:
    """The scores of a sequence's blocks since it began, and the blocks that it has dropped. A sequence that is computed
    again, after a preemption or a loss, drops the same blocks at the same lengths. So its tokens attend the same blocks
    as before.
    """

    num_due: int  # the length at which blocks are dropped next
    observation_window: int  # rows before that which are scored
    num_missing_reports: int = 0  # reports that are still to come
    num_rows: int = 0  # rows that were scored since blocks were last dropped
    new_scores: list[int] = field(default_factory=list)  # sums over these rows, by block
    earlier_scores: list[int] = field(default_factory=list)  # the scores by which blocks were last dropped
    dropped_blocks: list[int] = field(default_factory=list)  # ascending
    past_drops: list[PastDrop] = field(default_factory=list)  # the oldest first
    drops_to_repeat: list[PastDrop] = field(default_factory=list)  # past drops that are to be repeated

    @property
    def next_drop_length(self) -> int:
        """The length at which the sequence drops blocks next; no step has rows after it."""
        return self.drops_to_repeat[0].length if self.drops_to_repeat else self.num_due

    def add(self, scores: Sequence[int]) -> None:
        """Add the scores that one memory worker reports for its heads."""
        self.new_scores += [0] * (len(scores) - len(self.new_scores))
        for number, score in enumerate(scores):
            self.new_scores[number] += score

    def drop(self, length: int, budget: KvBudget) -> list[int]:
        """Drop blocks of the sequence at ``length`` tokens, and return them. Earlier scores count half."""
        size = -(-length // budget.block_size)
        now, old = (x + [0] * (size - len(x)) for x in (self.new_scores, self.earlier_scores))
        self.earlier_scores = [a // max(1, self.num_rows) + b // 2 for a, b in zip(now, old, strict=True)]
        gone = choose_dropped(self.earlier_scores, self.dropped_blocks, length, budget)
        self.dropped_blocks = sorted([*self.dropped_blocks, *gone])
        self.past_drops.append(PastDrop(length, gone))
        self.new_scores, self.num_rows = [], 0
        return gone

    def reset(self) -> None:
        """Note that nothing of the sequence is stored any more, and that no report will come."""
        self.new_scores, self.num_rows, self.num_missing_reports, self.drops_to_repeat = [], 0, 0, list(self.past_drops)


def droppable_blocks(length: int, budget: KvBudget) -> tuple[int, int, int]:
    """Return the blocks ``low .. high`` of a sequence that may be dropped, and how many of them may stay."""
    size = budget.block_size
    low, whole = -(-budget.sink // size), -(-length // size)
    high = max(low, (length - budget.recent) // size)
    return low, high, budget.tokens // size - (whole - (high - low))


def choose_dropped(scores: Sequence[int], dropped: Collection[int], length: int, budget: KvBudget) -> list[int]:
    """Return the blocks that a sequence of ``length`` tokens drops, ascending. ``scores``: by block. ``dropped``:
    blocks that it has dropped before.
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
    """Return, for each block, the best score of it and its neighbours."""
    return {n: max(scores.get(m, 0) for m in (n - 1, n, n + 1)) for n in scores}
