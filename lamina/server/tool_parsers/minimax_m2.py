"""Calls of MiniMax M2: invocations with parameters in tags."""

from __future__ import annotations

from functools import partial

from . import Tools
from .contract import ToolParser
from .tagged import TaggedCalls
from .tagged_parameters import Form, TaggedParameters

MARKS = ("<minimax:tool_call>",)
SPECIAL = True
_FORM = Form((">",), "<parameter name=", ">", "</parameter>", "</invoke>")


def begins(tools: Tools) -> tuple[str, ...]:
    """Return the texts that begin calls."""
    return ("<minimax:tool_call>",)


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion."""
    body = partial(TaggedParameters, _FORM, tools)
    return TaggedCalls("<invoke name=", "", body, ("<minimax:tool_call>", "</minimax:tool_call>"))
