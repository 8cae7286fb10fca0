"""Calls of GLM 4.5 and 4.6: a name, and keys and values in tags of their own."""

from __future__ import annotations

from functools import partial

from . import Tools
from .contract import ToolParser
from .tagged import TaggedCalls
from .tagged_parameters import Form, TaggedParameters

MARKS = ("<tool_call>", "<arg_key>")
SPECIAL = True
_FORM = Form(
    ("\n", "<arg_key>", "</tool_call>"), "<arg_key>", "<arg_value>", "</arg_value>", "</tool_call>",
    kept=("<arg_key>", "</tool_call>"), closes_key="</arg_key>",
)  # fmt: skip


def begins(tools: Tools) -> tuple[str, ...]:
    """Return the texts that begin calls."""
    return ("<tool_call>",)


def open_parser(tools: Tools) -> ToolParser:
    """Return a parser for one completion."""
    return TaggedCalls("<tool_call>", "", partial(TaggedParameters, _FORM, tools))
