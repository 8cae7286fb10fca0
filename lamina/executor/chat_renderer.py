"""Renders chat templates in a process of their own, which a template can neither keep nor fill.

A model's chat template is a program that its author wrote, and clients choose what it reads. jinja2's sandbox keeps it
from files and attributes, but it may loop without end, or make a text as large as it likes.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import msgspec

from lamina.config.option import size_flag
from lamina.models.chat_template import RenderedChat, check_length, render_chat
from lamina.models.model_files import one_line
from lamina.models.template_process import (
    AS_IT_IS,
    FROM_TEMPLATES,
    FindVariables,
    RenderChat,
    Rendered,
    TemplateFailed,
    Variables,
)
from lamina.protocol.control import ControlLink, LinkBrokenError, LinkClosedError, LinkStalledError

from .launchers.local import ProcessWorker

START_S = 120.0  # for the process to import what it needs, on a busy machine
END_S = 1.0  # for a process whose link has ended to be gone
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
        self._lock = threading.Lock()  # held while a template runs
        self._process: ProcessWorker | None = None
        self._link: ControlLink | None = None
        self._is_closed = False

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
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the template process, also while a template runs. Idempotent."""
        self._is_closed = True
        process, link = self._process, self._link
        if process is not None and link is not None:
            link.close()
            process.join(0.0)

    def _ask(self, question: RenderChat | FindVariables, kind: type[T]) -> T:
        with self._lock:
            link = self._running()
            link.limit_sends(self._limits.timeout_s)
            try:
                link.send(question)
                reply = link.recv(self._limits.timeout_s)
            except (UnicodeEncodeError, OverflowError) as error:  # before any of it was sent
                raise ValueError(f"a conversation must be UTF-8, and its numbers 64 bits: {one_line(error)}") from error
            except LinkClosedError as error:
                raise ValueError(self._why_ended(error)) from error
            except TimeoutError as error:
                self._end()
                raise ValueError(self._too_long) from error
            except BaseException:  # the reply is still to come
                self._end()
                raise
            if isinstance(reply, TemplateFailed) and reply.is_too_large:
                self._end()  # its heap would keep what it took
                raise ValueError(self._too_large)
        if isinstance(reply, TemplateFailed):
            raise ValueError(reply.text)
        if not isinstance(reply, kind):
            raise ValueError(f"the template process has sent {type(reply).__name__}")
        return reply

    def _running(self) -> ControlLink:
        """Return the link of the process, a new one if the last has ended. Raises ValueError after ``close``."""
        if self._process is not None and self._process.exit_reason() is not None:
            self._end()
        if self._process is None or self._link is None:
            self._process = ProcessWorker("template", 0)
            self._link = ControlLink(self._process.sock, FROM_TEMPLATES, most_bytes=self._limits.memory)
            try:
                self._link.recv(START_S)
            except (LinkClosedError, TimeoutError) as error:
                why = self._process.exit_reason() or f"has not started in {START_S:g} s"
                self._end()
                raise OSError(f"the template process {why}") from error
        if self._is_closed:
            self._end()
            raise ValueError("this model is closed: it renders no more conversations")
        return self._link

    def _why_ended(self, error: LinkClosedError) -> str:
        """End the process, whose link has ended, and return the reason."""
        process = self._process
        self._end(wait_s=END_S)
        if isinstance(error, LinkStalledError) or (process is not None and process.status == -signal.SIGXCPU):
            return self._too_long
        if isinstance(error, LinkBrokenError):
            return self._too_large
        return f"the chat template has ended its process, which {process and process.exit_reason()}"

    def _end(self, wait_s: float = 0.0) -> None:
        process, link = self._process, self._link
        if link is not None:
            link.close()
        if process is not None:
            process.join(wait_s)
        self._process = self._link = None

    @property
    def _too_long(self) -> str:
        limits = self._limits
        return (
            f"the chat template has run for {limits.timeout_s:g} s and was ended: simplify it, or raise "
            f"{limits.timeout_name}"
        )

    @property
    def _too_large(self) -> str:
        limits = self._limits
        return (
            f"the chat template takes more than {size_flag(limits.memory)} of memory: simplify it, or raise "
            f"{limits.memory_name}"
        )


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
