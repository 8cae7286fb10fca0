"""The call of a function that tool_choice names: a grammar makes the whole text its arguments."""

from __future__ import annotations

from . import Tools
from .contract import Arguments, CallBegin, Event, ToolParser

MARKS = ()
SPECIAL = False


class _Named:
    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        name, self._name = self._name, None
        return [*([] if name is None else [CallBegin(name)]), Arguments(text)]

    def finish(self, *, cut: bool = False) -> list[Event]:
        return []


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion. ``tools``: the function that was named, alone."""
    return _Named(next(iter(tools)))
