"""Reasoning parsers: they divide a completion into reasoning and the answer."""

from __future__ import annotations

from collections.abc import Container
from functools import partial

from . import openai_gptoss
from .contract import ReasoningFormat
from .think_tags import ThinkTags

_GRANITE = (  # Granite 3.2 has sentences in place of tags
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
_ALWAYS = partial(ThinkTags, always=True)  # the first mark may be left out, or its template has it
_MARKED = partial(ThinkTags, always=False)  # the first mark is in the completion or at the end of the prompt
_TAGS = ("<think>", "</think>")
# By vLLM's name.
REASONING_PARSERS = {
    "qwen3": ReasoningFormat(_TAGS, False, _MARKED),
    "deepseek_r1": ReasoningFormat(_TAGS, False, _ALWAYS),
    "openai_gptoss": openai_gptoss.FORMAT,
    "glm45": ReasoningFormat(_TAGS, True, _MARKED),  # and GLM 4.6
    "granite": ReasoningFormat((), False, partial(ThinkTags, marks=_GRANITE, always=False)),
    "minimax_m2": ReasoningFormat(_TAGS, True, _ALWAYS),
}


def missing_marks(name: str, template: str, vocabulary: Container[str]) -> str:
    """Return the marks of reasoning, none of which the model's chat template or its vocabulary has; "" if it has one,
    or if the format has no certain marks.
    """
    marks = REASONING_PARSERS[name].marks
    return "" if any(mark in template or mark in vocabulary for mark in marks) else " and ".join(marks)
