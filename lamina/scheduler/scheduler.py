"""The scheduler chooses the rows of each round: continuous batching, chunked prefill, preemption, n batches.

Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.executor import Report
from lamina.protocol.step_plan import Free, SequenceOp, StepPlan, SurvivingKv, Truncate

from .admission import Admission
from .batch import (
    Batch,
    ChunkPolicy,
    apply_locations,
    balance_batches,
    enqueue,
    find_overwritten,
    requeue,
    roll_back_batches,
)
from .fair_order import FairOrder
from .fair_slots import find_exchange
from .feature import Feature, Leaving, Loss, NewMemory, PlanDraft
from .feature_table import FeatureTable
from .kv_manager.allocator import KvAllocator, next_rows
from .preemption import Preemption
from .rotation.pipeline import route
from .scheduler_output import Round, ScheduledStep, TransferResult, commit, round_of
from .sequence import Sequence


class Scheduler:
    """Schedules rounds. A round is one step of every batch that has work.

    All workers run rounds, and the steps of a round, in the given order. So the next plan can use the blocks that a
    plan frees.

    Sequences of one priority run first come, first served. A new sequence joins the batch whose attention reads least,
    and there the KV shard whose memory workers read least. When KV blocks run out, the newest sequence of a batch is
    preempted and its blocks are freed. Later its KV is loaded, or recomputed from its tokens.

    A step is scheduled before the tokens of the previous step are known. So a sequence that ends runs one more row,
    whose token is dropped. The next plan frees its blocks.
    """

    LOOKAHEAD = 1  # rounds that may be queued after the running one

    def __init__(
        self,
        accounting: BlockTables,
        *,
        max_num_seqs: int,
        prefill_chunk: int,
        aligned: bool = False,
        num_batches: int = 1,
        num_layers: int = 1,
        allocator: KvAllocator | None = None,
        features: Iterable[Feature] = (),
    ) -> None:
        """``aligned``: cut prompts at multiples of ``prefill_chunk`` only, whatever else is in the step.

        ``num_layers``: attention operators, over which the steps rotate. ``allocator``: places sequences; None: a new
        one over ``accounting``. ``features``: in the order in which their hooks are called.
        """
        self.epoch = self.num_replicas = 0
        self._max_num_seqs = max_num_seqs
        self._accounting = accounting
        self._chunk_policy = ChunkPolicy(prefill_chunk, aligned)
        self._allocator = allocator or KvAllocator(accounting, max_num_seqs + prefill_chunk)
        self.cordoned = self._allocator.cordoned  # layer groups in which no sequence begins
        self.waiting: deque[Sequence] = deque()  # the next one first
        self._order = FairOrder()
        self.batches = [Batch(i) for i in range(num_batches)]
        self._num_layers = num_layers
        self.features = FeatureTable(features)
        self.admission = Admission(accounting, self._allocator, self._chunk_policy, self.features)
        self._preemption = Preemption(accounting, self._allocator, self.features)
        self._side_steps: list[ScheduledStep] = []  # that features begin; ``take_side_steps`` empties it
        self._pending_ops: list[SequenceOp] = []  # for the next plan
        self._num_batches = num_batches  # from the next round on
        self.rounds_in_flight: list[Round] = []
        self.next_round = 0  # also the number of the round's steps, so that all batches rotate in phase
        self.num_preemptions = 0

    def begin_epoch(self, epoch: int, num_replicas: int) -> None:
        """Set the epoch of the next plans, since workers have connected. ``num_replicas``: 0: as the batches need."""
        self.epoch, self.num_replicas = epoch, num_replicas

    @property
    def num_waiting(self) -> int:
        """The number of waiting sequences, without cancelled ones and those that follow others."""
        return _num_unfinished(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_unfinished(self) -> int:
        """The number of running sequences, without those that leave with the next round."""
        return _num_unfinished(self.running)

    @property
    def running(self) -> list[Sequence]:
        return [s for b in self.batches for s in b.running]

    @property
    def available_blocks(self) -> tuple[int, ...]:
        """Available KV blocks of each layer group: free ones, and those of retained or finished sequences."""
        running = self.running
        if not self.features.eviction_order and not any(s.finished for s in running):
            return self._accounting.free_blocks
        held = self._accounting.count_blocks(s.id for s in running if not s.finished)
        return tuple(total - n for total, n in zip(self._accounting.num_blocks, held, strict=True))

    def cordon(self, groups: Iterable[int]) -> None:
        """Let no new sequence begin in these layer groups, in addition to the cordoned ones."""
        self._allocator.cordoned.update(groups)

    def uncordon(self, groups: Iterable[int]) -> None:
        """Let new sequences begin in these layer groups again."""
        self._allocator.cordoned.difference_update(groups)

    def max_sequences_of(self, length: int) -> float:
        """Return how many sequences of ``length`` tokens have room for their KV at once."""
        return self._allocator.max_sequences(length)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, and those that features add to it."""
        self._queue(sequence)
        for other in self.features.on_arrival(sequence, is_new=True):
            self._queue(other)

    def _queue(self, sequence: Sequence) -> None:
        self._order.stamp(sequence, self.waiting)
        enqueue(self.waiting, sequence)

    @property
    def can_schedule_ahead(self) -> bool:
        """True if one more round can be queued before a step is done."""
        return len(self.rounds_in_flight) <= self.LOOKAHEAD

    @property
    def has_transfers(self) -> bool:
        """True while KV is being saved, loaded, scored or copied."""
        return self.features.has_transfers

    @property
    def must_wait_for_transfer(self) -> bool:
        """True if a transfer holds up a sequence, so that the engine has to wait for it."""
        waits = (s.transfer.awaits_report or s.is_schedulable for s in self.running)
        return self.has_transfers and (self.num_waiting > 0 or any(waits))

    def on_report(self, report: Report) -> TransferResult | None:
        """Process a memory worker's report. Returns the result for a sequence, if this was its last transfer."""
        transfer = self.features.on_report(report)
        if transfer and transfer.loaded_sequence:
            self._pending_ops += self.features.on_loaded(transfer.loaded_sequence)
        return transfer

    def set_num_batches(self, num_batches: int) -> None:
        """Distribute the running sequences over ``num_batches``, once no round is in flight. Until then none starts."""
        self._num_batches = num_batches

    def schedule(self) -> list[ScheduledStep]:
        """The steps of the next round, one for each batch; none if there is no work, or enough in flight."""
        if not self.can_schedule_ahead:
            return []
        if self._num_batches != len(self.batches):
            if self.rounds_in_flight:
                return []
            self.batches = balance_batches(self.running, self._num_batches)
        self.features.begin_round(self)
        self.drop_cancelled()
        self.batches[0].ops += self._pending_ops
        self._pending_ops = []
        for batch in self.batches:
            self._drop_finished(batch)
            batch.ops += self.features.batch_ops(batch.running)
        if self.waiting:
            if self.num_running >= self._max_num_seqs:
                self._make_fair()
            self.admission.admit(self.waiting, self.batches, self._max_num_seqs)
            if self.admission.lacks_blocks:
                self._make_fair()
        self.features.after_admission(self)
        steps = [s for s in map(self._schedule_batch, self.batches) if s is not None]
        for step in steps:
            step.plan = msgspec.structs.replace(step.plan, has_more=step is not steps[-1])
        if steps:
            self.rounds_in_flight.append(round_of(steps, self.batches, follows=bool(self.rounds_in_flight)))
            self.next_round += 1
        return steps

    def _make_fair(self) -> None:
        """Preempt a sequence of a tenant that runs more than its share, for one of a tenant that runs less."""
        if not self._order.has_tenants or (exchange := find_exchange(self.waiting, self.running)) is None:
            return
        first, victim = exchange
        self.preempt(next(b for b in self.batches if victim in b.running), victim)
        self.waiting.remove(first)
        for sequence in (victim, first):  # the first one begins next, and then the other one goes on
            requeue(self.waiting, sequence)
        self.num_preemptions += 1

    def drop_cancelled(self) -> None:
        """Remove sequences that were cancelled while they waited."""
        if ended := [s for s in self.waiting if s.finished]:
            for sequence in ended:
                self._drop_kept(sequence)
            self.waiting = deque(s for s in self.waiting if not s.finished)

    def _drop_kept(self, sequence: Sequence) -> None:
        """Release what features keep for a sequence that has ended without KV in the pool."""
        self._pending_ops += self.features.on_leave(Leaving(sequence)).first

    def new_sequence_id(self) -> int:
        """A sequence id that was never used before."""
        return self.admission.next_sequence_id()

    def preempt(self, batch: Batch, sequence: Sequence) -> None:
        """Stop a running sequence of ``batch`` and free its KV. The caller queues it again."""
        self._preemption.preempt(batch, sequence)

    def take_side_steps(self) -> list[ScheduledStep]:
        """Return the steps of other than compute workers that begin with the last round, once."""
        taken, self._side_steps = self._side_steps, []
        return taken

    def on_step_done(self, step: ScheduledStep) -> None:
        """Process a step that has completed; its tokens are appended."""
        done = None if step.side_worker is not None else self._take_done(step)
        self.features.on_step_done(step, done)

    def _take_done(self, step: ScheduledStep) -> Round | None:
        flight = next(r for r in self.rounds_in_flight if step in r.unfinished_steps)
        flight.unfinished_steps.discard(step)
        if flight.unfinished_steps:
            return None
        self.rounds_in_flight.remove(flight)
        return flight

    def roll_back(
        self, in_flight: Iterable[ScheduledStep], surviving: Callable[[SurvivingKv], int]
    ) -> list[SurvivingKv]:
        """Undo the steps ``in_flight`` and all pending ops. Returns the KV that memory workers keep.

        ``surviving``: how many tokens of a sequence's KV they still have. Sequences without any wait again, oldest
        first, and are recomputed. Numbers of rounds and ids of sequences are never reused.
        """
        for step in in_flight:
            for sequence, rows in zip(step.sequences, step.plan.rows, strict=True):
                if sequence.id == rows.sequence:
                    sequence.num_computed_tokens = min(sequence.num_computed_tokens, rows.first)
        self.rounds_in_flight = []
        sequences = [*self.waiting, *self.running]
        loss, self._pending_ops = Loss(sequences, surviving), []
        self.features.roll_back(loss)
        running, gone = roll_back_batches(self.batches, loss.count, self._drop_kept)
        keep = [*loss.kept, *running]
        self._accounting.reconcile(keep)
        self._reset_sequences([*self.waiting, *gone, *find_overwritten(self._accounting, self.batches, keep)])
        return keep

    def _reset_sequences(self, sequences: Iterable[Sequence]) -> None:
        """Replace the queue by these sequences, without KV. Of one priority the oldest is first."""
        self.waiting = deque(sorted(sequences, key=lambda s: (s.priority, s.fair_stamp, s.request_id, s.output.index)))
        for sequence in self.waiting:
            sequence.roll_back(0)
            sequence.reset_computed()
            self.features.on_arrival(sequence, is_new=False)

    def adopt_memory(self, memory: NewMemory, keep: Iterable[SurvivingKv]) -> list[SurvivingKv]:
        """Go on with other memory workers after ``roll_back``. Returns the new places of KV; running sequences come
        first.
        """
        self._max_num_seqs = memory.max_num_seqs
        self._accounting.replace_with(memory.blocks)
        kept = self._allocator.reassign(keep, self.features.eviction_order[::-1], memory.new_shards)
        self.features.relocate(kept, memory)
        self._accounting.reconcile(kept, moved=True)
        self._reset_sequences([*self.waiting, *apply_locations(self.batches, kept)])
        return kept

    def sequences_without_room(self, blocks: BlockTables) -> int:
        """The number of running sequences whose KV would not fit into other block tables."""
        return self._allocator.num_without_room(blocks, [s for s in self.running if not s.finished])

    def reset_prefix_cache(self, era: bytes = b"") -> None:
        """Drop all retained KV with the next plan. Running sequences retain none. ``era``: that of later pages."""
        for sequence in self.running:
            sequence.do_not_cache = True
        self._pending_ops += self.features.reset(era, [*self.running, *self.waiting])

    def add_pending_ops(self, ops: Iterable[SequenceOp]) -> None:
        """Add ``ops`` to the beginning of the next round's first plan, after those that were added before."""
        self._pending_ops += ops

    def evict_retained(self) -> None:
        """Drop what is retained in the pool. Offloaded pages can still be loaded."""
        self._pending_ops += [self.features.evict(number) for number in self.features.eviction_order]

    def resend_penalties(self) -> None:
        """Send all tokens for penalties with each sequence's next sampling, since compute workers lost their counts."""
        for sequence in self.running:
            sequence.num_tokens_in_penalties = -1

    def _schedule_batch(self, batch: Batch) -> ScheduledStep | None:
        picked, plan = self._pick_rows(batch)
        before = [*batch.ops]
        self.features.extend_plan(
            PlanDraft(
                batch,
                self.next_round,
                picked,
                self._accounting,
                lambda: self._build_plan(batch, picked),
                self._preemption.evict_for,
                self._side_steps,
            )
        )
        if not picked and not batch.ops:
            return None
        if batch.ops != before:
            plan = self._build_plan(batch, picked)
        self._accounting.apply(plan)
        batch.ops = []
        return commit(plan, picked)

    def _drop_finished(self, batch: Batch) -> None:
        """Remove finished sequences, except those whose K and V are still in transfer."""
        ended = [s for s in batch.running if s.finished and not s.transfer.writes_blocks]
        first = self.batches[0].ops
        for sequence in ended:
            op = Free(sequence.id)
            leaving = self.features.on_leave(Leaving(sequence, op))
            retained = isinstance(leaving.op, Truncate)  # then the first plan may evict it
            (first if retained else batch.ops).append(leaving.op or op)
            first += leaving.first
            batch.ops += leaving.own
        batch.running = [s for s in batch.running if s not in ended]

    def _pick_rows(self, batch: Batch) -> tuple[dict[Sequence, int], StepPlan]:
        """Pick the rows of a batch for which there are blocks, preempting if needed. Returns them and their plan."""
        picked = self._chunk_policy.rows_of_batch(batch)
        stuck = self._allocator.place_rows(picked, lambda: (self.running, self.features.eviction_order))
        plan = self._build_plan(batch, picked)
        while stuck or (picked and not self._accounting.can_apply(plan)):
            if (victim := self._preemption.make_room(batch, picked, stuck)) is not None:
                requeue(self.waiting, victim)
                self.num_preemptions += 1
            plan = self._build_plan(batch, picked)
        return picked, plan

    def _build_plan(self, batch: Batch, picked: dict[Sequence, int]) -> StepPlan:
        source, reply_to = self._route(batch.index, self.next_round)
        return StepPlan(
            epoch=self.epoch, batch=batch.index, step=self.next_round, ops=batch.ops, rows=next_rows(picked),
            send_from=source, reply_to=reply_to,
        )  # fmt: skip

    def _route(self, batch: int, step: int) -> tuple[list[int], list[int]]:
        return route(batch, step, self._num_layers, len(self.batches), self.num_replicas)


def _num_unfinished(sequences: Iterable[Sequence]) -> int:
    return sum(not s.finished and s.follows is None for s in sequences)
