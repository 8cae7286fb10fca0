"""An LLM whose engine records its plans, and what it served when workers were lost or changed."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from lamina.api.llm import CommandLLM
from lamina.engine.engine import Engine
from lamina.protocol.control import ComputeReady
from lamina.protocol.executor import EpochChanged, Executor
from lamina.protocol.kv_placement import KvLocation

from .recording_executor import RecordingExecutor


class InterruptedSequence(NamedTuple):
    """A sequence that ran when the epoch changed, and its KV."""

    request_id: int
    location: KvLocation
    num_computed_tokens: int


class Interruption(NamedTuple):
    """The sequences of an engine when the epoch changed, and its workers until then."""

    running: list[InterruptedSequence]
    num_waiting: int
    workers: ComputeReady


class RecordedEngine(Engine):
    """Records each change of the epoch before it processes it. ``recording``: of its plans."""

    def __init__(self, executor: Executor, *args: Any, **options: Any) -> None:
        self.recording = RecordingExecutor(executor)
        self.interruptions: list[Interruption] = []
        super().__init__(cast("Executor", self.recording), *args, **options)

    def on_epoch_changed(self, change: EpochChanged) -> None:
        scheduler = self.scheduler
        running = [
            InterruptedSequence(s.request_id, s.location, s.num_computed_tokens)
            for s in scheduler.running
            if not s.finished
        ]
        self.interruptions.append(Interruption(running, len(scheduler.waiting), self.worker_info))
        super().on_epoch_changed(change)


class RecordedLLM(CommandLLM):
    """An LLM with a RecordedEngine."""

    engine_class = RecordedEngine
    engine: RecordedEngine
