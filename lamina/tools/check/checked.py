"""The engine on which settings run, its recording executor, and the failpoint by which workers die."""

from __future__ import annotations

from typing import NamedTuple

from lamina.api.llm import LLM
from lamina.observe.failpoints import Failpoint

from .fault_case import FaultRunner
from .matrix import Setting
from .recording_executor import RecordingExecutor
from .resize_case import ResizeRunner


class CheckedEngine(NamedTuple):
    """An engine of a check. ``failpoint``: of its workers, if one is to die."""

    llm: LLM
    executor: RecordingExecutor
    failpoint: Failpoint | None

    def runner(self, setting: Setting) -> ResizeRunner | FaultRunner:
        """Return the object that runs the prompts."""
        if setting.fault is None or self.failpoint is None:
            return ResizeRunner(self.llm, setting.changes)
        return FaultRunner(self.llm, self.executor, self.failpoint, setting.fault)
