"""Reasoning of Granite 3.2, between two sentences."""

from __future__ import annotations

from .contract import ReasoningParser
from .think_tags import ThinkTags

SPECIAL = False
MARKS: tuple[str, ...] = ()
_MARKS = (
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)


def open_parser(prompt_end: str) -> ReasoningParser:
    """Return a parser for one completion."""
    return ThinkTags(prompt_end, _MARKS, always=False)
