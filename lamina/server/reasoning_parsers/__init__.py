"""Reasoning parsers: they divide a completion into reasoning and the answer, one module for each family of models.

A module has ``open_parser(prompt_end)``, which returns a ReasoningParser (``contract.py``) for the completion of a
prompt that ends so.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .contract import ReasoningParser

# vLLM's name -> the module in this package.
REASONING_PARSERS = {"qwen3": "qwen3", "deepseek_r1": "deepseek_r1"}


def _module(name: str) -> Any:
    return import_module(f".{REASONING_PARSERS[name]}", __package__)


def open_reasoning(name: str, prompt_end: str) -> ReasoningParser:
    """Return a new parser for one completion. ``prompt_end``: the last characters of its prompt."""
    parser: ReasoningParser = _module(name).open_parser(prompt_end)
    return parser
