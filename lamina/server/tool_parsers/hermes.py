"""Calls of Hermes 2 Pro, Qwen 2.5 and Qwen 3: an object between two tags."""

from __future__ import annotations

from . import Tools
from .contract import ToolParser
from .json_text import JsonCall
from .tagged import TaggedCalls

MARKS = ("<tool_call>", '"arguments":')
SPECIAL = False


def begins(tools: Tools) -> tuple[str, ...]:
    """Return the texts that begin calls."""
    return ("<tool_call>",)


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion."""
    return TaggedCalls("<tool_call>", "</tool_call>", JsonCall)
