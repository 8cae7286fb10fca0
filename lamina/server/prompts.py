"""Prompts to token ids: text, token ids or a conversation. Tokenizing runs on one thread beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from lamina.models.errors import ModelError
from lamina.models.tokens import apply_chat_template, token_ids

from .errors import ApiError
from .messages import Ready
from .protocol import Message

T = TypeVar("T")
INLINE_CHARS = 512  # shorter text is tokenized at once: a change of threads would take longer


@dataclass(frozen=True)
class Prompt:
    """What the engine completes. ``text``: as the client wrote it, or what its tokens decode to."""

    ids: list[int]
    text: str


class Prompter:
    """Owns the tokenizer on behalf of all requests."""

    def __init__(self, tokenizer: Any, ready: Ready) -> None:
        self.tokenizer = tokenizer
        self._ready = ready
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lamina-tokenizer")
        longest = max((len(t) for t in tokenizer.get_vocab()), default=1)
        self._max_chars = longest * ready.max_model_len  # longer text cannot fit, so need not be tokenized

    async def completions(self, value: Any, max_prompts: int, max_tokens: int | None) -> list[Prompt]:
        """All prompts of a completion request. Raises ApiError."""
        parts = split_prompts(value, max_prompts)
        chars = sum(len(p) for p in parts if isinstance(p, str))
        prompts = await self._run(chars, lambda: [self._prompt(p) for p in parts])
        for prompt in prompts:
            self.check(prompt.ids, max_tokens, "prompt")
        return prompts

    async def chat(self, messages: list[Message], max_tokens: int | None) -> Prompt:
        """A conversation in the model's template. Raises ApiError."""
        plain = [_plain(m) for m in messages]
        chars = sum(len(m["content"]) for m in plain)
        self._check_chars(chars, "messages")
        try:
            ids = await self._run(chars + INLINE_CHARS, lambda: apply_chat_template(self.tokenizer, plain))
        except (ModelError, ValueError) as e:
            raise ApiError(400, str(e), param="messages", code="invalid_value") from e
        self.check(ids, max_tokens, "messages")
        return Prompt(ids, "")

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text. Raises ApiError where it cannot fit."""
        self._check_chars(len(text), "prompt")
        return await self._run(len(text), lambda: token_ids(self.tokenizer, text, add_special_tokens=special))

    async def decode(self, ids: list[int]) -> str:
        """The text of token ids. Raises ApiError."""
        self._check_ids(ids, "tokens")
        return await self._run(len(ids), lambda: str(self.tokenizer.decode(ids)))

    def check(self, ids: list[int], max_tokens: int | None, param: str) -> None:
        """Raises ApiError for a prompt that cannot be served."""
        limit = self._ready.max_model_len
        if not ids:
            raise ApiError(400, f"{param} is empty: it needs at least one token", param=param, code="invalid_value")
        if len(ids) + (max_tokens or 1) > limit:
            asked = "" if max_tokens is None else f" and {max_tokens} new ones"
            text = f"the context has {limit} tokens; asked for were {len(ids)} tokens of {param}{asked}"
            raise ApiError(400, text, param=param, code="context_length_exceeded")
        self._check_ids(ids, param)

    def _check_ids(self, ids: list[int], param: str) -> None:
        vocab = self._ready.vocab_size
        if any(not 0 <= t < vocab for t in ids):
            raise ApiError(400, f"{param}: token ids must lie in 0..{vocab - 1}", param=param, code="invalid_value")

    def _check_chars(self, chars: int, param: str) -> None:
        if chars > self._max_chars:
            text = f"the context has {self._ready.max_model_len} tokens; {chars} characters of {param} cannot fit"
            raise ApiError(400, text, param=param, code="context_length_exceeded")

    def _prompt(self, part: str | list[int]) -> Prompt:
        if isinstance(part, str):
            self._check_chars(len(part), "prompt")
            return Prompt(token_ids(self.tokenizer, part), part)
        self._check_ids(part, "prompt")
        return Prompt(part, "")

    async def _run(self, chars: int, work: Callable[[], T]) -> T:
        if chars <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def split_prompts(value: Any, max_prompts: int) -> list[str | list[int]]:
    """The prompts in the four forms that ``prompt`` may have. Raises ApiError."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if len(value) > max_prompts:
            text = f"prompt must be at most {max_prompts} prompts, not {len(value)}"
            raise ApiError(400, text, param="prompt", code="invalid_value")
        if all(isinstance(p, str) for p in value) or all(isinstance(p, list) and p and _is_ids(p) for p in value):
            return value
    raise ApiError(
        400, "prompt must be a string, strings, token ids, or lists of token ids", param="prompt", code="invalid_value"
    )


def _is_ids(value: list[Any]) -> bool:
    return all(type(t) is int for t in value)


def _plain(message: Message) -> dict[str, Any]:
    content = message.content or ""
    if not isinstance(content, str):
        for part in content:
            if part.type != "text" or part.text is None:
                text = f"content parts of type {part.type[:32]!r} are not supported: only text is"
                raise ApiError(400, text, param="messages", code="unsupported_value")
        content = "".join(p.text or "" for p in content)
    if (message.model_extra or {}).get("tool_calls"):
        raise ApiError(400, "tool_calls are not supported by this server", param="messages", code="unsupported_value")
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content}
