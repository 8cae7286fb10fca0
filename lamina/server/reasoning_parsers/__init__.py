"""Reasoning parsers: they divide a completion into reasoning and the answer, one module for each family of models.

A module has ``SPECIAL``, whether the marks may be special tokens, ``MARKS``, of which a model that reasons has one in
its chat template or vocabulary, and ``open_parser(prompt_end)``. That returns a
ReasoningParser (``contract.py``) for the completion of a prompt that ends so.
"""

from __future__ import annotations

from collections.abc import Container
from importlib import import_module
from typing import Any

from .contract import ReasoningParser

# vLLM's name -> the module in this package.
_NAMES = ("qwen3", "deepseek_r1", "openai_gptoss", "glm45", "granite", "minimax_m2")
REASONING_PARSERS = {name: name for name in _NAMES}


def _module(name: str) -> Any:
    return import_module(f".{REASONING_PARSERS[name]}", __package__)


def open_reasoning(name: str, prompt_end: str) -> ReasoningParser:
    """Return a new parser for one completion. ``prompt_end``: the last characters of its prompt."""
    parser: ReasoningParser = _module(name).open_parser(prompt_end)
    return parser


def has_special_marks(name: str) -> bool:
    """Return whether marks of reasoning may be special tokens, which texts usually leave out."""
    return bool(_module(name).SPECIAL)


def missing_marks(name: str, template: str, vocabulary: Container[str]) -> str:
    """Return the marks of reasoning, none of which the model's chat template or its vocabulary has; "" if it has one,
    or if the format has no certain marks.
    """
    marks = _module(name).MARKS
    return "" if any(mark in template or mark in vocabulary for mark in marks) else " and ".join(marks)
