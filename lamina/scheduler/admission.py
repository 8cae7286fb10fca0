"""Admission: lets waiting sequences join batches, chooses how they begin, and evicts retained KV for them.

Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import Fork

from .batch import Batch, ChunkPolicy
from .feature_table import FeatureTable
from .kv_manager.allocator import Allocation, KvAllocator, subtract
from .sequence import Sequence
from .starts import Candidates, DecodePlacement, KvStart, Verdict, start_op


@dataclass
class _RoundBudget:
    """The budget of a round for new sequences: prompt tokens and the load of attention by batch, and blocks."""

    batches: Several[Batch]
    budgets: list[int]
    loads: list[int]
    left: list[int]


class Admission:
    """Admits waiting sequences."""

    def __init__(
        self, accounting: BlockTables, allocator: KvAllocator, cuts: ChunkPolicy, features: FeatureTable
    ) -> None:
        self._accounting, self._allocator, self._chunk_policy = accounting, allocator, cuts
        self._features = features
        self.next_id = 0
        self.lacks_blocks = False  # after ``admit``: whether the first waiting sequence waits for blocks

    def next_sequence_id(self) -> int:
        """Return a sequence id that was never used before."""
        self.next_id += 1
        return self.next_id - 1

    def admit(self, waiting: deque[Sequence], batches: Several[Batch], max_num_seqs: int) -> None:
        """Let waiting sequences join batches while all of their known tokens have room, and fewer than ``max_num_seqs``
        run.

        A sequence without room holds up later ones, so that none starves; a follower holds up none. A sequence joins
        the batch with the least load among those whose next chunk has room, so all chunks are filled. Blocks of ended
        and preempted sequences are free from the next round on.
        """
        running, self.lacks_blocks = _running(batches), False
        if running and waiting and self._must_wait(waiting[0]):
            self.lacks_blocks = True
            return
        wanted = [self._chunk_policy.rows_of_batch(batch) for batch in batches]
        budgets = [self._chunk_policy.chunk - sum(c for c in w.values() if c > 1) for w in wanted]
        left = self._allocator.free_after(running, {s: c for w in wanted for s, c in w.items()})
        here = _RoundBudget(batches, budgets, [b.load for b in batches], left)
        aside = list[Sequence]()  # those that wait for KV that others load
        while waiting and len(_running(batches)) < max_num_seqs:
            begins = self._begin(waiting[0], here)
            if begins is Verdict.HOLDS_UP and waiting[0].follows is None:
                break
            sequence = waiting.popleft()
            if begins is not Verdict.BEGINS:
                aside.append(sequence)
        waiting.extendleft(reversed(aside))

    def _begin(self, sequence: Sequence, here: _RoundBudget) -> Verdict:
        """Let the first waiting sequence join a batch, if it can."""
        candidates = Candidates(sequence, here.batches, self._chunk_policy)
        self._features.find_starts(candidates)
        if candidates.verdict is not Verdict.BEGINS:
            return candidates.verdict
        able = self._batches_with_rows(candidates, here.budgets)
        if not able or sequence.num_output_placeholders:
            return Verdict.HOLDS_UP  # preempted, and its last token is still being sampled
        to = min(able, key=here.loads.__getitem__)
        fit = self._find_room(candidates, here, here.batches[to])
        if fit is None:
            self.lacks_blocks = True
            return Verdict.HOLDS_UP
        here.left = subtract(here.left, fit.blocks)
        reason = _reason(candidates, fit)
        candidates.placement = DecodePlacement(to, tuple(here.loads), fit.location, reason, here.left)
        here.loads[to] += sequence.num_tokens_with_placeholders
        self._join(candidates, here.batches[to], fit)
        if not candidates.rows.on_prefill_worker and not sequence.transfer.loading_tokens:
            missing = sequence.num_tokens_with_placeholders - sequence.num_computed_tokens
            here.budgets[to] -= self._chunk_policy.next_chunk(missing, here.budgets[to], sequence.num_computed_tokens)
        return Verdict.BEGINS

    def _must_wait(self, first: Sequence) -> bool:
        """True if the first waiting sequence cannot start now, nor can later ones. Must be fast; False may be wrong."""
        return first.follows is None and not self._features.may_start(first) and self._allocator.can_never_fit(first)

    def _batches_with_rows(self, candidates: Candidates, budgets: list[int]) -> list[int]:
        """The batches that a sequence may join, and whose next chunk has room for some of its tokens."""
        sequence, begun = candidates.sequence, candidates.num_stored_tokens
        missing = sequence.num_tokens_with_placeholders - begun
        is_loaded = any(start.source is None for start in candidates.starts[:1])  # so its chunk has no rows of it yet
        able = [
            i
            for i, budget in enumerate(budgets)
            if is_loaded or self._chunk_policy.next_chunk(missing, budget, begun) > 0
        ]
        if (other := sequence.follows) is not None:
            able = [i for i in able if other in candidates.batches[i].running]
        return able

    def _find_room(self, candidates: Candidates, here: _RoundBudget, batch: Batch) -> Allocation | None:
        """The allocation for the best start that has room; None if none has."""
        ways: list[KvStart | None] = [*candidates.starts, *([None] if candidates.may_begin_anew else ())]
        for way in ways:
            fit, here.left = self._evict_for(here.batches, batch, candidates, way, here.left)
            if fit is not None:
                return fit
        return None

    def _join(self, candidates: Candidates, batch: Batch, fit: Allocation) -> None:
        sequence, start = candidates.sequence, fit.start
        sequence.id, sequence.location = self.next_sequence_id(), fit.location
        op = start_op(sequence, start)
        sequence.num_computed_tokens = sequence.num_cached_tokens = op.length if isinstance(op, Fork) else 0
        first = candidates.batches[0] if isinstance(op, Fork) else batch
        first.ops.append(op)  # before another batch's plan may free its source
        batch.running.append(sequence)
        batch.ops += self._features.on_started(candidates, start)

    def _evict_for(
        self,
        batches: Several[Batch],
        batch: Batch,
        candidates: Candidates,
        start: KvStart | None,
        left: list[int],
    ) -> tuple[Allocation | None, list[int]]:
        """Find an allocation for a waiting sequence by evicting retained ones. Returns it with the blocks left before.

        The least recently used are evicted first, and only if that suffices. If nothing runs, all are evicted, since
        blocks that they share are free in the next round only. The source of its start stays, and so do the sources of
        this round's forks.
        """
        running, gone, more = _running(batches), list[int](), left
        sources = {op.source for each in batches for op in each.ops if isinstance(op, Fork)}
        sources |= {start.source} if start is not None and start.source is not None else set()
        oldest = self._oldest(sources)
        while (
            fit := self._allocator.find_room(candidates.sequence, start, more, batch.running, running, candidates.near)
        ) is None:
            number = next(oldest, None)
            if number is None:
                break
            more = [n + own for n, own in zip(more, self._accounting.exclusive_blocks(number), strict=True)]
            gone.append(number)
        if fit is None and (running or start is not None):
            return None, left
        batches[0].ops += [self._features.evict(number) for number in gone]
        return fit, more

    def _oldest(self, kept: set[int]) -> Iterator[int]:
        yield from (n for n in self._features.eviction_order if n not in kept)


def _running(batches: Several[Batch]) -> list[Sequence]:
    return [s for b in batches for s in b.running]


def _reason(candidates: Candidates, fit: Allocation) -> str:
    """Return the reason for a sequence's place, for the decision log."""
    if fit.start is not None:
        return "its beginning is loaded there" if fit.start.source is None else "its beginning lies there"
    return "others with its affinity key lie there" if candidates.near == fit.location else "so all have their parts"
