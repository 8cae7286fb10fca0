"""Who is in the next round: continuous batching, chunked prefill, preemption, n batches. Pure policy: no torch, no I/O,
no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec

from lamina.protocol.plan import Keep, SequenceOp, StepPlan, Truncate
from lamina.protocol.sparse_ops import Scored
from lamina.protocol.tiers import GateOpened, Transferred

from .blocks.evictions import Evictions, row_ops
from .blocks.leaves import Leaves
from .blocks.ledger import Blocks, Ledger
from .blocks.newcomers import Batch, Cuts, Newcomers, come_back, deal, line_up, overtaken, rolled_back, settle
from .blocks.prefixes import Prefixes
from .blocks.relief import Relief
from .blocks.room import NOBODY, Room, rows_of
from .blocks.stripe_moves import StripeMoves
from .blocks.sure import grant_chunks
from .blocks.swaps import Swaps
from .blocks.tier import Tier
from .blocks.under_way import Moved
from .conversations.sessions import SessionName
from .prefill import Prefill
from .rounds.pipeline import route
from .rounds.steps import Round, ScheduledStep, commit, round_of
from .sequence import Sequence, Shadow
from .shadows import Shadows
from .wire import Report


class Scheduler:
    """Schedules rounds: one step of every batch that has something to do. Everybody serves rounds, and the steps of a
    round, in the order given; so the blocks that a plan gives back are free for the next plan.

    First come, first served, of one priority. A new sequence joins the batch whose attention reads least, and in it the
    lane whose memory workers read least. The newest sequence of a batch is preempted when KV blocks run out: its blocks
    are freed; when there is room again its KV is loaded, or rebuilt from its tokens, so nothing is lost.

    Membership of a step is fixed before the tokens of the step before are known. A sequence that turns out to be
    finished thus runs one row too many, whose token is dropped; its blocks are freed by the next plan.
    """

    LOOKAHEAD = 1  # rounds that may be queued behind the running one

    def __init__(
        self,
        ledger: Ledger,
        *,
        max_num_seqs: int,
        prefill_chunk: int,
        aligned: bool = False,
        num_batches: int = 1,
        num_layers: int = 1,
        num_replicas: int = 0,
        prefill: Prefill | None = None,
        prefixes: Prefixes | None = None,
        tier: Tier | None = None,
        swaps: Swaps | None = None,
        evictions: Evictions | None = None,
        shadows: Shadows | None = None,
        homes: int = 0,
        moving_ranks: int = 0,
        view: int = 0,
    ) -> None:
        """``aligned``: cut prompts at multiples of ``prefill_chunk`` only, whatever else is in the step.
        ``num_layers``: attention operators, over which the steps rotate. ``num_replicas``: 0 = as many as the batches
        need. ``prefill``: who computes the prompts; None = the batches do. ``prefixes``: what is kept of finished
        sequences; None = nothing. ``tier``: where it is kept besides; None = nowhere; ``swaps``: so too that of
        preempted ones. ``evictions``: how sparse sequences lose blocks; None = there are none. ``shadows``: what
        measures their errors; None = nothing does. ``homes``: memory workers on which sequences begin, the first ones;
        0 = all. ``moving_ranks``: whose stripes may move; 0 = none may. ``view``: of the first plans.
        """
        self.view = view
        self._ledger = ledger
        self._cuts = Cuts(prefill_chunk, aligned)
        self._room = Room(ledger, max_num_seqs + prefill_chunk, homes)
        self.closed = self._room.closed  # groups in which no sequence begins
        self.waiting: deque[Sequence] = deque()  # the next one first
        self.batches = [Batch(i) for i in range(num_batches)]
        self._num_layers, self.num_replicas = num_layers, num_replicas
        self.prefill = prefill or Prefill(0, prefill_chunk, num_batches)
        self.prefixes = prefixes or Prefixes(ledger, 0)
        self.moves = StripeMoves(ledger, self._room, self.prefixes, moving_ranks)
        self.sessions, self.leaves = self.prefixes.sessions, Leaves(self.prefixes, ledger, tier)
        self.tier, self.swaps, self.evictions, self.shadows = tier, swaps, evictions, shadows
        self._newcomers = Newcomers(
            ledger, self._room, self._cuts, self.prefill, self.prefixes, tier, swaps, max_num_seqs, self.leaves
        )
        self._relief = Relief(ledger, self._room, self.prefixes, self.prefill, swaps)
        self._chunks: list[ScheduledStep] = []  # for prefill workers, not taken yet
        self._ops: list[SequenceOp] = []  # for the next plan
        self._num_batches = num_batches  # from the next round on
        self._in_flight: list[Round] = []
        self._next_round = 0  # also the number of its steps, so that all batches rotate in one phase
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without rows that are not finished: a cancelled one stays in line until the next round. Shadows are
        nobody's.
        """
        return self._asked(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_unfinished(self) -> int:
        """Of those that run: a finished one leaves with the next round."""
        return self._asked(self.running)

    def _asked(self, sequences: Iterable[Sequence]) -> int:
        if self.shadows is None:
            return sum(not s.finished for s in sequences)
        return sum(not s.finished and not isinstance(s, Shadow) for s in sequences)

    @property
    def running(self) -> list[Sequence]:
        return [s for b in self.batches for s in b.running]

    @property
    def free_blocks(self) -> Blocks:
        """KV blocks that sequences can still have: free ones, and those of retained or finished sequences."""
        running = self.running
        if not self.prefixes.num_retained and not any(s.finished for s in running):
            return self._ledger.free_blocks
        held = self._ledger.blocks_of(s.id for s in running if not s.finished)
        return tuple(total - n for total, n in zip(self._ledger.num_blocks, held, strict=True))

    @property
    def borrowed(self) -> list[int] | None:
        """KV blocks of running sequences by the layer group that lends them; None where none does."""
        return self._room.loans.borrowed(self.running) if self._room.loans else None

    def most_sequences(self, length: int) -> float:
        """How many of ``length`` tokens have room for their KV at once."""
        return self._room.times(length, self.evictions.most_kept if self.evictions else 0)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, and its shadow where it gets one."""
        line_up(self.waiting, sequence)
        self.prefill.expect(sequence)
        if self.shadows and (shadow := self.shadows.begin(sequence)):
            line_up(self.waiting, shadow)

    @property
    def may_run_ahead(self) -> bool:
        """Whether one more round can be queued before a step is done."""
        return len(self._in_flight) <= self.LOOKAHEAD

    @property
    def moving(self) -> bool:
        """Whether KV is being saved, loaded, scored or copied."""
        return any((self.tier and self.tier.moving, self.evictions and self.evictions.waiting, self.moves.awaited))

    @property
    def awaits_transfer(self) -> bool:
        """Whether somebody has to wait for that, if nothing else is under way."""
        waits = (s.num_loading or s.awaits_scores or s.moving or s.wants_rows for s in self.running)
        return self.moving and (self.num_waiting > 0 or any(waits))

    def moved(self, said: Report) -> Moved | None:
        """A memory worker has done something. What has become of all of a sequence, if that was its last transfer."""
        self.moves.report(said)
        if isinstance(said, Scored) and self.evictions:
            self.evictions.report(said)
        if isinstance(said, GateOpened) and self.tier:
            self.tier.open(said)
        transfer = self.tier.report(said) if self.tier and isinstance(said, Transferred) else None
        if transfer and transfer.loaded:
            self._forget_swapped(transfer.loaded)
        return transfer

    def regroup(self, num_batches: int) -> None:
        """Deal the running sequences to so many batches, once nothing is in flight; no round is scheduled before."""
        self._num_batches = num_batches

    def schedule(self) -> list[ScheduledStep]:
        """The next round, by batch; empty if there is nothing to do, or too much of it in flight."""
        if not self.may_run_ahead:
            return []
        if self._num_batches != len(self.batches):
            if self._in_flight:
                return []
            Shadows.forget(self.running)
            self.batches = deal(self.running, self._num_batches)
        if self.shadows:
            self.shadows.tend(self.batches, self.waiting, self._relief)
        self.forget_finished()
        self.batches[0].ops += [*self._ops, *(self.tier.drops() if self.tier else [])]
        self._ops = []
        for batch in self.batches:
            self._drop_finished(batch)
            batch.ops += self.evictions.prunes(batch.running) if self.evictions else []
            batch.ops += self.tier.fill(batch.running) if self.tier else []
        if self.waiting or (self.tier and self.tier.ahead):
            self._newcomers.admit(self.waiting, self.batches)
        self.moves.tend(self.batches, self._next_round, self._newcomers.number, crowded=bool(self.waiting))
        steps = [s for s in map(self._next, self.batches) if s is not None]
        for step in steps:
            step.plan = msgspec.structs.replace(step.plan, more=step is not steps[-1])
        if steps:
            self._in_flight.append(round_of(steps, self.batches, follows=bool(self._in_flight)))
            self._next_round += 1
        return steps

    def forget_finished(self) -> None:
        """Let go of sequences that were cancelled while they waited."""
        if ended := [s for s in self.waiting if s.finished]:
            for sequence in ended:
                self._forget_swapped(sequence)
                self.prefill.promises.drop(sequence)
            self.waiting = deque(s for s in self.waiting if not s.finished)

    def _forget_swapped(self, sequence: Sequence) -> None:
        if self.swaps:
            self._ops += self.swaps.forget(sequence)

    def take_chunks(self) -> list[ScheduledStep]:
        """The steps of prefill workers that the last round has granted."""
        taken, self._chunks = self._chunks, []
        return taken

    def complete(self, step: ScheduledStep) -> Round | None:
        """The step is done and its tokens have been appended; returns its round if that is done now."""
        if step.prefill_worker is not None:
            self.prefill.complete(step, step.prefill_worker)
            return None
        self.prefill.promises.drawn_inline(step.draws)
        self.moves.done(step.plan)
        flight = next(r for r in self._in_flight if step in r.left)
        flight.left.discard(step)
        if flight.left:
            return None
        self._in_flight.remove(flight)
        return flight

    def roll_back(self, in_flight: Iterable[ScheduledStep], kept: Callable[[Keep], int]) -> list[Keep]:
        """Take back the steps ``in_flight``, and whatever was to follow them. Returns what memory workers are to keep,
        and no more; ``kept``: how much they have of what one sequence would keep. Who has nothing is computed anew,
        oldest first. Numbers of rounds and sequences never go back. Between two rounds no ops and no chunks wait.
        """
        for step in in_flight:
            for sequence, rows in zip(step.parts, step.plan.rows, strict=True):
                if sequence.id == rows.sequence:
                    sequence.num_scheduled = min(sequence.num_scheduled, rows.first)
        self._in_flight = []
        Shadows.forget((*self.waiting, *self.running))
        self.prefill.roll_back(s for s in (*self.waiting, *self.running) if s.finished)
        if self.tier:
            self.tier.cancel()
        if self.evictions:
            self.evictions.forget()
        self._ops = []
        kept = self.moves.roll_back(kept)
        keep = self.prefixes.stay(kept)
        running, gone = rolled_back(self.batches, kept, self._forget_swapped)
        keep += running
        self._ledger.reconcile(keep)
        self._begin_anew([*self.waiting, *gone, *overtaken(self._ledger, self.batches, keep)])
        return keep

    def _begin_anew(self, sequences: Iterable[Sequence]) -> None:
        """They are all that wait, oldest first of those with one priority."""
        self.waiting = deque(sorted(sequences, key=lambda s: (s.priority, s.request_id, s.output.index)))
        for sequence in self.waiting:
            sequence.roll_back(0)
            sequence.restart()
            self.prefill.expect(sequence)

    def lay_out(self, blocks: Ledger, keep: Iterable[Keep], stays: Mapping[int, int] = NOBODY) -> list[Keep]:
        """Have other blocks, behind ``roll_back``. Where KV is to lie, what runs first (``stays``: see ViewChanged)."""
        self.moves.leaving.clear()
        self._ledger.become(blocks)
        kept = self._room.deal(keep, self.prefixes.oldest[::-1], stays)
        self.prefixes.lie(kept)
        self._ledger.reconcile(kept, moved=True)
        self._begin_anew([*self.waiting, *settle(self.batches, kept)])
        return kept

    def lacks_room(self, blocks: Ledger) -> int:
        """Running sequences whose KV has no room in other blocks."""
        return self._room.lacking(blocks, [s for s in self.running if not s.finished])

    def forget_prefixes(self, era: bytes = b"") -> None:
        """Give up what is retained, with the next plan. What runs leaves nothing. ``era``: of pages from now on."""
        self._ops += self.prefixes.forget_all()
        for sequence in self.running:
            sequence.outlived = True
        if self.tier:
            self.tier.forget(era, (*self.running, *self.waiting))

    def drop_session(self, name: SessionName) -> bool:
        """Forget a session, and give up its KV with the next plan. False: there is no such session."""
        ops = self.leaves.drop(name, self.running)
        self._ops += ops or []
        return ops is not None

    @property
    def owes(self) -> bool:
        """Whether memory workers are to be told of something, if nothing else is to be done."""
        return bool(self._ops) or bool(self.tier and self.tier.owes)

    def give_up_retained(self) -> None:
        """The same of the pools alone: what is kept beside them can be loaded."""
        self._ops += [self.prefixes.evict(number) for number in self.prefixes.oldest]

    def tell_anew(self) -> None:
        """Compute workers count no tokens any more for penalties: the next draw of each sequence tells all."""
        for sequence in self.running:
            sequence.num_told = -1

    def _next(self, batch: Batch) -> ScheduledStep | None:
        picked, plan = self._pick(batch)
        if not any(s.wants_rows and s not in picked for s in batch.running):  # that waits for blocks
            granted, chunks = grant_chunks(self.prefill, self._ledger, batch, picked, self._plan, self._relief)
            plan, self._chunks = granted or plan, self._chunks + chunks
        if not picked and not batch.ops:
            return None
        ops = [*batch.ops, *row_ops(picked, self.evictions)]
        ops = self.tier.numbered(ops) if self.tier else ops
        if ops != batch.ops:
            batch.ops = ops
            plan = self._plan(batch, picked)
        self._ledger.apply(plan)
        batch.ops = []
        return commit(plan, picked)

    def _drop_finished(self, batch: Batch) -> None:
        """Those whose K and V are still on their way stay until these have come."""
        ended = [s for s in batch.running if s.finished and not s.num_prefilling and not s.num_loading]
        first = self.batches[0].ops
        for sequence in ended:
            self.prefill.drop(sequence)
            for op in self.prefixes.end(sequence):  # a retained one may be evicted by the first plan
                (first if isinstance(op, Truncate) else batch.ops).append(op)
                first += self.leaves.left(sequence, op)
        batch.running = [s for s in batch.running if s not in ended]

    def _pick(self, batch: Batch) -> tuple[dict[Sequence, int], StepPlan]:
        """What it wants, as far as there are blocks, and the plan for it."""
        picked = self._cuts.wanted(batch)
        loans, free = self._room.loans, lambda: self._room.spare(self.running, self.prefixes.oldest)
        stuck = loans.grow(picked, free) if loans else []
        plan = self._plan(batch, picked)
        while stuck or (picked and not self._ledger.can_apply(plan)):
            if (victim := self._relief.make_room(batch, picked, stuck)) is not None:
                come_back(self.waiting, victim)
                self.num_preemptions += 1
            plan = self._plan(batch, picked)
        return picked, plan

    def _plan(self, batch: Batch, picked: dict[Sequence, int]) -> StepPlan:
        source, reply_to = self._route(batch.index, self._next_round)
        return StepPlan(
            view=self.view, batch=batch.index, step=self._next_round, ops=batch.ops, rows=rows_of(picked),
            source=source, reply_to=reply_to,
        )  # fmt: skip

    def _route(self, batch: int, step: int) -> tuple[list[int], list[int]]:
        return route(batch, step, self._num_layers, len(self.batches), self.num_replicas)
