"""The engine on which settings run, its recorded wire, and the tripwire by which workers die."""

from __future__ import annotations

from typing import NamedTuple

from lamina.api.llm import LLM
from lamina.observe.failpoints import Failpoint

from .fault_case import FaultRunner
from .matrix import Setting
from .recording_executor import RecordingExecutor
from .resize_case import ResizeRunner


class CheckedEngine(NamedTuple):
    """``failpoint``: of its workers, where one is to die."""

    llm: LLM
    executor: RecordingExecutor
    failpoint: Failpoint | None

    def runner(self, setting: Setting) -> ResizeRunner | FaultRunner:
        """Who runs the prompts."""
        if setting.fault is None or self.failpoint is None:
            return ResizeRunner(self.llm, setting.changes)
        return FaultRunner(self.llm, self.executor, self.failpoint, setting.fault)
