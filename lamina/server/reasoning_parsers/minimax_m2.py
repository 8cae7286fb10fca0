"""Reasoning of MiniMax M2, which always reasons: its template has the first mark."""

from __future__ import annotations

from .contract import ReasoningParser
from .think_tags import ThinkTags

SPECIAL = True
MARKS: tuple[str, ...] = ("<think>", "</think>")


def open_parser(prompt_end: str) -> ReasoningParser:
    """Return a parser for one completion."""
    return ThinkTags(prompt_end, always=True)
