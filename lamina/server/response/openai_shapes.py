"""Replies in the formats of OpenAI's two endpoints, whole or in chunks."""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Raw

from lamina import __version__
from lamina.models.tokenizer import Detokenizer
from lamina.server.engine_client.messages import Delta, encode_scores
from lamina.server.journal.journal_records import AcceptedRecord
from lamina.server.request.prompt_processing import Prompt

from .message_reader import MessageReader, message_of, one_call_each, prompt_end_of
from .openai_logprobs import Block, TokenTexts, chat_logprobs, joined_logprobs, prompt_logprobs_of
from .reasoning_count import ReasoningCount
from .token_places import Places, places_in_text

NO_SCORES = encode_scores(None)
FINGERPRINT = f"lamina-{__version__}"


class ResponseShape(Protocol):
    """Makes an endpoint's reply from a call's deltas."""

    def head(self, *, stream: bool) -> dict[str, Any]:
        """Return the fields with which every chunk, or the whole reply, begins."""
        ...

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks before the first delta, without their heads."""
        ...

    def choices(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        """Return a delta of prompt ``number`` as a choice of a chunk, or of several chunks. Each delta is passed once,
        in order.
        """
        ...

    def full_choice(self, number: int, delta: Delta) -> dict[str, Any]:
        """Return a completion of prompt ``number``, whose deltas are merged, as a choice of a whole reply."""
        ...

    def note(self, number: int, delta: Delta) -> None:
        """Keep what the head and the usage of a whole reply need of ``delta``, of prompt ``number``."""
        ...

    def usage_details(self) -> dict[str, Any]:
        """Return fields of ``usage`` that the text shows."""
        ...


class CompletionResponse:
    """Replies of /v1/completions."""

    def __init__(self, record: AcceptedRecord, prompts: list[Prompt], texts: TokenTexts) -> None:
        self._prompts = prompts
        self._params = record.params
        self._texts = texts
        self._only_prompt = record.only_prompt
        self._head = _head_of(record)
        self._echo = record.echo
        self._ids = record.token_ids
        self._places: dict[int, Places] = {}  # of the completions' tokens
        self._echoed: dict[int, str] = {}  # the texts of prompts of token ids
        self._prompt_entries: dict[int, list[Raw]] = {}
        self._begun: set[int] = set()

    def head(self, *, stream: bool) -> dict[str, Any]:
        return {**self._head, "object": "text_completion"}

    def first_chunks(self) -> list[dict[str, Any]]:
        return []

    def choices(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        return [self._choice(number, delta)]

    def _choice(self, number: int, delta: Delta) -> dict[str, Any]:
        index = number * self._params.n + delta.index
        first = index not in self._begun
        self._begun.add(index)
        tokens, text, entries = delta.token_ids, delta.text, delta.logprobs
        if self._only_prompt:
            tokens, text, entries = [], "", [] if entries is not None else None
        if first and self._echo:
            text = self._prompt_text(number) + text
        self.note(number, delta)
        logprobs = None if entries is None else self._block(number, index, tokens, entries, first=first)
        reason = "length" if self._only_prompt and delta.finish_reason else delta.finish_reason
        ids: dict[str, Any] = {"token_ids": tokens} if self._ids else {}
        if first and self._ids:
            ids["prompt_token_ids"] = self._prompts[number].ids
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
            **({"kv_rebuilt": True} if delta.kv_rebuilt else {}),
            **ids,
        }

    def full_choice(self, number: int, delta: Delta) -> dict[str, Any]:
        choice, entries = self._choice(number, delta), self._prompt_entries.get(number)
        return {
            **choice,
            "prompt_logprobs": None if entries is None else prompt_logprobs_of(self._texts, entries),
            "prompt_token_ids": choice.get("prompt_token_ids"),
            "token_ids": choice.get("token_ids"),
        }

    def note(self, number: int, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self._prompt_entries[number] = delta.prompt_logprobs

    def usage_details(self) -> dict[str, Any]:
        return {}

    def _prompt_text(self, number: int) -> str:
        """Return the text of a prompt, with special tokens, as a client's own text has them too. A character that the
        prompt leaves open is a part of the completion's text.
        """
        prompt = self._prompts[number]
        if prompt.text or number in self._echoed:
            return prompt.text or self._echoed[number]
        tokenizer, ids = self._texts.tokenizer, prompt.ids
        num_open = 0 if self._only_prompt else Detokenizer(tokenizer, ids, skip_special_tokens=False).num_pending
        text = tokenizer.decode(ids[: len(ids) - num_open], clean_up_tokenization_spaces=False)
        self._echoed[number] = str(text)
        return self._echoed[number]

    def _block(self, number: int, index: int, tokens: list[int], entries: list[Raw], *, first: bool) -> dict[str, Any]:
        prompt, tokenizer = self._prompts[number], self._texts.tokenizer
        blocks = []
        if first:
            start = len(self._prompt_text(number)) if self._echo else 0
            pieces = Detokenizer(tokenizer, prompt.ids, skip_special_tokens=self._params.skip_special_tokens)
            self._places[index] = Places(pieces, start)
            if self._echo:
                if prompt.text:
                    places = places_in_text(tokenizer, prompt.text, prompt.ids)
                else:
                    places = Places(Detokenizer(tokenizer, skip_special_tokens=False)).of(prompt.ids)
                scores = self._prompt_entries.get(number, [NO_SCORES] * len(prompt.ids))
                blocks.append(Block(self._texts, prompt.ids, scores, places))
        return joined_logprobs([*blocks, Block(self._texts, tokens, entries, self._places[index].of(tokens))])


class ChatResponse:
    """Replies of /v1/chat/completions."""

    def __init__(self, record: AcceptedRecord, prompts: list[Prompt], texts: TokenTexts) -> None:
        self._prompts = prompts
        self._params = record.params
        self._texts = texts
        self._head = _head_of(record)
        self._ids = record.token_ids
        self._echo = prompts[0].text if record.echo else ""
        self._entries: list[Raw] | None = None  # log-probabilities of the prompt
        self._places: dict[int, Places] = {}  # of the completions' tokens
        self._record = record
        has_parts = record.tool_use is not None or record.reasoning
        self._prompt_end = prompt_end_of(texts.tokenizer, prompts[0].ids) if has_parts else None
        self._readers: dict[int, MessageReader] = {}  # of completions whose text has parts
        self._counts: dict[int, ReasoningCount] = {}

    def head(self, *, stream: bool) -> dict[str, Any]:
        if stream:
            return {**self._head, "object": "chat.completion.chunk"}
        scores = None if self._entries is None else prompt_logprobs_of(self._texts, self._entries)
        ids = self._prompts[0].ids if self._ids else None
        return {**self._head, "object": "chat.completion", "prompt_logprobs": scores, "prompt_token_ids": ids}

    def first_chunks(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        ids = {"prompt_token_ids": self._prompts[0].ids} if self._ids else {}
        chunks = [(delta, ids), *([({"content": self._echo}, {})] if self._echo else [])]
        return [
            {"choices": [{"index": i, "delta": part, "logprobs": None, "finish_reason": None}], **more}
            for part, more in chunks
            for i in range(self._params.n)
        ]

    def choices(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        self.note(number, delta)
        said, reason = self._read(delta)
        *before, last = one_call_each(said)
        plain = {"index": delta.index, "logprobs": None, "finish_reason": None, "stop_reason": None}
        return [*({**plain, "delta": part} for part in before), self._choice(delta, last, reason)]

    def _read(self, delta: Delta) -> tuple[dict[str, Any], str | None]:
        """Return what a delta says, and why it is the last one."""
        reason = delta.finish_reason
        if self._prompt_end is None:
            return {"content": delta.text} if delta.text or not reason else {}, reason
        if delta.index not in self._readers:
            self._readers[delta.index] = MessageReader(self._record, delta.index, self._prompt_end)
        reader = self._readers[delta.index]
        said = reader.delta(delta.text, reason)
        return said, reader.finish_reason(reason)

    def _choice(self, delta: Delta, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {
            "index": delta.index,
            "delta": said,
            "logprobs": None if delta.logprobs is None else self._logprobs(delta.index, delta.logprobs),
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
            **({"kv_rebuilt": True} if delta.kv_rebuilt else {}),
            **({"token_ids": delta.token_ids} if self._ids else {}),
        }

    def full_choice(self, number: int, delta: Delta) -> dict[str, Any]:
        said, reason = self._read(delta)
        choice = self._choice(delta, said, reason)
        del choice["delta"]
        message = {"role": "assistant", **message_of(said), "refusal": None}
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        if choice["logprobs"] is not None:
            choice["logprobs"] |= {"refusal": None}
        return {**choice, "message": message, "token_ids": choice.get("token_ids")}

    def note(self, number: int, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self._entries = delta.prompt_logprobs
        if self._record.reasoning and self._prompt_end is not None:
            if delta.index not in self._counts:
                ids, tokenizer = self._prompts[0].ids, self._texts.tokenizer
                self._counts[delta.index] = ReasoningCount(self._record.reasoning, tokenizer, ids, self._prompt_end)
            self._counts[delta.index].add(delta.token_ids)

    def usage_details(self) -> dict[str, Any]:
        if not self._record.reasoning:
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": sum(c.tokens for c in self._counts.values())}}

    def _logprobs(self, index: int, entries: list[Raw]) -> dict[str, Any]:
        if index not in self._places:
            skip = self._params.skip_special_tokens
            pieces = Detokenizer(self._texts.tokenizer, self._prompts[0].ids, skip_special_tokens=skip)
            self._places[index] = Places(pieces)
        return chat_logprobs(self._texts, entries, self._places[index])


def response_shape(record: AcceptedRecord, prompts: list[Prompt], texts: TokenTexts) -> ResponseShape:
    """Return the shape of the reply to a request."""
    return (ChatResponse if record.kind == "chatcmpl" else CompletionResponse)(record, prompts, texts)


def usage_of(prompt: int, completion: int, cached: int, *, details_always: bool = False) -> dict[str, Any]:
    """Return token counts in OpenAI's format. ``cached``: prompt tokens whose KV was cached; a count of 0 is left out
    without ``details_always``.
    """
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached or details_always else {}
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total, **details}


def _head_of(record: AcceptedRecord) -> dict[str, Any]:
    """Return the fields that begin the reply and each of its chunks; the caller fills in ``object``."""
    return {
        "id": record.id,
        "object": "",
        "created": record.created,
        "model": record.model,
        "system_fingerprint": FINGERPRINT,
    }
