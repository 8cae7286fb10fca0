"""Reasoning of Qwen 3: it begins with its mark, in the completion or at the end of the prompt."""

from __future__ import annotations

from .contract import ReasoningParser
from .think_tags import ThinkTags

SPECIAL = False
MARKS: tuple[str, ...] = ("<think>", "</think>")


def open_parser(prompt_end: str) -> ReasoningParser:
    """Return a parser for one completion."""
    return ThinkTags(prompt_end, always=False)
