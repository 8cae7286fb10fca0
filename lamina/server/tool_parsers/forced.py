"""Calls that a grammar enforces: the whole text is a list of objects, or the arguments of one function."""

from __future__ import annotations

from .contract import Arguments, CallBegin, Event, Format
from .json_text import JsonCalls


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


REQUIRED = Format((), False, lambda tools: (), lambda tools: _Required())
NAMED = Format((), False, lambda tools: (), lambda tools: _Named(next(iter(tools))))  # of the function alone
