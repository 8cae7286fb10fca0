"""Answers in the shapes of OpenAI's two endpoints, whole or in chunks."""

from __future__ import annotations

from typing import Any, Protocol

from lamina.request import SamplingParams
from lamina.server.journal.records import Accepted
from lamina.server.link.messages import Delta, Logprobs
from lamina.server.request.prompts import Prompt

from .heads import head_of
from .logprobs import CompletionLogprobs, TokenTexts, chat_logprobs, joined, prompt_scores


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
        """The chunks before the first delta, less their heads."""
        ...

    def choice(self, number: int, delta: Delta) -> dict[str, Any]:
        """A delta of prompt ``number`` as a choice of a chunk. Each delta is given once, in order."""
        ...

    def whole(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """All choices of one index as one choice of a whole answer."""
        ...


class CompletionShape:
    """/v1/completions."""

    def __init__(self, call: AskedFor, texts: TokenTexts, asked: Accepted) -> None:
        self._call = call
        self._texts = texts
        self._head = head_of(asked)
        self._echo = asked.echo
        self._ids = asked.token_ids
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
        if delta.prompt_logprobs is not None:
            self._prompt_entries[number] = delta.prompt_logprobs
        logprobs = None if entries is None else self._block(number, index, delta, tokens, entries, first=first)
        reason = "length" if self._call.only_prompt and delta.finish_reason else delta.finish_reason
        ids: dict[str, Any] = {"token_ids": tokens} if self._ids else {}
        if first and self._ids:
            ids["prompt_token_ids"] = self._call.prompts[number].ids
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
            **({"kv_rebuilt": True} if delta.rebuilt else {}),
            **ids,
        }

    def whole(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        text = "".join(p["text"] for p in parts)
        blocks = [p["logprobs"] for p in parts if p["logprobs"] is not None]
        entries = self._prompt_entries.get(parts[0]["index"] // self._call.params.n)
        return {
            **parts[-1],
            "text": text,
            "logprobs": joined(blocks) if blocks else None,
            "prompt_logprobs": None if entries is None else prompt_scores(self._texts, entries),
            "prompt_token_ids": parts[0].get("prompt_token_ids"),
            "token_ids": [t for p in parts for t in p["token_ids"]] if self._ids else None,
        }

    def _prompt_text(self, number: int) -> str:
        """The text of a prompt, with special tokens: a client's own text has those too."""
        prompt = self._call.prompts[number]
        return prompt.text or str(self._texts.tokenizer.decode(prompt.ids))

    def _block(
        self, number: int, index: int, delta: Delta, tokens: list[int], entries: list[Logprobs], *, first: bool
    ) -> dict[str, Any]:
        ids, skip = self._call.prompts[number].ids, self._call.params.skip_special_tokens
        blocks = []
        if first:
            start = len(self._prompt_text(number)) if self._echo else 0
            self._logprobs[index] = CompletionLogprobs(self._texts, ids, start, skip_special_tokens=skip)
            if self._echo:
                prompt = CompletionLogprobs(self._texts, [], 0, skip_special_tokens=False)
                blocks.append(prompt.block(ids, self._prompt_entries.get(number, [None] * len(ids))))
        return joined([*blocks, self._logprobs[index].block(tokens, entries)])


class ChatShape:
    """/v1/chat/completions."""

    def __init__(self, call: AskedFor, texts: TokenTexts, asked: Accepted) -> None:
        self._call = call
        self._texts = texts
        self._head = head_of(asked)
        self._ids = asked.token_ids
        self._echo = call.prompts[0].text if asked.echo else ""
        self._entries: list[Logprobs | None] | None = None  # of the prompt

    def head(self, *, stream: bool) -> dict[str, Any]:
        if stream:
            return {**self._head, "object": "chat.completion.chunk"}
        scores = None if self._entries is None else prompt_scores(self._texts, self._entries)
        ids = self._call.prompts[0].ids if self._ids else None
        return {**self._head, "object": "chat.completion", "prompt_logprobs": scores, "prompt_token_ids": ids}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        ids = {"prompt_token_ids": self._call.prompts[0].ids} if self._ids else {}
        chunks = [(delta, ids), *([({"content": self._echo}, {})] if self._echo else [])]
        return [
            {"choices": [{"index": i, "delta": part, "logprobs": None, "finish_reason": None}], **more}
            for part, more in chunks
            for i in range(self._call.params.n)
        ]

    def choice(self, number: int, delta: Delta) -> dict[str, Any]:
        if delta.prompt_logprobs is not None:
            self._entries = delta.prompt_logprobs
        return {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text or not delta.finish_reason else {},
            "logprobs": None if delta.logprobs is None else chat_logprobs(self._texts, delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **({"kv_rebuilt": True} if delta.rebuilt else {}),
            **({"token_ids": delta.tokens} if self._ids else {}),
        }

    def whole(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        content = self._echo + "".join(p["delta"].get("content", "") for p in parts)
        items = [i for p in parts if p["logprobs"] is not None for i in p["logprobs"]["content"]]
        given = parts[-1]["logprobs"] is not None
        choice = {k: v for k, v in parts[-1].items() if k != "delta"}
        message = {"role": "assistant", "content": content, "refusal": None}
        return {
            **choice,
            "message": message,
            "logprobs": {"content": items, "refusal": None} if given else None,
            "token_ids": [t for p in parts for t in p["token_ids"]] if self._ids else None,
        }
