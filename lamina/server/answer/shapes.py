"""Answers in the shapes of OpenAI's two endpoints, whole or in chunks."""

from __future__ import annotations

from typing import Any, Protocol

from lamina.request import SamplingParams
from lamina.server.link.messages import Delta, Logprobs
from lamina.server.request.prompts import Prompt

from .logprobs import CompletionLogprobs, TokenTexts, chat_logprobs, joined


class AskedFor(Protocol):
    """What an answer is the answer to: a Call, or a journal's Entry."""

    prompts: list[Prompt]
    params: SamplingParams
    only_prompt: bool


class Shape(Protocol):
    """Makes an endpoint's answer of a call's deltas."""

    def head(self, *, stream: bool) -> dict[str, Any]:
        """What every chunk, or the whole answer, begins with."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """Choices of the chunks before the first delta."""
        ...

    def choice(self, number: int, delta: Delta) -> dict[str, Any]:
        """A delta of prompt ``number`` as a choice of a chunk. Each delta is given once, in order."""
        ...

    def whole(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """All choices of one index as one choice of a whole answer."""
        ...


class CompletionShape:
    """/v1/completions."""

    def __init__(self, call: AskedFor, texts: TokenTexts, head: dict[str, Any], *, echo: bool) -> None:
        self._call = call
        self._texts = texts
        self._head = head
        self._echo = echo
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._prompt_entries: dict[int, list[Logprobs | None]] = {}
        self._begun: set[int] = set()

    def head(self, *, stream: bool) -> dict[str, Any]:
        return {**self._head, "object": "text_completion"}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def choice(self, number: int, delta: Delta) -> dict[str, Any]:
        index = number * self._call.params.n + delta.index
        first = index not in self._begun
        self._begun.add(index)
        tokens, text, entries = delta.tokens, delta.text, delta.logprobs
        if self._call.only_prompt:
            tokens, text, entries = [], "", [] if entries is not None else None
        if first and self._echo:
            text = self._prompt_text(number) + text
        logprobs = None if entries is None else self._block(number, index, delta, tokens, entries, first=first)
        reason = "length" if self._call.only_prompt and delta.finish_reason else delta.finish_reason
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
        }

    def whole(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        text = "".join(p["text"] for p in parts)
        blocks = [p["logprobs"] for p in parts if p["logprobs"] is not None]
        return {**parts[-1], "text": text, "logprobs": joined(blocks) if blocks else None}

    def _prompt_text(self, number: int) -> str:
        prompt, skip = self._call.prompts[number], self._call.params.skip_special_tokens
        return prompt.text or str(self._texts.tokenizer.decode(prompt.ids, skip_special_tokens=skip))

    def _block(
        self, number: int, index: int, delta: Delta, tokens: list[int], entries: list[Logprobs], *, first: bool
    ) -> dict[str, Any]:
        ids, skip = self._call.prompts[number].ids, self._call.params.skip_special_tokens
        blocks = []
        if delta.prompt_logprobs is not None:
            self._prompt_entries[number] = delta.prompt_logprobs
        if first:
            start = len(self._prompt_text(number)) if self._echo else 0
            self._logprobs[index] = CompletionLogprobs(self._texts, ids, start, skip_special_tokens=skip)
            if self._echo:
                prompt = CompletionLogprobs(self._texts, [], 0, skip_special_tokens=skip)
                blocks.append(prompt.block(ids, self._prompt_entries.get(number, [None] * len(ids))))
        return joined([*blocks, self._logprobs[index].block(tokens, entries)])


class ChatShape:
    """/v1/chat/completions."""

    def __init__(self, call: AskedFor, texts: TokenTexts, head: dict[str, Any]) -> None:
        self._call = call
        self._texts = texts
        self._head = head

    def head(self, *, stream: bool) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if stream else "chat.completion"}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(self._call.params.n)
        ]

    def choice(self, number: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text or not delta.finish_reason else {},
            "logprobs": None if delta.logprobs is None else chat_logprobs(self._texts, delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def whole(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        content = "".join(p["delta"].get("content", "") for p in parts)
        items = [i for p in parts if p["logprobs"] is not None for i in p["logprobs"]["content"]]
        given = parts[-1]["logprobs"] is not None
        choice = {k: v for k, v in parts[-1].items() if k != "delta"}
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**choice, "message": message, "logprobs": {"content": items, "refusal": None} if given else None}
