"""The seam between the scheduler and its features: the hooks, and when they are called. Pure policy.

The scheduler does batching, preemption and rotation. Everything else is a feature: an object in an ordered table, which
`lamina.engine.scheduler_factory` builds. A new feature is a file with a subclass of `Feature`, and a line there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from lamina.config.partition import KvShards
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
        """A sequence id that was never used before."""
        ...

    def preempt(self, batch: Batch, sequence: Sequence) -> None:
        """Stop a running sequence of ``batch`` and free its KV. The caller queues it again."""
        ...

    def add_pending_ops(self, ops: Ops) -> None:
        """Add ``ops`` to the beginning of the next round's first plan, after those that were added before."""
        ...


@dataclass
class Leaving:
    """A sequence that leaves its batch or the queue.

    ``op``: a Free; None: it has no KV. A feature may replace it by a Truncate, which retains the KV; it then belongs to
    the round's first plan. ``is_preempted``: the sequence waits again, unless it follows another. ``first``: more ops
    for the first plan of this round or the next one; none if it is preempted. ``own``: more ops for its batch's plan,
    if it has KV: before ``op`` if it is preempted, else after.
    """

    sequence: Sequence
    op: SequenceOp | None = None
    is_preempted: bool = False
    first: list[SequenceOp] = field(default_factory=list)
    own: list[SequenceOp] = field(default_factory=list)


@dataclass
class PlanDraft:
    """The next plan of a batch, whose rows are picked. Features add to ``batch.ops``, the ops of the plan.

    ``round``: its number. ``build``: makes the plan in its current state. ``evict_for``: evicts a retained sequence
    whose blocks such rows can use; False if there is none. ``side_steps``: steps of other workers
    that begin with this plan.
    """

    batch: Batch
    round: int
    picked: Mapping[Sequence, int]
    accounting: BlockTables
    build: Callable[[], StepPlan]
    evict_for: Callable[[Batch, Iterable[RowRange]], bool]
    side_steps: list[ScheduledStep]


@dataclass
class Loss:
    """The loss of everything in flight, of which no report will come.

    ``sequences``: all running and waiting ones. ``surviving``: returns how many tokens of some KV are left.
    ``distrusted``: sequences whose KV must be dropped. ``kept``: the retained KV that stays.
    """

    sequences: Several[Sequence]
    surviving: Callable[[SurvivingKv], int]
    distrusted: set[int] = field(default_factory=set)
    kept: list[SurvivingKv] = field(default_factory=list)

    def count(self, keep: SurvivingKv) -> int:
        """Return how many tokens of ``keep`` are left and trusted."""
        return 0 if keep.sequence in self.distrusted else self.surviving(keep)


class NewMemory(NamedTuple):
    """Other memory workers, to which the KV that is left moves.

    ``blocks``: theirs, all free. ``max_num_seqs``: the limit of running sequences. ``new_shards``: see EpochChanged.
    ``state_shards``, ``state_slots``: see ComputeReady.
    """

    blocks: BlockTables
    max_num_seqs: int
    new_shards: Mapping[int, int] = {}
    state_shards: Several[KvShards | None] = ()
    state_slots: int = 0


class Feature:
    """A feature of the scheduler. Every hook has an empty default.

    Hooks are called in the order of the table; ``roll_back`` in the opposite order. Returned ops keep that order. They
    are sent with a plan, unless workers are lost before.
    """

    # May be called at any time:
    @property
    def has_transfers(self) -> bool:
        """True while a report of a memory worker is pending."""
        return False

    # Sequences arrive and leave:
    def on_arrival(self, sequence: Sequence, *, is_new: bool = True) -> Sequence | None:
        """A sequence is queued. If it is not new, it was preempted or rolled back, and has no KV.

        For a new one, may return another sequence to queue after it, which belongs to no request.
        """
        return None

    def on_leave(self, leaving: Leaving) -> None:
        """A sequence ends or is preempted. May add ops, and replace ``leaving.op`` if it ends."""

    # A round is scheduled, in this order:
    def begin_round(self, scheduling: Scheduling) -> None:
        """A round begins. Cancelled sequences are still queued, and finished ones are still in their batches."""

    def batch_ops(self, running: Several[Sequence]) -> Ops:
        """Returns ops for the next plan of a batch, whose sequences are ``running``."""
        return ()

    def may_start(self, sequence: Sequence) -> bool:
        """False if this feature has no stored tokens for a waiting sequence. Must be fast; True may be wrong."""
        return False

    def find_starts(self, candidates: Candidates) -> None:
        """May add or remove starts of the first waiting sequence, or let it wait, which skips later features."""

    def on_started(self, candidates: Candidates, start: KvStart | None) -> Ops:
        """A sequence has joined a batch, and begins with ``start``. A preempted one joins again.

        Returns ops for the batch's plan, after the op that starts the sequence.
        """
        return ()

    def after_admission(self, scheduling: Scheduling) -> None:
        """All sequences with room have joined batches. May add ops to batches."""

    def extend_plan(self, draft: PlanDraft) -> None:
        """The rows of a batch's plan are picked. May add ops that take no blocks of these rows.

        This is the last hook of a plan. It is called even without rows and ops.
        """

    # Workers report:
    def on_report(self, report: Report) -> TransferResult | None:
        """A memory worker has sent a report. Returns the result for a sequence, if this was its last transfer.

        A feature ignores reports of other kinds.
        """
        return None

    def on_loaded(self, sequence: Sequence) -> Ops:
        """The load of a sequence's KV has completed. Returns ops for the next round's first plan."""
        return ()

    def on_step_done(self, step: ScheduledStep, done: Round | None = None) -> None:
        """A step of a batch or of a side worker has completed, and its tokens are appended.

        ``done``: its round, if that has completed.
        """

    # Retained KV of finished sequences, by sequence id:
    @property
    def eviction_order(self) -> list[int]:
        """The retained sequences, in the order in which they are evicted."""
        return []

    def evict(self, number: int) -> SequenceOp:
        """Evict one of ``eviction_order``. Returns the op that frees it."""
        raise NotImplementedError

    # Workers are lost or change:
    def roll_back(self, loss: Loss) -> None:
        """Drop all state of steps in flight. May distrust sequences, and must add retained KV to ``loss.kept``."""

    def relocate(self, kept: list[SurvivingKv], memory: NewMemory) -> None:
        """After ``roll_back``, if the memory workers change: KV lies where ``kept`` says, and no other is left. May
        remove entries.
        """

    def resume(self, ready: ComputeReady) -> None:
        """The workers have connected again, with their KV, and the engine continues."""

    def reset(self, era: bytes, sequences: Several[Sequence]) -> Ops:
        """Make all earlier KV unfindable. ``era``: that of later pages. Returns ops for the next round's first plan."""
        return ()
