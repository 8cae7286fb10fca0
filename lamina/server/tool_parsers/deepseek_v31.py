"""Calls of DeepSeek V3.1: a name and JSON between tags."""

# ruff: noqa: RUF001 - the model's marks have wide bars

from __future__ import annotations

from functools import partial

from . import Tools
from .contract import ToolParser
from .json_text import NameAndJson
from .tagged import TaggedCalls

MARKS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")
SPECIAL = True
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def begins(tools: Tools) -> tuple[str, ...]:
    """Return the texts that begin calls."""
    return (_AROUND[0], MARKS[0])


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion."""
    body = partial(NameAndJson, "<｜tool▁sep｜>", str)
    return TaggedCalls("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", body, _AROUND)
