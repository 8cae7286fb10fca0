"""The seam between the scheduler and its features: what each may do, and when it is asked. Pure policy.

The scheduler has batching, preemption and rotation. All else is a feature: an object in an ordered table, which
`lamina.engine.scheduler_factory` builds. A new one is a file with a subclass of `Feature`, and a line there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Protocol

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.control import ComputeReady
from lamina.protocol.executor import Report
from lamina.protocol.step_plan import RowRange, SequenceOp, StepPlan, SurvivingKv

from .batch import Batch
from .scheduler_output import Round, ScheduledStep, TransferResult
from .sequence import Sequence
from .starts import Candidates, KvStart

Ops = Iterable[SequenceOp]


class Scheduling(Protocol):
    """The scheduler as features see it."""

    batches: list[Batch]
    waiting: deque[Sequence]  # the next one first

    @property
    def next_round(self) -> int:
        """The number of the round that is being planned."""
        ...

    def new_sequence_id(self) -> int:
        """A number that no other sequence has had."""
        ...

    def preempt(self, batch: Batch, sequence: Sequence) -> None:
        """Free the KV of a running sequence of ``batch``, which runs no more; the caller has it wait."""
        ...

    def add_pending_ops(self, ops: Ops) -> None:
        """Have the first plan of the next round begin with ``ops``, after those that were given before."""
        ...


@dataclass
class Leaving:
    """A sequence that leaves its batch, or the queue. ``op``: frees it; None: it has no KV. Or it truncates the
    sequence, which retains it; then it is an op of the round's first plan. ``is_preempted``: it will wait again, unless
    it is hidden. ``first``: further ops of the first plan of the round, or of the next one; not of a preempted one.
    ``own``: further ops of its batch's plan, if it has KV: before ``op`` if it is preempted, else after.
    """

    sequence: Sequence
    op: SequenceOp | None = None
    is_preempted: bool = False
    first: list[SequenceOp] = field(default_factory=list)
    own: list[SequenceOp] = field(default_factory=list)


@dataclass
class PlanDraft:
    """The next plan of a batch, whose rows are picked. Features change ``batch.ops``, which are the plan's. ``round``:
    its number. ``build``: makes the plan as it is now. ``evict_for``: gives up a retained sequence whose blocks help
    such rows; whether there was one. ``prefill_steps``: steps of prefill workers that begin with this plan.
    """

    batch: Batch
    round: int
    picked: Mapping[Sequence, int]
    accounting: BlockTables
    build: Callable[[], StepPlan]
    evict_for: Callable[[Batch, Iterable[RowRange]], bool]
    prefill_steps: list[ScheduledStep]


@dataclass
class Loss:
    """All that is in flight is taken back, and no report of it will come. ``sequences``: all that run or wait.
    ``surviving``: the tokens that are left of some KV. ``distrusted``: sequences of whose KV nothing can be kept.
    ``kept``: the retained KV that stays.
    """

    sequences: Several[Sequence]
    surviving: Callable[[SurvivingKv], int]
    distrusted: set[int] = field(default_factory=set)
    kept: list[SurvivingKv] = field(default_factory=list)

    def count(self, keep: SurvivingKv) -> int:
        """Return the tokens that are left of ``keep`` and can be trusted."""
        return 0 if keep.sequence in self.distrusted else self.surviving(keep)


class Feature:
    """A feature of the scheduler. Each hook does nothing here, so a feature has those alone that it needs.

    The features are asked in the order of their table, after a loss in the opposite order. Where hooks return ops,
    these follow one another in that order too. An op that is returned goes with a plan, unless workers are lost before.
    """

    # What the engine may ask at any time:
    @property
    def has_transfers(self) -> bool:
        """True while memory workers have yet to report something."""
        return False

    @property
    def has_pending_ops(self) -> bool:
        """True if ``begin_round`` has ops that are to be sent even if nothing runs."""
        return False

    # Sequences come and go:
    def on_arrival(self, sequence: Sequence, *, is_new: bool = True) -> Sequence | None:
        """A sequence waits from now on. One that is not new was preempted or rolled back, and has no KV. Of a new one,
        another sequence that waits after it, which belongs to no request.
        """
        return None

    def on_leave(self, leaving: Leaving) -> None:
        """A sequence has ended, or is preempted. May replace ``leaving.op`` if it has ended, and add ops."""

    # A round is planned, in this order:
    def begin_round(self, scheduling: Scheduling) -> None:
        """Nothing of the round is planned yet; cancelled sequences still wait, and finished ones run."""

    def batch_ops(self, running: Several[Sequence]) -> Ops:
        """Ops of the next plan of a batch, in which ``running`` are left."""
        return ()

    def may_start(self, sequence: Sequence) -> bool:
        """False if a waiting sequence surely begins without stored tokens of this feature. A quick look."""
        return False

    def find_starts(self, candidates: Candidates) -> None:
        """May add ways in which the first of the waiting sequences can begin, take some away, or have it wait. Once it
        is to wait, later features are not asked.
        """

    def on_started(self, candidates: Candidates, start: KvStart | None) -> Ops:
        """A sequence has its id and its place in a batch, and begins with ``start``. Ops of its batch's plan, after the
        one that starts it.
        """
        return ()

    def after_admission(self, scheduling: Scheduling) -> None:
        """Sequences that find room have joined batches. May add ops to all batches."""

    def extend_plan(self, draft: PlanDraft) -> None:
        """The rows of a batch's next plan are picked; more ops may come that take no block of these. The last hook of a
        plan. Called even if there are no rows and no ops.
        """

    # Workers report:
    def on_report(self, report: Report) -> TransferResult | None:
        """A memory worker has done something. What became of all of a sequence, if that was its last transfer. Reports
        of kinds that a feature does not know are others'.
        """
        return None

    def on_loaded(self, sequence: Sequence) -> Ops:
        """All KV of a sequence that could be loaded is there. Ops of the next round's first plan."""
        return ()

    def on_step_done(self, step: ScheduledStep, done: Round | None = None) -> None:
        """A step is done, of a batch or of a prefill worker, and its tokens have been appended. ``done``: its round, if
        that is done now.
        """

    # What is retained of finished sequences, by their numbers:
    @property
    def has_retained(self) -> bool:
        """True if there are any: as ``eviction_order``, but quick."""
        return False

    @property
    def eviction_order(self) -> list[int]:
        """The retained sequences, in the order in which they give way."""
        return []

    def evict(self, number: int) -> SequenceOp:
        """Give up one of ``eviction_order``. The op that frees it."""
        raise NotImplementedError

    # Workers are lost or change:
    def roll_back(self, loss: Loss) -> None:
        """Forget what was in flight. May distrust sequences, and has to name retained KV that stays."""

    def relocate(self, kept: Several[SurvivingKv]) -> None:
        """After that: memory workers are other ones, KV lies where ``kept`` says, and nothing else is left."""

    def resume(self, ready: ComputeReady) -> None:
        """Workers have met anew, and have kept their KV: the engine goes on."""

    def reset(self, era: bytes, sequences: Several[Sequence]) -> Ops:
        """No KV of before is found any more. ``era``: of pages from now on. Ops of the next round's first plan."""
        return ()
