"""The versions of recurrent states that memory workers must keep. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from lamina.protocol.step_plan import PrefillGrant, SequenceOp, StateRows, SurvivingKv

from .feature import Feature, Leaving, Loss, PlanDraft, Scheduling
from .kv_manager.hybrid_prefix_cache import HybridPrefixCache
from .scheduler_output import Round, ScheduledStep
from .sequence import Sequence
from .starts import Candidates, KvStart


class RecurrentStates(Feature):
    """Names with each row the older versions that are not needed: a step that is done is never undone. It also says
    where prompts end, since some recurrences compute prompts in another way.

    It counts versions in a ledger. If they have no room, retained sequences are evicted, and then running ones lose
    their snapshots. The other versions of running sequences always have room.
    """

    def __init__(self, prefixes: HybridPrefixCache) -> None:
        self._prefixes, self._ledger = prefixes, prefixes.states
        self._done: dict[int, int] = {}  # sequence -> tokens after the last step that is done
        self._is_rolled_back = False

    def begin_round(self, scheduling: Scheduling) -> None:
        """After a loss, count only what memory workers have kept."""
        if self._is_rolled_back:
            running = [s for batch in scheduling.batches for s in batch.running]
            keep = [SurvivingKv(s.id, s.num_computed_tokens, s.location) for s in running if s.num_computed_tokens]
            self._ledger.reconcile([*keep, *self._prefixes.retained()])
            self._is_rolled_back = False

    def on_started(self, candidates: Candidates, start: KvStart | None) -> tuple[SequenceOp, ...]:
        """Note the version with which a sequence begins."""
        self._done[candidates.sequence.id] = candidates.sequence.num_computed_tokens
        return ()

    def extend_plan(self, draft: PlanDraft) -> None:
        """Add an op for each sequence with rows, and make room for the versions after these. States after a prefill
        worker's chunk come with its grant, if the prompt ends there or a snapshot is due.
        """
        ops = draft.batch.ops
        for at, grant in enumerate(ops):
            if isinstance(grant, PrefillGrant):
                chunk = next(s for s in draft.side_steps if (s.side_worker, s.plan.step) == (grant.worker, grant.step))
                ops[at] = structs.replace(grant, has_states=self._extend_chunk(chunk))
        for sequence, count in draft.picked.items():
            first = sequence.num_computed_tokens
            self._prefixes.on_scheduled(sequence, first + count)
            prompt = _prompt_rows(sequence, first, count)
            ops.append(self._rows_of(sequence.id, self._done.setdefault(sequence.id, first), prompt))
        if not draft.picked and not ops:
            return
        while not self._ledger.can_apply(draft.build()):
            if not draft.evict_for(draft.batch, ()):
                ops += self._without_snapshots(draft)
                break
        self._ledger.apply(draft.build())

    def _extend_chunk(self, chunk: ScheduledStep) -> bool:
        """Add the op about states to the plan of a prefill worker. Returns whether it sends them."""
        (sequence,), (rows,) = chunk.sequences, chunk.plan.rows
        stop = rows.first + rows.count
        self._prefixes.on_scheduled(sequence, stop)
        is_due = bool(chunk.sampled_sequences) or stop in self._prefixes.snapshots_of(sequence.id)
        op = StateRows(sequence.id, rows.first, _prompt_rows(sequence, rows.first, rows.count), [stop] * is_due)
        chunk.plan = structs.replace(chunk.plan, ops=[*chunk.plan.ops, op])
        return is_due

    def _rows_of(self, number: int, oldest: int, prompt: int) -> StateRows:
        return StateRows(number, oldest, prompt, self._prefixes.snapshots_of(number))

    def _without_snapshots(self, draft: PlanDraft) -> Iterator[StateRows]:
        """Yield ops that leave running sequences the versions alone with which they continue."""
        prompts = {op.sequence: op.prompt for op in draft.batch.ops if isinstance(op, StateRows)}
        self._prefixes.drop_running_snapshots()
        for number, oldest in self._done.items():
            yield StateRows(number, oldest, prompts.get(number, 0))

    def on_step_done(self, step: ScheduledStep, done: Round | None = None) -> None:
        """Note the versions that the next steps read, and those that came from a prefill worker."""
        for row in step.plan.rows:
            if step.side_worker is not None:
                self._ledger.on_loaded(row.sequence, row.first + row.count)
            if row.sequence in self._done:
                self._done[row.sequence] = row.first + row.count

    def on_leave(self, leaving: Leaving) -> None:
        """Forget a sequence, whose state is freed with its KV."""
        self._done.pop(leaving.sequence.id, None)

    def on_arrival(self, sequence: Sequence, *, is_new: bool = True) -> None:
        """Forget where a preempted sequence was to take snapshots, as its others have begun anew."""
        sequence.step_ends = []

    def roll_back(self, loss: Loss) -> None:
        """Forget all: each sequence has one version left, at which it continues. One whose last token is computed, and
        waits for its caller's choice, has to compute that row again, whose version is gone.
        """
        self._done.clear()
        self._is_rolled_back = True
        loss.distrusted |= {s.id for s in loss.sequences if s.num_computed_tokens >= len(s.tokens)}


def _prompt_rows(sequence: Sequence, first: int, count: int) -> int:
    """Return how many of ``count`` rows from position ``first`` on belong to the prompt."""
    return min(max(len(sequence.prompt) - first, 0), count)
