"""The records of a journal. They are appended and never changed."""

from __future__ import annotations

from typing import Literal

import msgspec

from lamina.request import SamplingParams
from lamina.scheduler.sessions.token_ranges import TokenRanges
from lamina.server.engine_client.messages import Delta

SECRET_DIGITS = 20  # the last digits of an id; no log has them
FORMAT = 2  # raised where a server of the version before could not read it


class HeaderRecord(msgspec.Struct, frozen=True, kw_only=True, tag="heading"):
    """The first record of each segment: whose journal this is."""

    format: int
    model: str  # MODEL as it was given
    digest: str  # of the model's files; see model_digest


class JournalPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt of a request. ``key``: the engine's name for it, never used twice in a journal."""

    key: int
    ids: list[int]
    text: str
    seed: int  # of its completions, also where its client gave none


class AcceptedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """A request that will be answered. One that is there already begins anew: so a segment begins with what is under
    way.
    """

    id: str  # of its answer
    kind: Literal["cmpl", "chatcmpl"]
    model: str  # as its client called it
    created: int  # seconds since 1970
    params: SamplingParams
    prompts: list[JournalPrompt]
    echo: bool = False
    only_prompt: bool = False
    tokens_as_ids: bool = False  # log-probabilities name tokens by their numbers
    token_ids: bool = False  # the answer has them too
    salt: bytes = b""  # it shares KV with requests of the same salt only
    priority: int = 0
    discard: TokenRanges = ()  # tokens of its prompt that it has lost

    @property
    def log_name(self) -> str:
        """The beginning of ``id``, for logs: by the whole id anybody gets the answer."""
        return self.id[:-SECRET_DIGITS]


class DeltasRecord(msgspec.Struct, frozen=True, tag="grown"):
    """The tokens of one step; written before a reader gets them."""

    deltas: list[Delta]


class DroppedRecord(msgspec.Struct, frozen=True, tag="dropped"):
    """An answer without a reader: its client has left, or was refused."""

    id: str


class FailedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="unanswerable"):
    """A request that cannot be finished, and the error for its client."""

    id: str
    status: int
    message: str
    code: str


class RestartsRecord(msgspec.Struct, frozen=True, tag="begun"):
    """Counts of servers that have begun an answer again and did not stop in order, by the id of the answer."""

    counts: dict[str, int]


class SyncedRecord(msgspec.Struct, frozen=True, tag="synced"):
    """The first ``size`` bytes of this file are on the disk itself, so a hole in them is damage."""

    size: int


JournalRecord = (
    HeaderRecord | AcceptedRecord | DeltasRecord | DroppedRecord | FailedRecord | RestartsRecord | SyncedRecord
)
