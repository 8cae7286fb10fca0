"""Reasoning of DeepSeek R1, which always reasons: the first mark may be left out."""

from __future__ import annotations

from .contract import ReasoningParser
from .think_tags import ThinkTags

SPECIAL = False
MARKS: tuple[str, ...] = ("<think>", "</think>")


def open_parser(prompt_end: str) -> ReasoningParser:
    """Return a parser for one completion."""
    return ThinkTags(prompt_end, always=True)
