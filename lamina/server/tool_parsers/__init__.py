"""Tool parsers: they find the tool calls in a completion's text."""

from __future__ import annotations

from . import llama3_json, openai, pythonic, tagged_formats
from .contract import Format
from .forced import NAMED, REQUIRED

# By vLLM's name, in the order in which a template is compared with them.
TOOL_PARSERS: dict[str, Format] = {
    "openai": openai.FORMAT,
    "minimax_m2": tagged_formats.MINIMAX_M2,
    "glm45": tagged_formats.GLM45,
    "kimi_k2": tagged_formats.KIMI_K2,
    "qwen3_coder": tagged_formats.QWEN3_CODER,
    "hermes": tagged_formats.HERMES,
    "granite4": tagged_formats.GRANITE4,
    "mistral": tagged_formats.MISTRAL,
    "deepseek_v3": tagged_formats.DEEPSEEK_V3,
    "deepseek_v31": tagged_formats.DEEPSEEK_V31,
    "llama3_json": llama3_json.FORMAT,
    "phi4_mini_json": tagged_formats.PHI4_MINI_JSON,
    "pythonic": pythonic.FORMAT,
}
# Formats that a grammar enforces, by the tool_choice that asks for them.
FORCED = {"required": REQUIRED, "named": NAMED}


def format_of(name: str) -> Format:
    """Return a format of TOOL_PARSERS or FORCED."""
    return (TOOL_PARSERS | FORCED)[name]


def parser_of_template(template: str) -> str | None:
    """Return the format of which a chat template has all marks; None if there is none."""
    return next((name for name, each in TOOL_PARSERS.items() if all(mark in template for mark in each.marks)), None)
