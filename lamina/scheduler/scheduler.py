"""Who is in the next round: continuous batching, chunked prefill, preemption, n batches. Pure policy: no torch, no I/O,
no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec

from lamina.protocol.executor import Report
from lamina.protocol.offload_messages import LoadReady, TransferDone
from lamina.protocol.sparse_ops import BlockScoresReport
from lamina.protocol.step_plan import SequenceOp, StepPlan, SurvivingKv, Truncate

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
from .kv_manager.allocator import NO_SHARDS, KvAllocator, next_rows
from .kv_manager.block_accounting import BlockAccounting, Blocks
from .kv_manager.in_flight_transfers import TransferResult
from .kv_manager.migration import KvMigration
from .kv_manager.offload_index import OffloadIndex
from .kv_manager.prefix_cache import PrefixCache
from .kv_manager.session_cache import SessionCache
from .kv_manager.swap import SwapPolicy
from .preemption import Preemption
from .prefill_dispatch import PrefillDispatcher
from .prefill_grants import grant_chunks
from .rotation.pipeline import route
from .scheduler_output import Round, ScheduledStep, commit, round_of
from .sequence import ReferenceSequence, Sequence
from .sessions.session_table import SessionName
from .sparsity.pruning import BlockPruner, row_ops
from .sparsity.reference_decode import ReferenceDecoder


class Scheduler:
    """Schedules rounds: one step of every batch that has something to do. Everybody serves rounds, and the steps of a
    round, in the order given; so the blocks that a plan gives back are free for the next plan.

    First come, first served, of one priority. A new sequence joins the batch whose attention reads least, and in it the
    KV shard whose memory workers read least. The newest sequence of a batch is preempted when KV blocks run out: its
    blocks are freed; when there is room again its KV is loaded, or rebuilt from its tokens, so nothing is lost.

    Membership of a step is fixed before the tokens of the step before are known. A sequence that turns out to be
    finished thus runs one row too many, whose token is dropped; its blocks are freed by the next plan.
    """

    LOOKAHEAD = 1  # rounds that may be queued behind the running one

    def __init__(
        self,
        accounting: BlockAccounting,
        *,
        max_num_seqs: int,
        prefill_chunk: int,
        aligned: bool = False,
        num_batches: int = 1,
        num_layers: int = 1,
        num_replicas: int = 0,
        prefill: PrefillDispatcher | None = None,
        prefix_cache: PrefixCache | None = None,
        offload_index: OffloadIndex | None = None,
        swap: SwapPolicy | None = None,
        pruner: BlockPruner | None = None,
        reference_decoder: ReferenceDecoder | None = None,
        homes: int = 0,
        moving_ranks: int = 0,
        epoch: int = 0,
    ) -> None:
        """``aligned``: cut prompts at multiples of ``prefill_chunk`` only, whatever else is in the step.
        ``num_layers``: attention operators, over which the steps rotate. ``num_replicas``: 0 = as many as the batches
        need. ``prefill``: who computes the prompts; None = the batches do. ``prefix_cache``: what is kept of finished
        sequences; None = nothing. ``offload_index``: where it is kept besides; None = nowhere; ``swap``: so too that of
        preempted ones. ``pruner``: how sparse sequences lose blocks; None = there are none. ``reference_decoder``: what
        measures their errors; None = nothing does. ``homes``: memory workers on which sequences begin, the first ones;
        0 = all. ``moving_ranks``: whose stripes may move; 0 = none may. ``epoch``: of the first plans.
        """
        self.epoch = epoch
        self._accounting = accounting
        self._chunk_policy = ChunkPolicy(prefill_chunk, aligned)
        self._allocator = KvAllocator(accounting, max_num_seqs + prefill_chunk, homes)
        self.cordoned = self._allocator.cordoned  # groups in which no sequence begins
        self.waiting: deque[Sequence] = deque()  # the next one first
        self.batches = [Batch(i) for i in range(num_batches)]
        self._num_layers, self.num_replicas = num_layers, num_replicas
        self.prefill = prefill or PrefillDispatcher(0, prefill_chunk, num_batches)
        self.prefix_cache = prefix_cache or PrefixCache(accounting, 0)
        self.migration = KvMigration(accounting, self._allocator, self.prefix_cache, moving_ranks)
        self.sessions = self.prefix_cache.sessions
        self.session_cache = SessionCache(self.prefix_cache, accounting, offload_index)
        self.offload_index, self.swap = offload_index, swap
        self.pruner, self.reference_decoder = pruner, reference_decoder
        self._admission = Admission(
            accounting,
            self._allocator,
            self._chunk_policy,
            self.prefill,
            self.prefix_cache,
            offload_index,
            swap,
            max_num_seqs,
            self.session_cache,
        )
        self._preemption = Preemption(accounting, self._allocator, self.prefix_cache, self.prefill, swap)
        self._prefill_steps: list[ScheduledStep] = []  # for prefill workers, not taken yet
        self._pending_ops: list[SequenceOp] = []  # for the next plan
        self._num_batches = num_batches  # from the next round on
        self._in_flight: list[Round] = []
        self._next_round = 0  # also the number of its steps, so that all batches rotate in one phase
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without rows that are not finished: a cancelled one stays in line until the next round. Shadows are
        nobody's.
        """
        return self._num_schedulable(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_unfinished(self) -> int:
        """Of those that run: a finished one leaves with the next round."""
        return self._num_schedulable(self.running)

    def _num_schedulable(self, sequences: Iterable[Sequence]) -> int:
        if self.reference_decoder is None:
            return sum(not s.finished for s in sequences)
        return sum(not s.finished and not isinstance(s, ReferenceSequence) for s in sequences)

    @property
    def running(self) -> list[Sequence]:
        return [s for b in self.batches for s in b.running]

    @property
    def free_blocks(self) -> Blocks:
        """KV blocks that sequences can still have: free ones, and those of retained or finished sequences."""
        running = self.running
        if not self.prefix_cache.num_retained and not any(s.finished for s in running):
            return self._accounting.free_blocks
        held = self._accounting.count_blocks(s.id for s in running if not s.finished)
        return tuple(total - n for total, n in zip(self._accounting.num_blocks, held, strict=True))

    @property
    def borrowed_blocks(self) -> list[int] | None:
        """KV blocks of running sequences by the layer group that lends them; None where none does."""
        return self._allocator.spill.borrowed_blocks(self.running) if self._allocator.spill else None

    def max_sequences_of(self, length: int) -> float:
        """How many of ``length`` tokens have room for their KV at once."""
        return self._allocator.max_sequences(length, self.pruner.max_kept_tokens if self.pruner else 0)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, and its shadow where it gets one."""
        enqueue(self.waiting, sequence)
        self.prefill.on_arrival(sequence)
        if self.reference_decoder and (shadow := self.reference_decoder.on_admitted(sequence)):
            enqueue(self.waiting, shadow)

    @property
    def can_schedule_ahead(self) -> bool:
        """Whether one more round can be queued before a step is done."""
        return len(self._in_flight) <= self.LOOKAHEAD

    @property
    def has_transfers(self) -> bool:
        """Whether KV is being saved, loaded, scored or copied."""
        return any(
            (
                self.offload_index and self.offload_index.has_transfers,
                self.pruner and self.pruner.awaits_scores,
                self.migration.awaits_reports,
            )
        )

    @property
    def must_wait_for_transfer(self) -> bool:
        """Whether somebody has to wait for that, if nothing else is under way."""
        waits = (
            s.num_loading_tokens or s.awaits_block_scores or s.is_migrating or s.is_schedulable for s in self.running
        )
        return self.has_transfers and (self.num_waiting > 0 or any(waits))

    def on_report(self, report: Report) -> TransferResult | None:
        """A memory worker has done something. What has become of all of a sequence, if that was its last transfer."""
        self.migration.on_copied(report)
        if isinstance(report, BlockScoresReport) and self.pruner:
            self.pruner.on_scores(report)
        if isinstance(report, LoadReady) and self.offload_index:
            self.offload_index.on_load_ready(report)
        transfer = (
            self.offload_index.on_transfer_done(report)
            if self.offload_index and isinstance(report, TransferDone)
            else None
        )
        if transfer and transfer.loaded_sequence:
            self._forget_swapped(transfer.loaded_sequence)
        return transfer

    def set_num_batches(self, num_batches: int) -> None:
        """Deal the running sequences to so many batches, once nothing is in flight; no round is scheduled before."""
        self._num_batches = num_batches

    def schedule(self) -> list[ScheduledStep]:
        """The next round, by batch; empty if there is nothing to do, or too much of it in flight."""
        if not self.can_schedule_ahead:
            return []
        if self._num_batches != len(self.batches):
            if self._in_flight:
                return []
            ReferenceDecoder.drop(self.running)
            self.batches = balance_batches(self.running, self._num_batches)
        if self.reference_decoder:
            self.reference_decoder.update(self.batches, self.waiting, self._preemption)
        self.drop_cancelled()
        self.batches[0].ops += [*self._pending_ops, *(self.offload_index.pending_ops() if self.offload_index else [])]
        self._pending_ops = []
        for batch in self.batches:
            self._drop_finished(batch)
            batch.ops += self.pruner.prune_ops(batch.running) if self.pruner else []
            batch.ops += self.offload_index.save_filled(batch.running) if self.offload_index else []
        if self.waiting or (self.offload_index and self.offload_index.hints):
            self._admission.admit(self.waiting, self.batches)
        self.migration.add_ops(
            self.batches, self._next_round, self._admission.next_sequence_id, crowded=bool(self.waiting)
        )
        steps = [s for s in map(self._schedule_batch, self.batches) if s is not None]
        for step in steps:
            step.plan = msgspec.structs.replace(step.plan, has_more=step is not steps[-1])
        if steps:
            self._in_flight.append(round_of(steps, self.batches, follows=bool(self._in_flight)))
            self._next_round += 1
        return steps

    def drop_cancelled(self) -> None:
        """Let go of sequences that were cancelled while they waited."""
        if ended := [s for s in self.waiting if s.finished]:
            for sequence in ended:
                self._forget_swapped(sequence)
                self.prefill.slo_admission.remove(sequence)
            self.waiting = deque(s for s in self.waiting if not s.finished)

    def _forget_swapped(self, sequence: Sequence) -> None:
        if self.swap:
            self._pending_ops += self.swap.drop(sequence)

    def take_prefill_steps(self) -> list[ScheduledStep]:
        """The steps of prefill workers that the last round has granted."""
        taken, self._prefill_steps = self._prefill_steps, []
        return taken

    def on_step_done(self, step: ScheduledStep) -> Round | None:
        """The step is done and its tokens have been appended; returns its round if that is done now."""
        if step.prefill_worker is not None:
            self.prefill.on_chunk_stored(step, step.prefill_worker)
            return None
        self.prefill.slo_admission.on_inline_sampled(step.sampled_sequences)
        self.migration.on_step_done(step.plan)
        flight = next(r for r in self._in_flight if step in r.unfinished_steps)
        flight.unfinished_steps.discard(step)
        if flight.unfinished_steps:
            return None
        self._in_flight.remove(flight)
        return flight

    def roll_back(
        self, in_flight: Iterable[ScheduledStep], surviving: Callable[[SurvivingKv], int]
    ) -> list[SurvivingKv]:
        """Take back the steps ``in_flight``, and whatever was to follow them. Returns what memory workers are to keep,
        and no more; ``surviving``: how much they have of what one sequence would keep. Who has nothing is computed
        anew, oldest first. Numbers of rounds and sequences never go back. Between two rounds no ops and no chunks wait.
        """
        for step in in_flight:
            for sequence, rows in zip(step.sequences, step.plan.rows, strict=True):
                if sequence.id == rows.sequence:
                    sequence.num_computed_tokens = min(sequence.num_computed_tokens, rows.first)
        self._in_flight = []
        ReferenceDecoder.drop((*self.waiting, *self.running))
        self.prefill.roll_back(s for s in (*self.waiting, *self.running) if s.finished)
        if self.offload_index:
            self.offload_index.cancel_transfers()
        if self.pruner:
            self.pruner.reset()
        self._pending_ops = []
        surviving = self.migration.roll_back(surviving)
        keep = self.prefix_cache.keep_surviving(surviving)
        running, gone = roll_back_batches(self.batches, surviving, self._forget_swapped)
        keep += running
        self._accounting.reconcile(keep)
        self._reset_sequences([*self.waiting, *gone, *find_overwritten(self._accounting, self.batches, keep)])
        return keep

    def _reset_sequences(self, sequences: Iterable[Sequence]) -> None:
        """They are all that wait, oldest first of those with one priority."""
        self.waiting = deque(sorted(sequences, key=lambda s: (s.priority, s.request_id, s.output.index)))
        for sequence in self.waiting:
            sequence.roll_back(0)
            sequence.reset_computed()
            self.prefill.on_arrival(sequence)

    def adopt_blocks(
        self, blocks: BlockAccounting, keep: Iterable[SurvivingKv], new_shards: Mapping[int, int] = NO_SHARDS
    ) -> list[SurvivingKv]:
        """Have other blocks, behind ``roll_back``. Where KV is to lie, what runs first (``new_shards``: see
        EpochChanged)."""
        self.migration.closing_shards.clear()
        self._accounting.replace_with(blocks)
        kept = self._allocator.reassign(keep, self.prefix_cache.eviction_order[::-1], new_shards)
        self.prefix_cache.relocate(kept)
        self._accounting.reconcile(kept, moved=True)
        self._reset_sequences([*self.waiting, *apply_locations(self.batches, kept)])
        return kept

    def sequences_without_room(self, blocks: BlockAccounting) -> int:
        """Running sequences whose KV has no room in other blocks."""
        return self._allocator.num_without_room(blocks, [s for s in self.running if not s.finished])

    def reset_prefix_cache(self, era: bytes = b"") -> None:
        """Give up what is retained, with the next plan. What runs leaves nothing. ``era``: of pages from now on."""
        self._pending_ops += self.prefix_cache.clear()
        for sequence in self.running:
            sequence.do_not_cache = True
        if self.offload_index:
            self.offload_index.reset(era, (*self.running, *self.waiting))

    def drop_session(self, name: SessionName) -> bool:
        """Forget a session, and give up its KV with the next plan. False: there is no such session."""
        ops = self.session_cache.drop_session(name, self.running)
        self._pending_ops += ops or []
        return ops is not None

    @property
    def has_pending_ops(self) -> bool:
        """Whether memory workers are to be told of something, if nothing else is to be done."""
        return bool(self._pending_ops) or bool(self.offload_index and self.offload_index.has_pending_ops)

    def evict_retained(self) -> None:
        """The same of the pools alone: what is kept beside them can be loaded."""
        self._pending_ops += [self.prefix_cache.evict(number) for number in self.prefix_cache.eviction_order]

    def resend_penalties(self) -> None:
        """Compute workers count no tokens any more for penalties: the next draw of each sequence tells all."""
        for sequence in self.running:
            sequence.num_tokens_in_penalties = -1

    def _schedule_batch(self, batch: Batch) -> ScheduledStep | None:
        picked, plan = self._pick_rows(batch)
        if not any(s.is_schedulable and s not in picked for s in batch.running):  # that waits for blocks
            granted, chunks = grant_chunks(
                self.prefill, self._accounting, batch, picked, self._build_plan, self._preemption
            )
            plan, self._prefill_steps = granted or plan, self._prefill_steps + chunks
        if not picked and not batch.ops:
            return None
        ops = [*batch.ops, *row_ops(picked, self.pruner)]
        ops = self.offload_index.assign_ids(ops) if self.offload_index else ops
        if ops != batch.ops:
            batch.ops = ops
            plan = self._build_plan(batch, picked)
        self._accounting.apply(plan)
        batch.ops = []
        return commit(plan, picked)

    def _drop_finished(self, batch: Batch) -> None:
        """Those whose K and V are still on their way stay until these have come."""
        ended = [
            s for s in batch.running if s.finished and not s.num_pending_prefill_chunks and not s.num_loading_tokens
        ]
        first = self.batches[0].ops
        for sequence in ended:
            self.prefill.remove(sequence)
            for op in self.prefix_cache.retain_or_free(sequence):  # a retained one may be evicted by the first plan
                (first if isinstance(op, Truncate) else batch.ops).append(op)
                first += self.session_cache.on_turn_end(sequence, op)
        batch.running = [s for s in batch.running if s not in ended]

    def _pick_rows(self, batch: Batch) -> tuple[dict[Sequence, int], StepPlan]:
        """What it wants, as far as there are blocks, and the plan for it."""
        picked = self._chunk_policy.rows_of_batch(batch)
        loans, free = (
            self._allocator.spill,
            lambda: self._allocator.available_blocks(self.running, self.prefix_cache.eviction_order),
        )
        stuck = loans.spill_next_stripes(picked, free) if loans else []
        plan = self._build_plan(batch, picked)
        while stuck or (picked and not self._accounting.can_apply(plan)):
            if (victim := self._preemption.free_blocks(batch, picked, stuck)) is not None:
                requeue(self.waiting, victim)
                self.num_preemptions += 1
            plan = self._build_plan(batch, picked)
        return picked, plan

    def _build_plan(self, batch: Batch, picked: dict[Sequence, int]) -> StepPlan:
        source, reply_to = self._route(batch.index, self._next_round)
        return StepPlan(
            epoch=self.epoch, batch=batch.index, step=self._next_round, ops=batch.ops, rows=next_rows(picked),
            send_from=source, reply_to=reply_to,
        )  # fmt: skip

    def _route(self, batch: int, step: int) -> tuple[list[int], list[int]]:
        return route(batch, step, self._num_layers, len(self.batches), self.num_replicas)
