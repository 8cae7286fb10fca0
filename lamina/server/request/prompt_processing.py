"""Converts prompts to token ids: text, token ids or a conversation. Not the event loop, but a thread, renders and
tokenizes; long texts go to a process. Requests of several API keys take turns.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from lamina.executor.chat_renderer import ChatRenderer
from lamina.executor.long_texts import LongTexts
from lamina.models.chat_template import RESERVED
from lamina.models.errors import ModelError
from lamina.models.tokenizer import bad_words_ids, token_ids
from lamina.request import SamplingParams
from lamina.server.engine_client.messages import EngineReady
from lamina.server.errors import ApiError, context_length_error

from .intake import INLINE_CHARS, LONG_CHARS, TextRoom
from .openai_protocol import ChatRequest, Message, Sampling, TokenizeRequest
from .tool_request import check_history, template_call

T = TypeVar("T")
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TRUNCATED_TOKENS = 1 << 20  # tokens of a prompt that the engine cuts to what fits


@dataclass(frozen=True)
class Prompt:
    """A prompt for the engine. ``text``: the client's text, or a chat's echo; otherwise ""."""

    ids: list[int]
    text: str


@dataclass(frozen=True)
class Truncation:
    """Cuts a longer prompt to its last ``tokens`` tokens or, with ``keep_first``, to its first ones."""

    tokens: int
    keep_first: bool = False

    def apply(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the remaining part of ``ids``."""
        return ids[: self.tokens] if self.keep_first else ids[-self.tokens :]


class PromptProcessor:
    """Owns the tokenizer on behalf of all requests."""

    def __init__(
        self,
        tokenizer: Any,
        ready: EngineReady,
        renderer: ChatRenderer,
        long_texts: LongTexts,
        content_format: str = "auto",
    ) -> None:
        """``long_texts``: of the same tokenizer. ``content_format``: see render_chat."""
        self.tokenizer, self.renderer, self._content_format = tokenizer, renderer, content_format
        self.long_texts = long_texts
        self._ready = ready
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lamina-tokenizer")
        self._waiting_threads = ThreadPoolExecutor(2, thread_name_prefix="lamina-prompts")  # each waits for a process
        longest = max((len(t) for t in tokenizer.get_vocab()), default=1)
        self._most = MAX_TRUNCATED_TOKENS if ready.truncates else ready.max_model_len  # most tokens of a prompt
        self._max_chars = longest * self._most  # longer text cannot fit, so it is not tokenized
        self._known: frozenset[str] | None = None  # variables of the chat template, once a request has set one

    def truncation_of(self, body: Sampling, max_tokens: int | None) -> Truncation | None:
        """Return how a request cuts longer prompts, or None if it does not. Raises ApiError."""
        asked, limit, param = body.truncate_prompt_tokens, self._ready.max_model_len, "truncate_prompt_tokens"
        if asked is None:
            return None
        if asked == 0:
            text = f"{param} must be at least 1, or -1 for as many as fit, not 0"
            raise ApiError(400, text, param=param, code="invalid_value")
        if asked > limit:
            text = f"{param} {asked} exceeds the context of {limit} tokens: lower it, or send -1 for as many as fit"
            raise ApiError(400, text, param=param, code="invalid_value")
        most = max(1, limit - (max_tokens or 1))
        return Truncation(most if asked == -1 else asked, keep_first=body.truncation_side == "right")

    async def completions(
        self,
        parts: list[str | list[int]],
        room: TextRoom,
        *,
        special: bool = True,
        cut: Truncation | None = None,
    ) -> list[Prompt]:
        """Return all prompts of a completion request; ``special``: add the tokenizer's special tokens to texts. Raises
        ApiError.
        """
        texts = [part for part in parts if isinstance(part, str)]
        for text in texts:
            self._check_chars(len(text), "prompt")

        def checked() -> list[Prompt]:
            ids = iter(encoded)
            return [self._prompt(next(ids) if isinstance(part, str) else part, part, cut) for part in parts]

        encoded = await self._encoded(texts, room, special=special)
        return await self._run(sum(map(len, parts)), checked)

    async def variables(self, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
        """Return the chat template's variables that a request sets. Raises ApiError for one that the template does not
        have, unless its value is None or False.
        """
        if not body.chat_template_kwargs and body.reasoning_effort is None:
            return _speaker_variables(body)
        param, known, variables = "chat_template_kwargs", await self._known_variables(), dict[str, Any]()
        for name, value in (body.chat_template_kwargs or {}).items():
            if name in known:
                variables[name] = value
            elif name in RESERVED or (value is not None and value is not False):  # these are like an unset one
                taken = f"it takes {', '.join(sorted(known))}" if known else "it takes none: leave it out"
                text = f"{param}.{name[:64]}: the model's chat template does not take it; {taken}"
                raise ApiError(400, text, param=param, code="unsupported_value")
        effort, param = body.reasoning_effort, "reasoning_effort"
        if effort is not None and param in known:
            variables.setdefault(param, effort)
        elif effort not in (None, "none"):
            text = f"{param} is not supported: the model's chat template does not take it; leave it out"
            raise ApiError(400, text, param=param, code="unsupported_value")
        return variables | _speaker_variables(body)

    async def _known_variables(self) -> frozenset[str]:
        """Return the variables of the chat template that a request may set; none of a text that is no template: its
        reader gets the error when it renders it.
        """
        template = getattr(self.tokenizer, "chat_template", None)
        if self._known is None and isinstance(template, str):
            with suppress(ValueError):
                self._known = await self._in_thread(lambda: self.renderer.variables(template))
        return self._known or frozenset()

    async def chat(
        self,
        messages: list[Message],
        variables: dict[str, Any],
        room: TextRoom,
        *,
        special: bool = False,
        cut: Truncation | None = None,
        counts: bool = False,
    ) -> Prompt:
        """Return a conversation in the model's template with ``variables`` set. ``special``: add the tokenizer's
        special tokens, too. ``counts``: it may be longer than what can be served. Raises ApiError.
        """
        self._check_roles(messages)
        check_history(messages)
        conversation = [_plain(m, i) for i, m in enumerate(messages)]
        texts = [text for message in messages for text in _texts_of(message)]
        self._check_chars(sum(map(len, texts)), "messages")

        def render() -> str:
            return self.renderer.render(self.tokenizer, conversation, content_format=self._content_format, **variables)

        try:
            async with room.to_render(sum(map(len, texts))):
                text = await asyncio.get_running_loop().run_in_executor(self._waiting_threads, render)
        except (ModelError, ValueError) as e:
            raise ApiError(400, str(e), param="messages", code="invalid_value") from e
        self._check_chars(len(text), "messages")
        (all_,) = await self._encoded([text], room, special=special, param="messages")
        ids = all_ if cut is None else cut.apply(all_)
        if not counts:
            self.check_length(ids, "messages")
            await self._run(len(ids), lambda: self._check_ids(ids, "messages"))
        return Prompt(list(ids), "")

    async def set_bad_words(self, params: SamplingParams) -> None:
        """Fill in the tokens of the ``bad_words`` in ``params``. Raises ApiError."""
        words = params.bad_words
        if not words:
            return
        try:
            params.bad_words_token_ids = await self._in_thread(lambda: bad_words_ids(self.tokenizer, words))
        except ValueError as e:
            raise ApiError(400, str(e), param="bad_words", code="invalid_value") from e

    async def encode(self, text: str, room: TextRoom, *, special: bool) -> list[int]:
        """Return the token ids of a text. Raises ApiError if it cannot fit."""
        self._check_chars(len(text), "prompt")
        (ids,) = await self._encoded([text], room, special=special)
        return list(ids)

    async def _encoded(
        self, texts: Sequence[str], room: TextRoom, *, special: bool, param: str = "prompt"
    ) -> Sequence[Sequence[int]]:
        """Return the token ids of each text, once it is its turn. Raises ApiError."""

        def here() -> Sequence[Sequence[int]]:
            return [token_ids(self.tokenizer, text, add_special_tokens=special) for text in texts]

        chars = sum(map(len, texts))
        try:
            async with room.to_tokenize(texts):
                if chars <= LONG_CHARS:
                    return await self._run(chars, here)
                far = partial(self.long_texts.encode, texts, special=special)
                return await asyncio.get_running_loop().run_in_executor(self._waiting_threads, far)
        except ValueError as e:
            raise ApiError(400, str(e), param=param, code="invalid_value") from e

    async def decode(self, ids: list[int]) -> str:
        """Return the text of token ids. Raises ApiError."""
        self._check_ids(ids, "tokens")
        return await self._run(len(ids), lambda: str(self.tokenizer.decode(ids)))

    def check(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError for a prompt that cannot be served."""
        self.check_length(ids, param)
        self._check_ids(ids, param)

    def check_length(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError for a prompt that is empty or too long."""
        limit = self._most
        if not ids:
            raise ApiError(400, f"{param} is empty: it needs at least one token", param=param, code="invalid_value")
        if len(ids) >= limit:  # a max_tokens that does not fit next to the prompt is cut to what fits
            raise context_length_error(limit, f"{param} has {len(ids)} tokens", param)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        vocab = self._ready.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            bad = next(t for t in ids if not 0 <= t < vocab)
            text = f"{param}: token id {bad} is out of vocabulary: token ids must lie in 0..{vocab - 1}"
            raise ApiError(400, text, param=param, code="invalid_value")

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Raises ApiError for a role that is neither OpenAI's nor one that the chat template names in quotes."""
        template = getattr(self.tokenizer, "chat_template", None)
        for number, role in enumerate(message.role for message in messages):
            if role not in ROLES and not re.search(rf"""["']{re.escape(role)}["']""", str(template)):
                where = f"messages.{number}.role"
                text = f"{where} must be one of {', '.join(ROLES)}, not {role!r}"
                raise ApiError(400, text, param=where, code="invalid_value")

    def _check_chars(self, chars: int, param: str) -> None:
        if chars > self._max_chars:
            raise context_length_error(self._most, f"{param} has {chars} characters, which cannot fit", param)

    def _prompt(self, ids: Sequence[int], part: str | list[int], cut: Truncation | None) -> Prompt:
        is_cut = cut is not None and len(ids) > cut.tokens
        kept = cut.apply(ids) if cut is not None and is_cut else ids
        self.check(kept, "prompt")
        return Prompt(list(kept), "" if is_cut or not isinstance(part, str) else part)

    async def _run(self, chars: int, work: Callable[[], T]) -> T:
        if chars <= INLINE_CHARS:
            return work()
        return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def split_prompts(value: Any, max_prompts: int) -> list[str | list[int]]:
    """Return the prompts in the four forms of ``prompt``, as ``json_decoding.prompt`` returns them. Raises ApiError."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if len(value) > max_prompts:
            text = f"prompt must be at most {max_prompts} prompts, not {len(value)}"
            raise ApiError(400, text, param="prompt", code="invalid_value")
        if all(isinstance(p, str) for p in value) or all(isinstance(p, list) and p and _is_ids(p) for p in value):
            return list(value)
    raise ApiError(
        400, "prompt must be a string, strings, token ids, or lists of token ids", param="prompt", code="invalid_value"
    )


def _is_ids(value: list[Any]) -> bool:
    return type(value[0]) is int  # then all are: lists have been decoded by type


def _speaker_variables(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return the template's variables that decide which role speaks next. Raises ApiError."""
    goes_on, begins = bool(body.continue_final_message), body.add_generation_prompt
    if goes_on and begins:
        text = "continue_final_message and add_generation_prompt cannot both be true: leave out one"
        raise ApiError(400, text, param="continue_final_message", code="invalid_value")
    if goes_on:
        return {"continue_final_message": True, "add_generation_prompt": False}
    return {} if begins is None else {"add_generation_prompt": begins}


def echoed_text(messages: list[Message]) -> str:
    """Return the text that begins a reply with ``echo``. Raises ApiError."""
    return "\n".join(_texts_of(messages[-1])) if messages[-1].role == "assistant" else ""


def _texts_of(message: Message) -> list[str]:
    """Return the texts of a message. Raises ApiError for a part that is none."""
    if not isinstance(message.content, list):
        return [message.content or ""]
    for part in message.content:
        if part.type != "text" or part.text is None:
            text = f"content parts of type {part.type[:32]!r} are not supported: only text is"
            raise ApiError(400, text, param="messages", code="unsupported_value")
    return [part.text or "" for part in message.content]


def _plain(message: Message, number: int) -> dict[str, Any]:
    texts = _texts_of(message)
    content = [{"type": "text", "text": text} for text in texts] if isinstance(message.content, list) else texts[0]
    role = "system" if message.role == "developer" else message.role
    given: dict[str, Any] = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": _reasoning_of(message),
    }
    if message.tool_calls:
        where = f"messages.{number}.tool_calls"
        given["tool_calls"] = [template_call(call, f"{where}.{i}") for i, call in enumerate(message.tool_calls)]
    return {"role": role, "content": content, **{name: value for name, value in given.items() if value is not None}}


def _reasoning_of(message: Message) -> str | None:
    return message.reasoning_content or message.reasoning or None
