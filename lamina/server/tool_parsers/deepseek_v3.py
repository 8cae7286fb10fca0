"""Calls of DeepSeek V3 and R1: a name and a block of JSON between tags."""

# ruff: noqa: RUF001 - the model's marks have wide bars

from __future__ import annotations

from functools import partial

from . import Tools
from .contract import ToolParser
from .json_text import NameAndJson
from .tagged import TaggedCalls

MARKS = ("<｜tool▁call▁begin｜>", "```json")
SPECIAL = True
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _name(head: str) -> str:
    return head.partition("<｜tool▁sep｜>")[2]


def begins(tools: Tools) -> tuple[str, ...]:
    """Return the texts that begin calls."""
    return (*_AROUND[:1], "<｜tool▁call▁begin｜>")


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion."""
    body = partial(NameAndJson, "\n```json\n", _name)
    return TaggedCalls("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", body, _AROUND)
