"""The engine on which settings run, its recorded wire, and the tripwire by which workers die."""

from __future__ import annotations

from typing import NamedTuple

from lamina.llm import LLM
from lamina.observe.tripwire import Tripwire

from .matrix import Setting
from .recorded import RecordedWire
from .resized import Resized
from .struck import Struck


class CheckedEngine(NamedTuple):
    """``tripwire``: of its workers, where one is to die."""

    llm: LLM
    wire: RecordedWire
    tripwire: Tripwire | None

    def runner(self, setting: Setting) -> Resized | Struck:
        """Who runs the prompts."""
        if setting.fault is None or self.tripwire is None:
            return Resized(self.llm, setting.changes)
        return Struck(self.llm, self.wire, self.tripwire, setting.fault)
