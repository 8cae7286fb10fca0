"""The outputs of a generation. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple

Score = tuple[int, float, int]  # a token, its log-probability before temperature and filters, and its rank


@dataclass(slots=True)
class Logprob:
    """A token's log-probability before penalties, temperature and filters.

    ``rank``: 1 = the likeliest of all; among equals the lower token id comes first. ``decoded_token``: its text after
    the tokens before it, "" for a part of a character; None without a tokenizer, and with detokenize=False.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def logprobs_of(entry: dict[int, Logprob], count: int) -> list[Score]:
    """Return the token itself, then the ``count`` best ones, among which it may be again; -1 = all."""
    scores = [(token, x.logprob, x.rank or 0) for token, x in entry.items()]
    best = sorted((s for s in scores if count < 0 or s[2] <= count), key=lambda s: s[2])
    return [*scores[:1], *best]


@dataclass(frozen=True)
class Metric:
    """A counter of an engine since its start, or a gauge of now. ``name``: vLLM's name."""

    name: str
    value: float


class ErrorOrigin(StrEnum):
    """The origin of an error, which tells who can fix it."""

    CLIENT = "client"  # the client, with other parameters
    SERVER = "server"
    LOAD = "load"  # too many requests at once: no one can fix it


class Refusal(NamedTuple):
    """A prompt that is refused, before or after its prefill, as it would come too late. ``reason``: the exceeded limit,
    ttft or tbt. ``ttft_s``, ``tbt_s``: the predicted first token and gap between tokens, in seconds.
    """

    reason: str
    ttft_s: float
    tbt_s: float
    retry_after_s: float


class OverloadedError(Exception):
    """A request that is refused now, and may be accepted later."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal_text(refusal))
        self.refusal = refusal


def refusal_text(refusal: Refusal) -> str:
    """Return a refusal in words, with the predicted time."""
    if refusal.reason == "ttft":
        return f"the first token would come after {refusal.ttft_s:.3g} s, later than is promised (--slo ttft=)"
    return f"a token would take {refusal.tbt_s:.3g} s, longer than is promised (--slo tbt=)"


@dataclass
class CompletionOutput:
    """One completion of a prompt so far. ``finish_reason``: None while it runs; "stop", "length", "abort", "error"."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped it, or the error
    logprobs: list[dict[int, Logprob]] | None = None  # per token: itself first, then the best by their rank
    blame: ErrorOrigin | None = None  # the origin of an error
    kv_rebuilt: bool = False  # sparse KV was not accurate enough, so it continued with all KV
    refusal: Refusal | None = None  # set if it was computed and is not decoded

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the chosen tokens; None if no ``logprobs`` were requested."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=False))

    @property
    def went_wrong(self) -> bool:
        """True if it ended by an error, after which its KV is not to be trusted; a refusal is no error."""
        return self.finish_reason == "error" and self.refusal is None

    def finished(self) -> bool:
        """Return True if the completion grows no more."""
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True)
class ResumedCompletion:
    """The part of an unfinished completion that its reader has, for another engine to continue. It has no
    log-probabilities: they may exceed a link's frame, and the engine does not need them.
    """

    index: int
    token_ids: list[int]
    num_chars: int = 0  # characters of its text
    is_finished: bool = False  # whether its reader knows how it has ended


@dataclass
class RequestTimes:
    """The times of a request's events, in seconds of the engine's clock; only differences have a meaning."""

    arrival_s: float
    scheduled_s: float | None = None  # when its first row went to the workers
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    # The same, by vLLM's names.
    arrival_time = property(attrgetter("arrival_s"))
    first_scheduled_time = property(attrgetter("scheduled_s"))
    first_token_time = property(attrgetter("first_token_s"))
    last_token_time = property(attrgetter("last_token_s"))
    finished_time = property(attrgetter("finished_s"))

    def mark(self, now_s: float, *, finished: bool) -> None:
        """Note the time of a token."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        if finished:
            self.finished_s = now_s


@dataclass
class RequestOutput:
    """All completions of one prompt."""

    request_id: Any  # a text: the engine's number, for AsyncLLM its caller's; within the engine an int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    times: RequestTimes
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the same for each prompt token; the first is None
    num_cached_tokens: int | None = None  # prompt tokens whose KV was cached; None: not begun
    num_preemptions: int = 0  # how often KV of its completions was freed for other sequences; set at the end

    @property
    def metrics(self) -> RequestTimes:
        """``times``, by vLLM's name."""
        return self.times

    @property
    def finished(self) -> bool:
        outputs = self.outputs
        if len(outputs) == 1:
            return outputs[0].finish_reason is not None
        return all(o.finish_reason is not None for o in outputs)
