"""Calls of Phi 4 mini: a list of objects after the word functools."""

from __future__ import annotations

from . import Tools
from .contract import ToolParser
from .json_text import JsonCalls
from .tagged import TaggedCalls

MARKS = ("functools[",)
SPECIAL = False


def _list() -> JsonCalls:
    calls = JsonCalls()
    calls.push("[", [])
    return calls


def begins(tools: Tools) -> tuple[str, ...]:
    """Return the texts that begin calls."""
    return MARKS


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion."""
    return TaggedCalls(MARKS[0], "", _list)
