"""Live migration: moves KV to other memory workers while sequences decode. Pure policy: no torch, no I/O, no clock.

Borrowed stripes move home once home has room and no sequence waits. Retained KV there is evicted, unless a request
asked to keep it. One copy of a few stripes runs at a time, so little KV exists twice. Until it ends, the sequence keeps
its place, also after a failure. With whole sequences on one worker, they leave memory workers that will be removed, one
by one. A sequence has no rows while it is copied; all others continue.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from itertools import islice
from typing import NamedTuple

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.executor import Report
from lamina.protocol.kv_placement import KvLocation, StripeRun
from lamina.protocol.loan_placement import relocated
from lamina.protocol.step_plan import CommitMigration, CopyStripes, Fork, Free, SequenceOp, StripesCopied, SurvivingKv
from lamina.scheduler.batch import Batch
from lamina.scheduler.feature import Feature, Loss, NewMemory, Scheduling
from lamina.scheduler.scheduler_output import Round, ScheduledStep
from lamina.scheduler.sequence import Sequence

from .allocator import KvAllocator, subtract
from .prefix_cache import PrefixCache
from .spill_placement import SpillAllocator

MAX_STRIPES_PER_COPY = 8
MAX_RETAINED_CHECKED = 8  # retained sequences that are tried for eviction


class _StripeCopy(NamedTuple):
    """A copy in flight. ``source``: the sequence's id. ``run``: its stripes; none: all. ``number``: the copy's id."""

    number: int
    source: int
    run: StripeRun


class KvMigration(Feature):
    """Moves stripes and sequences. ``ranks``: each copies its part; 0, or layers with a window: nothing moves."""

    def __init__(self, accounting: BlockTables, allocator: KvAllocator, prefix_cache: PrefixCache, ranks: int) -> None:
        self.num_moved_blocks = 0  # KV blocks of each layer that were moved
        self.closing_shards: set[int] = set()  # layer groups of memory workers that will be removed
        self._stuck = False  # no sequence that is left there has room elsewhere
        self._accounting, self._allocator, self._prefix_cache = accounting, allocator, prefix_cache
        self._loans = allocator if isinstance(allocator, SpillAllocator) else None
        self._ranks = 0 if any(accounting.windows) else ranks  # blocks that a window has passed are freed
        self._copy: _StripeCopy | None = None
        self._stored, self._failed = 0, False  # ranks that have completed the copy, and if one failed
        self.unsure: dict[int, int] = {}  # sequence -> the step from which all workers know its place
        self._fails = not self._ranks  # no more copies in this epoch

    @property
    def in_flight(self) -> bool:
        """True during a copy, and until all memory workers know the new place."""
        return self._copy is not None or bool(self.unsure) or bool(self.closing_shards)

    @property
    def has_transfers(self) -> bool:
        """True while a memory worker's report on a copy is pending."""
        return self._copy is not None and not self._failed and self._stored < self._ranks

    def close(self, groups: Iterable[int]) -> None:
        """Let whole sequences leave these layer groups, whose memory workers will be removed."""
        self.closing_shards.update(groups)

    def reopen(self, groups: Iterable[int]) -> None:
        """Undo ``close``."""
        self.closing_shards.difference_update(groups)

    def is_drained(self, running: Iterable[Sequence]) -> bool:
        """Return True once every sequence has left that can, and all memory workers know the new places."""
        there = [s for s in running if not s.finished]
        sure = self.unsure.keys().isdisjoint(s.id for s in there)
        return self._copy is None and sure and (self._fails or self._stuck or not any(map(self._is_leaving, there)))

    def on_report(self, report: Report) -> None:
        """Process a memory worker's report on a copy; ignores other reports."""
        if isinstance(report, StripesCopied) and self._copy is not None and report.sequence == self._copy.number:
            self._failed |= bool(report.error)
            self._stored += report.nbytes > 0

    def on_step_done(self, step: ScheduledStep, done: Round | None = None) -> None:
        """Record that memory workers know the places of the sequences in a completed step."""
        if not self.unsure or step.side_worker is not None:
            return
        for rows in step.plan.rows:
            if self.unsure.get(rows.sequence, step.plan.step + 1) <= step.plan.step:
                del self.unsure[rows.sequence]

    def roll_back(self, loss: Loss) -> None:
        """Distrust sequences whose new place not all memory workers know."""
        loss.distrusted.update(self.unsure)
        self._copy, self.unsure, self._fails, self._stuck = None, {}, not self._ranks, False

    def relocate(self, kept: list[SurvivingKv], memory: NewMemory) -> None:
        """Forget the closed groups, since their memory workers have been removed."""
        self.closing_shards.clear()

    def after_admission(self, scheduling: Scheduling) -> None:
        """Add ops that begin or end a copy to the next plans."""
        batches = scheduling.batches
        self.unsure = {s: at for s, at in self.unsure.items() if any(self._accounting.count_blocks([s]))}
        idle = not self.closing_shards and (bool(scheduling.waiting) or self._loans is None)
        if self._copy is None and (self._fails or idle):
            return
        running = {s.id: (s, batch) for batch in batches for s in batch.running if not s.finished}
        if self._copy is not None:
            self._end(self._copy, batches[0], scheduling.next_round, running.get(self._copy.source))
            return
        sequences = [s for s, _ in running.values()]
        due = (
            self._next_leaving(sequences, batches)
            if self.closing_shards
            else self._spilled_sequence(sequences, batches[0])
        )
        if due is not None:
            sequence, run = due
            self._copy = _StripeCopy(scheduling.new_sequence_id(), sequence.id, run)
            self._stored, self._failed = 0, False
            op = CopyStripes(self._copy.number, sequence.id, run.start, run.stop - run.start, run.kv_shard)
            running[sequence.id][1].ops.append(op)

    def _spilled_sequence(self, running: list[Sequence], first: Batch) -> tuple[Sequence, StripeRun] | None:
        """The next sequence with stripes to move home, and these; evicts retained KV for them."""
        if not any(s.location.moved_runs for s in running):
            return None
        due = self._next_copy(running, self._allocator.free_after(running, {}))
        if due is None:
            first.ops += self._evict_one(running)
        return due

    def _next_leaving(self, running: list[Sequence], batches: Several[Batch]) -> tuple[Sequence, StripeRun] | None:
        """The next sequence to leave a closed group, which is the first one with room; evicts retained KV for it."""
        there = [s for s in running if self._is_leaving(s)]
        ready = [s for s in there if self._can_move(s)]
        left = self._allocator.free_after(running, {})
        for sequence in running:
            left = subtract(left, self._allocator.max_blocks(sequence.location, 1))  # for the rows of this round
        sources = {op.source for batch in batches for op in batch.ops if isinstance(op, Fork)}
        gone = list[int]()
        for number in [None, *(n for n in self._prefix_cache.eviction_order if n not in sources)]:
            if number is not None:
                own = self._accounting.exclusive_blocks(number)
                if not any(n for group, n in enumerate(own) if group not in self.closing_shards):
                    continue
                left, gone = [n + more for n, more in zip(left, own, strict=True)], [*gone, number]
            for sequence in ready:
                if (lane := self._shard_with_room(sequence, left)) is not None:
                    batches[0].ops += [self._prefix_cache.evict(n) for n in gone]
                    sequence.set_transfer(is_migrating=True)
                    return sequence, StripeRun(0, 0, lane)
        self._stuck = len(ready) == len(there)
        return None

    def _shard_with_room(self, sequence: Sequence, left: list[int]) -> int | None:
        """The KV shard with the most room, if that is enough for the sequence."""
        rests = dict[int, int]()
        for lane in range(self._accounting.num_kv_shards):
            groups = self._groups(lane)
            rest = subtract(
                left, self._allocator.max_blocks(KvLocation(lane), sequence.num_tokens_with_placeholders + 1)
            )
            if groups.isdisjoint(self._allocator.cordoned | self.closing_shards) and min(rest[g] for g in groups) >= 0:
                rests[lane] = min(rest[g] for g in groups)
        return max(rests, key=rests.__getitem__, default=None)

    def _groups(self, kv_shard: int) -> set[int]:
        return {group for group, lanes in enumerate(self._accounting.kv_shards) if kv_shard in lanes}

    def _is_leaving(self, sequence: Sequence) -> bool:
        return bool(self.closing_shards) and not self._groups(sequence.location.kv_shard).isdisjoint(
            self.closing_shards
        )

    def _end(self, copy: _StripeCopy, first: Batch, step: int, of: tuple[Sequence, Batch] | None) -> None:
        """End a copy: the sequence gets its new place, or the copy is freed if it is not needed any more."""
        place = self._new_location(of[0], copy.run) if of is not None else None
        if of is None or place is None or self._failed:
            first.ops.append(Free(copy.number))
            self._copy, self._fails = None, self._failed
            if of is not None:
                of[0].set_transfer(is_migrating=False)
        elif self._stored >= self._ranks:
            sequence, batch = of
            batch.ops.append(CommitMigration(sequence.id, copy.number, place))
            sequence.location, self.unsure[sequence.id] = place, step
            stripes, whole = (
                copy.run.stop - copy.run.start,
                -(-sequence.num_computed_tokens // self._accounting.block_size),
            )
            self.num_moved_blocks += stripes * self._accounting.placement.stripe or whole
            self._copy = None
            sequence.set_transfer(is_migrating=False)

    def _next_copy(self, running: list[Sequence], blocks: list[int]) -> tuple[Sequence, StripeRun] | None:
        """The next stripes to copy into ``blocks``: the last ones of a run that fit at home. Shared stripes stay."""
        assert self._loans is not None
        assert self._loans.spill is not None  # for there are stripes on loan
        room = self._loans.spill.free_stripes(blocks)
        for sequence in (s for s in running if s.location.moved_runs and self._can_move(s)):
            home = sequence.location.kv_shard
            spare = room.get(home, 0) - sum(s.location.kv_shard == home for s in running)
            for run in reversed(sequence.location.moved_runs):
                stop = self._whole(sequence, run)
                count = min(spare, MAX_STRIPES_PER_COPY, stop - run.start)
                part = StripeRun(stop - count, stop, home)
                alone = count > 0 and self._accounting.holds_exclusively(sequence.id, part.start * self._stripe_tokens)
                if alone and self._new_location(sequence, part) is not None:
                    return sequence, part
        return None

    def _evict_one(self, running: list[Sequence]) -> list[SequenceOp]:
        """Evict the oldest retained sequence without a lease, if without the oldest few stripes could move home."""
        few = [
            (n, self._accounting.exclusive_blocks(n))
            for n in islice(self._prefix_cache.evictable_first(), MAX_RETAINED_CHECKED)
        ]
        blocks = [
            sum(each) for each in zip(self._allocator.free_after(running, {}), *(own for _, own in few), strict=True)
        ]
        if not few or (due := self._next_copy(running, blocks)) is None:
            return []
        there = [group for group, lanes in enumerate(self._accounting.kv_shards) if due[1].kv_shard in lanes]
        oldest = next((n for n, own in few if any(own[group] for group in there)), None)
        return [] if oldest is None else [self._prefix_cache.evict(oldest)]

    def _new_location(self, sequence: Sequence, run: StripeRun) -> KvLocation | None:
        if not self._accounting.placement.stripe:
            return KvLocation(run.kv_shard)
        return relocated(sequence.location, run, -(-sequence.num_computed_tokens // self._stripe_tokens))

    def _whole(self, sequence: Sequence, run: StripeRun) -> int:
        """Return the end of the stripes that are completely written, or will be by steps in flight; 0: none."""
        stop = min(run.stop, sequence.num_computed_tokens // self._stripe_tokens)
        return stop if stop > run.start else 0

    @property
    def _stripe_tokens(self) -> int:
        return self._accounting.placement.stripe * self._accounting.block_size

    @staticmethod
    def _can_move(sequence: Sequence) -> bool:
        return sequence.is_decoding and not sequence.transfer.lacks_kv and sequence.follows is None
