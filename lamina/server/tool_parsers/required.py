"""The calls of tool_choice "required": a grammar makes the whole text a list of objects."""

from __future__ import annotations

from . import Tools
from .contract import Event, ToolParser
from .json_text import JsonCalls

MARKS = ()
SPECIAL = False


class _Required:
    def __init__(self) -> None:
        self._calls = JsonCalls()
        self._has_ended = False

    def push(self, text: str) -> list[Event]:
        events = list[Event]()
        if not self._has_ended:
            self._has_ended = self._calls.push(text, events) is not None
        return events

    def finish(self, *, cut: bool = False) -> list[Event]:
        return []


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion."""
    return _Required()
