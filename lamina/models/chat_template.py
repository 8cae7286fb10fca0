"""Chat templates: a conversation as a prompt, the variables that requests may set, and an operator's own template."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .errors import ModelError
from .model_files import one_line

# Variables that Hugging Face fills itself, and words that its function would take as other arguments.
RESERVED = frozenset(
    {"messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "padding",
     "truncation", "continue_final_message", "tokenize", "max_length", "return_tensors", "return_dict",
     "tokenizer_kwargs", "return_assistant_tokens_mask", "sanitize_control_tokens"}
)  # fmt: skip
_GIVEN = RESERVED | {"raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token", "unk_token"}
MAX_TEMPLATE = 1 << 20  # characters; the longest known templates have 40,000
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # Hugging Face's own tag, which marks a part


class RenderedChat(str):
    """A conversation as a prompt, with all special tokens that it needs."""


def render_chat(
    tokenizer: Any, messages: Sequence[dict[str, Any]], *, content_format: str = "auto", **options: Any
) -> RenderedChat:
    """Return a conversation in the model's template, up to the assistant's next message. ``messages``: {"role",
    "content"} each. ``content_format``: the form of contents that the template gets, as in vLLM: "string", "openai"
    (lists of parts), or "auto", the one that it shows. ``options``: of the tokenizer's apply_chat_template. Raises
    ModelError if the model has no chat template, ValueError if the template refuses the messages or leaves them out.
    """
    if getattr(tokenizer, "chat_template", None) is None and not options.get("chat_template"):
        raise ModelError("this model has no chat template: use text prompts, or set tokenizer.chat_template")
    render = partial(_rendered, tokenizer, {"add_generation_prompt": True} | options)
    conversation = [_as_text(m) for m in messages]
    if content_format == "openai":
        return render([_as_parts(m) for m in messages])
    text, error = RenderedChat(), None
    try:
        text = render(conversation)
    except ValueError as e:
        error = e
    lost = {_role(m) for m in conversation if error or not _surely_shows(text, m)}
    as_parts, silent = set[str](), None
    if content_format == "auto" and lost:
        shown = _shown_roles(render, conversation, _as_text)
        if (shown is None) == (error is not None):
            as_parts = lost - (shown or set())
    if as_parts:
        silent = next(iter(sorted(as_parts - (_shown_roles(render, conversation, _as_parts) or set()))), None)
    if error is not None and (silent or not as_parts):
        raise error
    if silent:
        raise ValueError(f"the chat template leaves out what the {silent} says, as text and as parts: set another one")
    if as_parts:
        pairs = zip(conversation, messages, strict=True)
        text = render([_as_parts(m) if _role(plain) in as_parts else plain for plain, m in pairs])
    return text


def _rendered(tokenizer: Any, options: dict[str, Any], messages: list[dict[str, Any]]) -> RenderedChat:
    try:
        return RenderedChat(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except MemoryError:
        raise
    except Exception as error:  # any class: a template is a program
        raise ValueError(f"the chat template refuses these messages: {one_line(error)}") from error


_Messages = list[dict[str, Any]]
_PROBE = re.compile(r"xq(\d+)zj")  # in no template
_MAX_LITERAL = 64  # characters of a text that a template may have by itself, such as "user"


def _role(message: dict[str, Any]) -> str:
    return str(message.get("role"))


def _shown_roles(
    render: Callable[[_Messages], str], messages: _Messages, form: Callable[[dict[str, Any]], dict[str, Any]]
) -> set[str] | None:
    """Return the roles of which a template shows what they say in this form; None if it refuses that."""
    roles = list(dict.fromkeys(map(_role, messages)))
    numbers = {role: number for number, role in enumerate(roles)}
    try:
        text = render([form({**m, "content": f"xq{numbers[_role(m)]}zj"}) for m in messages])
    except ValueError:
        return None
    return {roles[int(number)] for number in _PROBE.findall(text.lower())}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose parts of text are one text, a line each, as in vLLM."""
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(part, dict) and "text" in part for part in content):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _surely_shows(text: str, message: dict[str, Any]) -> bool:
    """Return whether a rendered text has a message's, which no template has by itself."""
    content = message.get("content")
    if not isinstance(content, str) or not (content := content.strip()):
        return True
    return len(content) > _MAX_LITERAL and content in text


def read_template(path: str) -> str:
    """Return the chat template in a file. Raises ValueError that names the flag."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise ValueError(f"--chat-template {path}: {reason}") from e
    check_length(text, f"--chat-template {path}: it")
    variables_of(text, path)
    return text


def check_length(template: str, subject: str) -> None:
    """Raise ValueError, which begins with ``subject``, for a template that is too long."""
    if len(template) > MAX_TEMPLATE:
        raise ValueError(f"{subject} has {len(template)} characters: at most {MAX_TEMPLATE} are read")


def variables_of(template: str, path: str = "of the model") -> frozenset[str]:
    """Return the variables of a template that only a request can fill. Raises ValueError."""
    import jinja2
    from jinja2 import meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_GENERATION.sub("", template))
    except RecursionError as e:
        raise ValueError(f"--chat-template {path}: it is nested too deeply") from e
    except jinja2.TemplateSyntaxError as e:
        raise ValueError(f"--chat-template {path}: line {e.lineno}: {e.message}") from e
    return frozenset(meta.find_undeclared_variables(parsed)) - _GIVEN
