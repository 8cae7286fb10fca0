"""Fast-forward: an engine that skips rounds in which every running sequence only gets one more token.

No sequence comes, ends or lacks KV blocks in such a round. Most rounds of a simulation are skipped. The simulator must
know the token that a row draws and when each round is done; workers and the order of their messages do not matter. Pure
policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any, NamedTuple

import msgspec

from lamina.engine.engine import Engine
from lamina.protocol.step_plan import RowRange, StepPlan
from lamina.scheduler.batch import Batch
from lamina.scheduler.kv_manager.allocator import KvAllocator
from lamina.scheduler.kv_manager.block_accounting import BlockAccounting
from lamina.scheduler.kv_manager.migration import KvMigration
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import ScheduledStep
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sparsity.pruning import BlockPruner
from lamina.scheduler.sparsity.reference_decode import ReferenceDecoder


class Standing(NamedTuple):
    """One round is in flight, and nothing of it is done. ``steps``: its steps, by batch. ``head``: the first waiting
    sequence.
    """

    batches: Several[Batch]
    steps: Several[ScheduledStep]
    head: Sequence | None


class Leaps:
    """Counts and skips equal rounds of one scheduler. With windowed layers, which free blocks on the way, it skips
    none.
    """

    def __init__(self, accounting: BlockAccounting, allocator: KvAllocator, max_num_seqs: int) -> None:
        self._ledger, self._room, self._max_num_seqs = accounting, allocator, max_num_seqs

    def longest(self, at: Standing, token: int) -> int:
        """Return the number of rounds after the one in flight that are like it, if each row draws ``token``."""
        if any(self._ledger.windows) or not _decodes(at, token) or not self._stands(at):
            return 0
        rounds = min(s.max_len - len(s.tokens) - 1 for step in at.steps for s in step.sequences)
        return self._with_blocks(at.steps, rounds) if rounds > 0 else 0

    def skip(self, steps: Several[ScheduledStep], rounds: int, token: int) -> None:
        """Turn the round in flight, which has these steps, into the one so many rounds later. The routes of its plans
        stay unchanged.
        """
        ends = self._take_blocks([s.plan for s in steps], rounds)
        for plan in (s.plan for s in steps):
            behind = [(r, r.first + rounds - ends[r.sequence]) for r in plan.rows]
            late = [RowRange(r.sequence, ends[r.sequence], count, r.location) for r, count in behind if count > 0]
            if late:
                self._ledger.apply(_moved(plan, rounds - 1, late))
        for step in steps:
            later = [RowRange(r.sequence, r.first + rounds, 1, r.location) for r in step.plan.rows]
            step.plan, step.tokens = _moved(step.plan, rounds, later), [-1] * len(later)
            self._ledger.apply(step.plan)
            for sequence in step.sequences:
                sequence.tokens += [token] * rounds
                sequence.num_computed_tokens += rounds

    def _stands(self, at: Standing) -> bool:
        """Return True if no waiting sequence can be admitted while all others decode, as these only take blocks."""
        running = [s for b in at.batches for s in b.running]
        if at.head is None or len(running) >= self._max_num_seqs:
            return True
        if at.head.finished:  # it leaves the queue with the next round
            return False
        if self._room.can_never_fit(at.head):
            return True
        left = self._room.free_after(running, dict.fromkeys(running, 1))
        return self._room.allocate(at.head, None, left, (), running) is None

    def _with_blocks(self, steps: Several[ScheduledStep], rounds: int) -> int:
        """Return the largest part of ``rounds`` for which there are free blocks."""
        rows, free = [row for step in steps for row in step.plan.rows], self._ledger.free_blocks

        def fits(count: int) -> bool:
            more = [RowRange(r.sequence, r.first + 1, count, r.location) for r in rows]
            return all(n <= f for n, f in zip(self._ledger.blocks_needed(more), free, strict=True))

        low, high = 0, rounds  # ``low`` fit
        if fits(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _take_blocks(self, plans: Several[StepPlan], rounds: int) -> dict[int, int]:
        """Take the blocks that rows of all rounds but the last begin, in the order of these rows. Returns where each
        sequence ends then.
        """
        size = self._ledger.block_size
        ends = {row.sequence: row.first + 1 for plan in plans for row in plan.rows}
        begun: dict[tuple[int, int], list[RowRange]] = {}  # by round and plan
        for number, plan in enumerate(plans):
            for row in plan.rows:
                for later in range(-row.first % size or size, rounds, size):
                    begun.setdefault((later, number), []).append(row)
        for (later, number), rows in sorted(begun.items(), key=lambda x: x[0]):
            taken = [
                RowRange(r.sequence, ends[r.sequence], r.first + later + 1 - ends[r.sequence], r.location) for r in rows
            ]
            self._ledger.apply(_moved(plans[number], later, taken))
            ends |= {r.sequence: r.first + later + 1 for r in rows}
        return ends


class FastForwardScheduler(Scheduler):
    """A Scheduler that can skip rounds."""

    def __init__(self, accounting: BlockAccounting, *, max_num_seqs: int, **options: Any) -> None:
        super().__init__(accounting, max_num_seqs=max_num_seqs, **options)
        self._migration = self.features[KvMigration]
        self._leaps = Leaps(accounting, self._allocator, max_num_seqs)

    def rounds_alike(self, token: int) -> int:
        """Return the number of rounds after the only one in flight that can be skipped if all rows draw ``token``."""
        at = self._standing()
        return self._leaps.longest(at, token) if at else 0

    def leap(self, rounds: int, token: int) -> list[ScheduledStep]:
        """Skip ``rounds`` of the rounds that ``rounds_alike`` counts. Returns the steps in flight, which are then the
        last one's.
        """
        at = self._standing()
        assert at is not None
        (flight,) = self._in_flight
        self._leaps.skip(at.steps, rounds, token)
        for step in at.steps:
            source, reply_to = self._route(step.plan.batch, step.plan.step)
            step.plan = msgspec.structs.replace(step.plan, send_from=source, reply_to=reply_to)
        flight.tokens += rounds * flight.rows
        self._next_round += rounds
        return [*at.steps]

    def _standing(self) -> Standing | None:
        """Return the round in flight; None if the next ones may differ for a reason that no sequence shows."""
        changes = (
            self._pending_ops
            or self._prefill_steps
            or any(self.features.get(kind) for kind in (OffloadIndex, BlockPruner, ReferenceDecoder))
            or self._migration.in_flight
        )
        if len(self._in_flight) != 1 or changes or self._num_batches != len(self.batches):
            return None
        (flight,) = self._in_flight
        head = self.waiting[0] if self.waiting else None
        if head and self.features.may_start(head):
            return None
        steps = sorted(flight.unfinished_steps, key=lambda s: s.plan.batch)
        return Standing(self.batches, steps, head) if flight.is_decode_only else None


class FastForwardEngine(Engine):
    """An Engine that can skip rounds of requests without texts."""

    scheduler_class = FastForwardScheduler
    scheduler: FastForwardScheduler

    def leap(self, rounds: int, token: int) -> None:
        """Skip ``rounds`` in which every row draws ``token``, at most as many as ``scheduler.rounds_alike``. The
        executor gets no message: the caller lets it skip them too.
        """
        steps, now = self.scheduler.leap(rounds, token), self._clock()
        self._in_flight = {(step.plan.batch, step.plan.step): step for step in steps}
        self._next_round += rounds
        for sequence in (s for step in steps for s in step.sequences):
            sequence.output.token_ids += [token] * rounds
            self._requests[sequence.request_id].output.times.mark(now, finished=False)


def _decodes(at: Standing, token: int) -> bool:
    """Return True if every running sequence has one row in flight and one in the next round, and no plan does more."""
    with_rows = [b.running for b in at.batches if b.running]
    if [s.sequences for s in at.steps] != with_rows:
        return False
    return all(
        not step.plan.ops
        and step.sampled_sequences == step.sequences
        and all(_goes_on(s, token) for s in step.sequences)
        for step in at.steps
    )


def _goes_on(sequence: Sequence, token: int) -> bool:
    """Return True if it has a row in flight, after its first token, and ``token`` changes nothing for it."""
    plain = not sequence.external_sampling and not sequence.params.adjusts_logits and sequence.output.logprobs is None
    alone = (
        not sequence.num_pending_prefill_chunks and sequence.prefill_worker is None and not sequence.num_loading_tokens
    )
    draws = sequence.num_output_placeholders == 1 and sequence.num_computed_tokens == len(sequence.tokens) > len(
        sequence.prompt
    )
    return draws and plain and alone and not sequence.finished and token not in sequence.stop_tokens


def _moved(plan: StepPlan, rounds: int, rows: list[RowRange]) -> StepPlan:
    return msgspec.structs.replace(plan, step=plan.step + rounds, rows=rows)
