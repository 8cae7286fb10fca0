"""The records of a journal. They are appended and never changed."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lamina.request import SamplingParams
from lamina.scheduler.sessions.token_ranges import TokenRanges
from lamina.server.engine_client.messages import Delta

SECRET_DIGITS = 20  # the last digits of an id; no log shows them
FORMAT = 3  # increased when a server of the previous version could not read it


class HeaderRecord(msgspec.Struct, frozen=True, kw_only=True, tag="heading"):
    """The first record of each segment: identifies the journal."""

    format: int
    model: str  # MODEL as given on the command line
    digest: str  # of the model's files; see model_digest


class JournalPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt of a request. ``key``: the engine's name for it, never used twice in a journal."""

    key: int
    ids: list[int]
    text: str
    seed: int  # used by its completions, drawn by the server if the client gave none


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which tool calls are read from a completion. ``parser``: a name of tool_parsers.
    ``tools``: functions that may be called, with the JSON schemas of their parameters. ``parallel``: there may be
    several calls.
    """

    parser: str
    tools: dict[str, dict[str, Any]]
    parallel: bool = True


class AcceptedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """A request that will get a reply. A second record for an id starts its reply anew, so a segment can begin with the
    running requests.
    """

    id: str  # id of its reply
    kind: Literal["cmpl", "chatcmpl"]
    model: str  # the model's name in the client's request
    created: int  # seconds since 1970
    params: SamplingParams
    prompts: list[JournalPrompt]
    echo: bool = False
    only_prompt: bool = False
    tokens_as_ids: bool = False  # log-probabilities name tokens by their numbers
    token_ids: bool = False  # the reply contains token ids
    salt: bytes = b""  # it shares KV only with requests of the same salt
    priority: int = 0
    discard: TokenRanges = ()  # ranges of prompt tokens whose KV it discards
    tool_use: ToolUse | None = None  # None: the text is no tool call
    reasoning: str = ""  # the reasoning parser; "": the text has no reasoning

    @property
    def log_name(self) -> str:
        """The beginning of ``id``, for logs: anyone who knows the whole id can fetch the reply."""
        return self.id[:-SECRET_DIGITS]


class DeltasRecord(msgspec.Struct, frozen=True, tag="grown"):
    """The tokens of one step; written before a reader gets them."""

    deltas: list[Delta]


class DroppedRecord(msgspec.Struct, frozen=True, tag="dropped"):
    """A reply without a reader: its client has left, or was refused."""

    id: str


class FailedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="unanswerable"):
    """A request that cannot be finished, and the error for its client."""

    id: str
    status: int
    message: str
    code: str


class RestartsRecord(msgspec.Struct, frozen=True, tag="begun"):
    """Id of a reply -> number of servers that restarted its request and did not stop in order."""

    counts: dict[str, int]


class OpenedRecord(msgspec.Struct, frozen=True, tag="opened"):
    """The end of a segment's opening. ``before``: the bytes of the earlier segment that count, too; 0: this one has all
    that is known.
    """

    before: int


JournalRecord = (
    HeaderRecord | AcceptedRecord | DeltasRecord | DroppedRecord | FailedRecord | RestartsRecord | OpenedRecord
)
