"""The template process: runs chat templates, which are programs of a model's directory, within bounds of the kernel.

Its parent (``lamina.executor.chat_renderer``) ends it when a template runs too long. If the parent has ended, the bound
of CPU time ends it. It holds no state but compiled templates, so another one takes its place.
"""

from __future__ import annotations

import math
import mmap
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from lamina.protocol.control import ControlLink, LinkClosedError

from .chat_template import render_chat, variables_of
from .model_files import one_line

SPARE_S = 1.0  # of CPU time beyond the deadline, which the parent keeps by the clock
AS_IT_IS = "surrogatepass"  # a template may make half a character, which its reader refuses


class RenderChat(msgspec.Struct, frozen=True, kw_only=True, tag="render-chat"):
    """Parent -> template process: render a conversation. The reply is Rendered or TemplateFailed. ``template``: text,
    or several texts by name. ``special_tokens``: their texts by name. ``options``: of apply_chat_template.
    """

    template: str | dict[str, str] | None
    special_tokens: dict[str, Any]
    messages: list[dict[str, Any]]
    content_format: str
    options: dict[str, Any]
    timeout_s: float
    memory: int  # bytes


class FindVariables(msgspec.Struct, frozen=True, kw_only=True, tag="find-variables"):
    """Parent -> template process: which variables may a request set? The reply is Variables or TemplateFailed."""

    template: str
    timeout_s: float
    memory: int


class Rendered(msgspec.Struct, frozen=True, tag="rendered"):
    """Template process -> parent. ``text``: UTF-8, by ``AS_IT_IS``."""

    text: bytes


class Variables(msgspec.Struct, frozen=True, tag="variables"):
    """Template process -> parent."""

    names: list[str]


class TemplateFailed(msgspec.Struct, frozen=True, kw_only=True, tag="template-failed"):
    """Template process -> parent: the template fails, for the reason in ``text``, or takes more than its memory."""

    text: str = ""
    is_too_large: bool = False


class TemplateReady(msgspec.Struct, frozen=True, tag="template-ready"):
    """Template process -> parent, first message: all is imported."""


FROM_PARENT = RenderChat | FindVariables
FROM_TEMPLATES = TemplateReady | Rendered | Variables | TemplateFailed


def serve_templates(sock: socket.socket) -> None:
    """Serve one parent over ``sock`` until the link ends."""
    from transformers import PreTrainedTokenizerBase

    class Template:
        """The part of a Hugging Face tokenizer that renders its template."""

        apply_chat_template = PreTrainedTokenizerBase.apply_chat_template
        get_chat_template = PreTrainedTokenizerBase.get_chat_template

        def __init__(self, chat_template: str | dict[str, str] | None, special_tokens: dict[str, Any]) -> None:
            self.chat_template, self.special_tokens_map = chat_template, special_tokens

    def work(message: RenderChat | FindVariables) -> Rendered | Variables:
        if isinstance(message, FindVariables):
            return Variables(sorted(variables_of(message.template)))
        template = Template(message.template, message.special_tokens)
        text = render_chat(template, message.messages, content_format=message.content_format, **message.options)
        return Rendered(text.encode(errors=AS_IT_IS))

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its memory has texts of clients
    link = ControlLink(sock, FROM_PARENT)
    with suppress(LinkClosedError):
        link.send(TemplateReady())
        while True:
            message = link.recv()
            try:
                with bounded(message.timeout_s, message.memory):
                    reply: Rendered | Variables | TemplateFailed = work(message)
            except MemoryError:
                reply = TemplateFailed(is_too_large=True)
            except Exception as error:  # noqa: BLE001 - any class: a template is a program
                reply = TemplateFailed(text=str(error) if isinstance(error, ValueError) else one_line(error))
            link.send(reply)
    link.close()


@contextmanager
def bounded(seconds: float, nbytes: int) -> Iterator[None]:
    """Let the kernel end this process when it has used ``seconds`` of CPU time and some more, and refuse it more than
    ``nbytes`` of further memory within the block.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    now = math.ceil(used.ru_utime + used.ru_stime)
    _lower(resource.RLIMIT_CPU, now + math.ceil(seconds + SPARE_S))
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    before = resource.getrlimit(resource.RLIMIT_AS)
    _lower(resource.RLIMIT_AS, mapped + nbytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _lower(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
