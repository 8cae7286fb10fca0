"""Renders chat templates in a process of their own, which a template can neither keep nor fill.

A model's chat template is a program that its author wrote, and clients choose what it reads. jinja2's sandbox keeps it
from files and attributes, but it may loop without end, or make a text as large as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import msgspec

from lamina.config.option import size_flag
from lamina.models.chat_template import RenderedChat, check_length, render_chat
from lamina.models.template_process import (
    AS_IT_IS,
    FROM_TEMPLATES,
    FindVariables,
    RenderChat,
    Rendered,
    TemplateFailed,
    Variables,
)

from .bounded_process import BoundedProcess, EndedWords

TIMEOUT_S, MEMORY = 5.0, 256 << 20  # defaults
T = TypeVar("T", Rendered, Variables)


@dataclass(frozen=True, kw_only=True)
class TemplateLimits:
    """Limits of a template for one conversation: seconds by the clock, and bytes. ``timeout_name``,
    ``memory_name``: how their user sets them.
    """

    timeout_s: float = TIMEOUT_S
    memory: int = MEMORY
    timeout_name: str = "template_timeout_s="
    memory_name: str = "template_memory="

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"{self.timeout_name} must be a positive number of seconds, not {self.timeout_s}")


class ChatRenderer:
    """Owns the template process, which starts with the first conversation. Safe from any thread; conversations are
    rendered one after another.
    """

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._too_large = (
            f"the chat template takes more than {size_flag(limits.memory)} of memory: simplify it, or raise "
            f"{limits.memory_name}"
        )
        words = EndedWords(
            what="the chat template",
            too_long=f"the chat template has run for {limits.timeout_s:g} s and was ended: simplify it, or raise "
            f"{limits.timeout_name}",
            too_large=self._too_large,
            unsendable="a conversation must be UTF-8, and its numbers 64 bits",
            closed="this model is closed: it renders no more conversations",
        )
        self._process = BoundedProcess("template", FROM_TEMPLATES, words, most_bytes=limits.memory)

    def render(
        self, tokenizer: Any, messages: Sequence[dict[str, Any]], *, content_format: str = "auto", **options: Any
    ) -> RenderedChat:
        """Return a conversation in the model's template; arguments and errors are those of ``render_chat``. Raises
        ValueError too if the template exceeds a limit.
        """
        template = getattr(tokenizer, "chat_template", None)
        given = options.get("chat_template")
        if not _is_plain(tokenizer) or (template is None and not given):
            return render_chat(tokenizer, messages, content_format=content_format, **options)
        for text in (*(template.values() if isinstance(template, dict) else [template]), given):
            if text is not None:
                check_length(text, "the chat template")
        question = RenderChat(
            template=template,
            special_tokens=dict(tokenizer.special_tokens_map),
            messages=_plain(messages),
            content_format=content_format,
            options=_plain(options),
            timeout_s=self._limits.timeout_s,
            memory=self._limits.memory,
        )
        return RenderedChat(self._ask(question, Rendered).text.decode(errors=AS_IT_IS))

    def variables(self, template: str) -> frozenset[str]:
        """Return the variables of a template that only a request can fill. Raises ValueError."""
        check_length(template, "the chat template")
        question = FindVariables(template=template, timeout_s=self._limits.timeout_s, memory=self._limits.memory)
        return frozenset(self._ask(question, Variables).names)

    @property
    def pid(self) -> int | None:
        """The template process; None if there is none."""
        return self._process.pid

    def close(self) -> None:
        """End the template process, also while a template runs. Idempotent."""
        self._process.close()

    def _ask(self, question: RenderChat | FindVariables, kind: type[T]) -> T:
        reply = self._process.ask(question, self._limits.timeout_s)
        if isinstance(reply, TemplateFailed) and reply.is_too_large:
            self._process.end()  # its heap would keep what it took
            raise ValueError(self._too_large)
        if isinstance(reply, TemplateFailed):
            raise ValueError(reply.text)
        if not isinstance(reply, kind):
            raise ValueError(f"the template process has sent {type(reply).__name__}")
        return reply


def _is_plain(tokenizer: Any) -> bool:
    """Return whether a tokenizer renders its template as Hugging Face does. Others have code of their own for that,
    which their user trusts.
    """
    import_module("transformers")  # see load_tokenizer
    from transformers import PreTrainedTokenizerBase

    own = getattr(type(tokenizer), "apply_chat_template", None)
    return own is PreTrainedTokenizerBase.apply_chat_template


def _plain(value: Any) -> Any:
    """Return a value as one of JSON. Templates see other objects by the names of their types, as in transformers."""
    return msgspec.to_builtins(value, enc_hook=_as_plain, str_keys=True)


def _as_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if callable(dump := getattr(value, "model_dump", None)):
        return dump()
    return f"<{type(value).__name__}>"
