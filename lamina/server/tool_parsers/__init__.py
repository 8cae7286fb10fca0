"""Tool parsers: they find the tool calls in a completion's text, one module for each format.

A module has ``MARKS``, texts that are all in the chat templates of its format. ``SPECIAL`` says whether calls need
special tokens in the text. ``begins(tools)`` returns the texts that begin calls. ``open_parser(tools)`` returns a
ToolParser (``contract.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

from .contract import ToolParser

# vLLM's name -> the module in this package, in the order in which a template is compared with them.
_NAMES = (
    "openai", "minimax_m2", "glm45", "kimi_k2", "qwen3_coder", "hermes", "granite4", "mistral", "deepseek_v3",
    "deepseek_v31", "llama3_json", "phi4_mini_json", "pythonic",
)  # fmt: skip
TOOL_PARSERS = {name: name for name in _NAMES}
# Formats that a grammar enforces, by the tool_choice that asks for them.
FORCED = {"required": "required", "named": "named"}
Tools = Mapping[str, Mapping[str, Any]]  # name of a function -> the JSON schema of its parameters


def _module(name: str) -> Any:
    return import_module(f".{(TOOL_PARSERS | FORCED)[name]}", __package__)


def open_parser(name: str, tools: Tools) -> ToolParser:
    """Return a new parser for one completion."""
    parser: ToolParser = _module(name).open_parser(tools)
    return parser


def begins_of_calls(name: str, tools: Tools) -> tuple[str, ...]:
    """Return the texts with which calls of this format begin."""
    return tuple(_module(name).begins(tools))


def needs_special_tokens(name: str) -> bool:
    """Return whether the calls of this format begin with special tokens, which texts usually leave out."""
    return bool(_module(name).SPECIAL)


def parser_of_template(template: str, names: Collection[str] = tuple(TOOL_PARSERS)) -> str | None:
    """Return the format of which a chat template has all marks; None if there is none."""
    return next((name for name in names if all(mark in template for mark in _module(name).MARKS)), None)
