"""The ordered table of a scheduler's features. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several
from typing import TypeVar

from lamina.protocol.control import ComputeReady
from lamina.protocol.executor import Report
from lamina.protocol.step_plan import SequenceOp, SurvivingKv

from .feature import Feature, Leaving, Loss, NewMemory, PlanDraft, Scheduling
from .scheduler_output import Round, ScheduledStep, TransferResult
from .sequence import Sequence
from .starts import Candidates, KvStart, Verdict

AnyFeature = TypeVar("AnyFeature", bound=Feature)
HOOKS = tuple(name for name in vars(Feature) if not name.startswith("_"))


class FeatureTable:
    """The features of one scheduler. Each hook calls the features that implement it, in their order."""

    def __init__(self, features: Iterable[Feature]) -> None:
        self._all = tuple(features)
        self._with = {
            hook: [f for f in self._all if getattr(type(f), hook) is not getattr(Feature, hook)] for hook in HOOKS
        }

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._all)

    def get(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """Return the feature of a class; None if it is not configured."""
        return next((f for f in self._all if isinstance(f, kind)), None)

    def __getitem__(self, kind: type[AnyFeature]) -> AnyFeature:
        """Return the feature of a class. Raises KeyError if it is not configured."""
        feature = self.get(kind)
        if feature is None:
            raise KeyError(kind.__name__)
        return feature

    @property
    def has_transfers(self) -> bool:
        return any(f.has_transfers for f in self._with["has_transfers"])

    def on_arrival(self, sequence: Sequence, *, is_new: bool = True) -> list[Sequence]:
        others = [f.on_arrival(sequence, is_new=is_new) for f in self._with["on_arrival"]]
        return [other for other in others if other is not None]

    def on_leave(self, leaving: Leaving) -> Leaving:
        for f in self._with["on_leave"]:
            f.on_leave(leaving)
        return leaving

    def begin_round(self, scheduling: Scheduling) -> None:
        for f in self._with["begin_round"]:
            f.begin_round(scheduling)

    def batch_ops(self, running: Several[Sequence]) -> list[SequenceOp]:
        return [op for f in self._with["batch_ops"] for op in f.batch_ops(running)]

    def may_start(self, sequence: Sequence) -> bool:
        return any(f.may_start(sequence) for f in self._with["may_start"])

    def find_starts(self, candidates: Candidates) -> None:
        for f in self._with["find_starts"]:
            f.find_starts(candidates)
            if candidates.verdict is not Verdict.BEGINS:
                return

    def on_started(self, candidates: Candidates, start: KvStart | None) -> list[SequenceOp]:
        return [op for f in self._with["on_started"] for op in f.on_started(candidates, start)]

    def after_admission(self, scheduling: Scheduling) -> None:
        for f in self._with["after_admission"]:
            f.after_admission(scheduling)

    def extend_plan(self, draft: PlanDraft) -> None:
        for f in self._with["extend_plan"]:
            f.extend_plan(draft)

    def on_report(self, report: Report) -> TransferResult | None:
        ended = [f.on_report(report) for f in self._with["on_report"]]
        return next((transfer for transfer in ended if transfer is not None), None)

    def on_loaded(self, sequence: Sequence) -> list[SequenceOp]:
        return [op for f in self._with["on_loaded"] for op in f.on_loaded(sequence)]

    def on_step_done(self, step: ScheduledStep, done: Round | None) -> None:
        for f in self._with["on_step_done"]:
            f.on_step_done(step, done)

    @property
    def eviction_order(self) -> list[int]:
        return [number for f in self._with["eviction_order"] for number in f.eviction_order]

    def evict(self, number: int) -> SequenceOp:
        *others, last = self._with["evict"]
        return next((f for f in others if number in f.eviction_order), last).evict(number)

    def roll_back(self, loss: Loss) -> None:
        for f in reversed(self._with["roll_back"]):
            f.roll_back(loss)

    def relocate(self, kept: list[SurvivingKv], memory: NewMemory) -> None:
        for f in self._with["relocate"]:
            f.relocate(kept, memory)

    def resume(self, ready: ComputeReady) -> None:
        for f in self._with["resume"]:
            f.resume(ready)

    def reset(self, era: bytes, sequences: Several[Sequence]) -> list[SequenceOp]:
        return [op for f in self._with["reset"] for op in f.reset(era, sequences)]
