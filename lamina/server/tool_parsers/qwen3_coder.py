"""Calls of Qwen3-Coder and Qwen 3.5: parameters in tags, their values on lines of their own."""

from __future__ import annotations

from functools import partial

from . import Tools
from .contract import ToolParser
from .tagged import TaggedCalls
from .tagged_parameters import Form, TaggedParameters

MARKS = ("<function=", "<parameter=")
SPECIAL = False
_FORM = Form((">",), "<parameter=", ">", "</parameter>", "</function>", on_lines=True)


def begins(tools: Tools) -> tuple[str, ...]:
    """Return the texts that begin calls."""
    return ("<tool_call>", "<function=")


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion."""
    body = partial(TaggedParameters, _FORM, tools)
    return TaggedCalls("<function=", "", body, ("<tool_call>", "</tool_call>"))
