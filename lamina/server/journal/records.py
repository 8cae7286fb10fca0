"""The records of a journal. They are appended and never changed."""

from __future__ import annotations

from typing import Literal

import msgspec

from lamina.engine.conversations.ranges import Ranges
from lamina.request import SamplingParams
from lamina.server.link.messages import Delta

UNTOLD = 20  # digits of an id that no log has
FORMAT = 2  # raised where a server of the version before could not read it


class Heading(msgspec.Struct, frozen=True, kw_only=True, tag="heading"):
    """The first record of each segment: whose journal this is."""

    format: int
    model: str  # MODEL as it was given
    digest: str  # of the model's files; see model_digest


class KeptPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt of a request. ``key``: the engine's name for it, never used twice in a journal."""

    key: int
    ids: list[int]
    text: str
    seed: int  # of its completions, also where its client gave none


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """A request that will be answered. One that is there already begins anew: so a segment begins with what is under
    way.
    """

    id: str  # of its answer
    kind: Literal["cmpl", "chatcmpl"]
    model: str  # as its client called it
    created: int  # seconds since 1970
    params: SamplingParams
    prompts: list[KeptPrompt]
    echo: bool = False
    only_prompt: bool = False
    tokens_as_ids: bool = False  # log-probabilities name tokens by their numbers
    token_ids: bool = False  # the answer has them too
    salt: bytes = b""  # it shares KV with requests of the same salt only
    priority: int = 0
    discard: Ranges = ()  # tokens of its prompt that it has lost

    @property
    def log_name(self) -> str:
        """The beginning of ``id``, for logs: by the whole id anybody gets the answer."""
        return self.id[:-UNTOLD]


class Grown(msgspec.Struct, frozen=True, tag="grown"):
    """The tokens of one step; written before a reader gets them."""

    deltas: list[Delta]


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """An answer without a reader: its client has left, or was refused."""

    id: str


class Unanswerable(msgspec.Struct, frozen=True, kw_only=True, tag="unanswerable"):
    """A request that cannot be finished, and the error for its client."""

    id: str
    status: int
    message: str
    code: str


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """Counts of servers that have begun an answer again and did not stop in order, by the id of the answer."""

    counts: dict[str, int]


class Synced(msgspec.Struct, frozen=True, tag="synced"):
    """The first ``size`` bytes of this file are on the disk itself, so a hole in them is damage."""

    size: int


RECORDS = Heading | Accepted | Grown | Dropped | Unanswerable | Begun | Synced
