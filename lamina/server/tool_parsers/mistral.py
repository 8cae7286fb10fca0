"""Calls of Mistral: a list of objects after a mark, or in newer models a name and its arguments."""

from __future__ import annotations

from . import Tools
from .contract import Event, ToolParser
from .json_text import CallBody, JsonCalls, NameAndJson
from .tagged import TaggedCalls

MARKS = ("[TOOL_CALLS]",)
SPECIAL = True


def _name(head: str) -> str:
    return head.partition("[CALL_ID]")[0]


class _Either:
    """The form that the first character shows."""

    def __init__(self) -> None:
        self._body: CallBody | None = None

    @property
    def has_begun(self) -> bool:
        return self._body is not None and self._body.has_begun

    @property
    def is_broken(self) -> bool:
        return self._body is not None and self._body.is_broken

    def push(self, text: str, events: list[Event]) -> str | None:
        if self._body is None:
            if not (text := text.lstrip()):
                return None
            self._body = JsonCalls() if text[0] == "[" else NameAndJson("[ARGS]", _name)
        return self._body.push(text, events)


def begins(tools: Tools) -> tuple[str, ...]:
    """Return the texts that begin calls."""
    return ("[TOOL_CALLS]",)


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion."""
    return TaggedCalls("[TOOL_CALLS]", "", _Either)
