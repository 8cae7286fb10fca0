"""The ordered table of a scheduler's features. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from itertools import chain
from typing import TypeVar

from lamina.protocol.control import ComputeReady, SampledToken
from lamina.protocol.executor import Report
from lamina.protocol.step_plan import SequenceOp, SurvivingKv

from .feature import Ending, Feature, PlanDraft, Scheduling
from .scheduler_output import ScheduledStep, TransferResult
from .sequence import Sequence
from .starts import Candidates, KvStart, Verdict

AnyFeature = TypeVar("AnyFeature", bound=Feature)


class FeatureTable:
    """The features of one scheduler, asked as one: by each hook those that have it, in their order."""

    def __init__(self, features: Iterable[Feature]) -> None:
        self._all = tuple(features)
        self._arrival = self._having("on_arrival")
        self._cancelled = self._having("on_cancelled")
        self._preempted = self._having("on_preempted")
        self._finished = self._having("on_finished")
        self._begin = self._having("begin_round")
        self._first = self._having("first_ops")
        self._batch = self._having("batch_ops")
        self._begin_admission = self._having("begin_admission")
        self._may_start = self._having("may_start")
        self._starts = self._having("find_starts")
        self._started = self._having("on_started")
        self._after_admission = self._having("after_admission")
        self._plan = self._having("extend_plan")
        self._report = self._having("on_report")
        self._step = self._having("on_step_done")
        self._sampled = self._having("on_sampled")
        self._transferring = self._having("has_transfers")
        self._retaining = self._having("eviction_order")

    def _having(self, hook: str) -> tuple[Feature, ...]:
        return tuple(f for f in self._all if getattr(type(f), hook) is not getattr(Feature, hook))

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._all)

    def get(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """The feature of that kind, if there is one."""
        return next((f for f in self._all if isinstance(f, kind)), None)

    def __getitem__(self, kind: type[AnyFeature]) -> AnyFeature:
        """The feature of that kind. Raises KeyError where there is none."""
        feature = self.get(kind)
        if feature is None:
            raise KeyError(kind.__name__)
        return feature

    @property
    def has_transfers(self) -> bool:
        return any(f.has_transfers for f in self._transferring)

    @property
    def has_pending_ops(self) -> bool:
        return any(f.has_pending_ops for f in self._first)

    def on_arrival(self, sequence: Sequence, *, is_new: bool = True) -> list[Sequence]:
        others = [f.on_arrival(sequence, is_new=is_new) for f in self._arrival]
        return [other for other in others if other is not None]

    def on_cancelled(self, sequence: Sequence) -> list[SequenceOp]:
        return [op for f in self._cancelled for op in f.on_cancelled(sequence)]

    def on_preempted(self, sequence: Sequence) -> list[SequenceOp]:
        return [op for f in self._preempted for op in f.on_preempted(sequence)]

    def on_finished(self, ending: Ending) -> None:
        for f in self._finished:
            f.on_finished(ending)

    def begin_round(self, scheduling: Scheduling) -> None:
        for f in self._begin:
            f.begin_round(scheduling)

    def first_ops(self) -> list[SequenceOp]:
        return [op for f in self._first for op in f.first_ops()]

    def batch_ops(self, running: Several[Sequence]) -> list[SequenceOp]:
        return [op for f in self._batch for op in f.batch_ops(running)]

    def begin_admission(self, waiting: Several[Sequence]) -> None:
        for f in self._begin_admission:
            f.begin_admission(waiting)

    def may_start(self, sequence: Sequence) -> bool:
        return any(f.may_start(sequence) for f in self._may_start)

    def find_starts(self, candidates: Candidates) -> None:
        for f in self._starts:
            f.find_starts(candidates)
            if candidates.verdict is not Verdict.BEGINS:
                return

    def on_started(self, candidates: Candidates, start: KvStart | None) -> list[SequenceOp]:
        return [op for f in self._started for op in f.on_started(candidates, start)]

    def after_admission(self, scheduling: Scheduling) -> None:
        for f in self._after_admission:
            f.after_admission(scheduling)

    def extend_plan(self, draft: PlanDraft) -> None:
        for f in self._plan:
            f.extend_plan(draft)

    def on_report(self, report: Report) -> TransferResult | None:
        ended = [f.on_report(report) for f in self._report]
        return next((transfer for transfer in ended if transfer is not None), None)

    def on_loaded(self, sequence: Sequence) -> list[SequenceOp]:
        return [op for f in self._all for op in f.on_loaded(sequence)]

    def on_step_done(self, step: ScheduledStep) -> None:
        for f in self._step:
            f.on_step_done(step)

    def on_sampled(self, sequence: Sequence, drawn: SampledToken) -> list[str]:
        return [line for f in self._sampled if (line := f.on_sampled(sequence, drawn))]

    @property
    def num_retained(self) -> int:
        return sum(f.num_retained for f in self._retaining)

    @property
    def eviction_order(self) -> list[int]:
        return [number for f in self._retaining for number in f.eviction_order]

    def evict(self, number: int) -> SequenceOp:
        if len(self._retaining) == 1:
            return self._retaining[0].evict(number)
        return next(f for f in self._retaining if number in f.eviction_order).evict(number)

    def roll_back(self, sequences: Several[Sequence]) -> set[int]:
        return set(chain.from_iterable(f.roll_back(sequences) for f in self._all))

    def keep_surviving(self, surviving: Callable[[SurvivingKv], int]) -> list[SurvivingKv]:
        return [keep for f in self._all for keep in f.keep_surviving(surviving)]

    def relocate(self, kept: Several[SurvivingKv]) -> None:
        for f in self._all:
            f.relocate(kept)

    def resume(self, ready: ComputeReady) -> None:
        for f in self._all:
            f.resume(ready)

    def reset(self, era: bytes, sequences: Several[Sequence]) -> list[SequenceOp]:
        return [op for f in self._all for op in f.reset(era, sequences)]
