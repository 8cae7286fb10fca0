"""One request of a journal, and its reply so far."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from lamina.request import SamplingParams
from lamina.server.engine_client.messages import Delta, merge_delta
from lamina.server.request.prompt_processing import Prompt
from lamina.server.response.openai_shapes import usage_of

from .journal_records import AcceptedRecord, FailedRecord


class JournalEntry:
    """A request and its reply. ``accepted``: the request. ``num_restarts``: servers that restarted the request and did
    not stop in order; this one counts while it runs. ``ended_in``: the number of the segment in which the reply ends.
    """

    def __init__(self, accepted: AcceptedRecord) -> None:
        self.accepted = accepted
        self.refusal: FailedRecord | None = None
        self.num_restarts = 0
        self.ended_in = -1
        self.params = accepted.params
        self.only_prompt = accepted.only_prompt
        self.prompts = [Prompt(p.ids, p.text) for p in accepted.prompts]
        self._numbers = {p.key: number for number, p in enumerate(accepted.prompts)}
        self._grown: dict[tuple[int, int], Delta] = {}  # merged deltas by key and index

    @property
    def keys(self) -> list[int]:
        """The keys of the request's prompts."""
        return list(self._numbers)

    def prompt_index(self, key: int) -> int:
        """Return the index of a prompt in its request."""
        return self._numbers[key]

    def params_of(self, number: int) -> SamplingParams:
        """Return the sampling parameters of a prompt, with its seed."""
        return dataclasses.replace(self.params, seed=self.accepted.prompts[number].seed)

    @property
    def deltas(self) -> list[Delta]:
        """The tokens so far: one Delta for each completion that has begun."""
        return list(self._grown.values())

    def received_of(self, key: int) -> list[Delta]:
        """Return the tokens of one prompt so far."""
        return [delta for delta in self._grown.values() if delta.key == key]

    def unfinished_of(self, key: int) -> int:
        """Return the number of a prompt's completions that have not ended."""
        return self.params.n - sum(d.finish_reason is not None for d in self.received_of(key))

    @property
    def failed(self) -> Delta | None:
        """A completion that the engine ended by an error, which is the whole reply then."""
        return next((d for d in self._grown.values() if d.finish_reason == "error"), None)

    @property
    def ended(self) -> bool:
        """True if no more tokens are expected."""
        left = self.refusal is None and self.failed is None
        return not (left and any(self.unfinished_of(key) for key in self._numbers))

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        prompt, cached = sum(len(p.ids) for p in self.prompts), sum(d.num_cached_tokens or 0 for d in self.deltas)
        return usage_of(prompt, 0 if self.only_prompt else sum(len(d.token_ids) for d in self.deltas), cached)

    def add_delta(self, delta: Delta, segment: int) -> None:
        """Add a delta. Its lists belong to the reader, so they are copied."""
        held = self._grown.get((delta.key, delta.index))
        if held is None:
            own = None if delta.logprobs is None else [*delta.logprobs]
            held = msgspec.structs.replace(delta, token_ids=[*delta.token_ids], logprobs=own)
            self._grown[delta.key, delta.index] = held
        else:
            merge_delta(held, delta)
        if delta.finish_reason is not None and self.ended:
            self.ended_in = segment

    def refuse(self, record: FailedRecord, segment: int) -> None:
        """Note that the request cannot be finished."""
        self.refusal, self.ended_in = record, segment
