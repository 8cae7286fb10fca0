"""Calls of Kimi K2: an id, which has the name, and JSON between tags. Replies of tools go by that id."""

from __future__ import annotations

from functools import partial

from . import Tools
from .contract import ToolParser
from .json_text import NameAndJson
from .tagged import TaggedCalls

MARKS = ("<|tool_call_argument_begin|>",)
SPECIAL = True
_AROUND = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


def _name(id: str) -> str:
    return id.strip().removeprefix("functions.").rpartition(":")[0]


def begins(tools: Tools) -> tuple[str, ...]:
    """Return the texts that begin calls."""
    return (_AROUND[0], "<|tool_call_begin|>")


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion."""
    body = partial(NameAndJson, MARKS[0], _name, id_of=str.strip)
    return TaggedCalls("<|tool_call_begin|>", "<|tool_call_end|>", body, _AROUND)
