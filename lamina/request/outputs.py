"""What comes back of a generation. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

Score = tuple[int, float, int]  # a token, its log-probability before temperature and filters, and its rank


@dataclass(slots=True)
class Logprob:
    """Of one token: its log-probability before penalties, temperature and filters.

    ``rank``: 1 = the likeliest of all; of equals the lower token id comes first. ``decoded_token``: its text behind the
    tokens before it, "" for a part of a character; None without a tokenizer, and with detokenize=False.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def logprobs_of(entry: dict[int, Logprob], count: int) -> list[Score]:
    """The token that stands there, then the ``count`` best, among which it may be again; -1 = all."""
    scores = [(token, x.logprob, x.rank or 0) for token, x in entry.items()]
    best = sorted((s for s in scores if count < 0 or s[2] <= count), key=lambda s: s[2])
    return [*scores[:1], *best]


@dataclass(frozen=True)
class Metric:
    """What an engine has counted since its start, or has now. ``name``: vLLM's."""

    name: str
    value: float


class ErrorOrigin(StrEnum):
    """Who can put an error right."""

    CLIENT = "client"  # with other parameters
    SERVER = "server"
    LOAD = "load"  # nobody: too much is asked for at once


class Refusal(NamedTuple):
    """A prompt that is not taken, or not decoded, as it would come too late. ``reason``: which limit, ttft or tbt.
    ``ttft_s``, ``tbt_s``: the first token and the gap between tokens that were expected, seconds.
    """

    reason: str
    ttft_s: float
    tbt_s: float
    retry_after_s: float


class OverloadedError(Exception):
    """A request that is not taken now, and may be later."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal_text(refusal))
        self.refusal = refusal


def refusal_text(refusal: Refusal) -> str:
    """A refusal in words, with what was expected."""
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
    blame: ErrorOrigin | None = None  # of an error
    kv_rebuilt: bool = False  # answers with some of the KV left out were not good enough: it went on with all KV
    refusal: Refusal | None = None  # of one that is computed and not decoded

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the chosen tokens; None where no ``logprobs`` were asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=False))

    @property
    def went_wrong(self) -> bool:
        """Whether it has ended by an error, behind which its KV is not to be trusted; who is refused is no error."""
        return self.finish_reason == "error" and self.refusal is None

    def finished(self) -> bool:
        """Whether the completion grows no more."""
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True)
class ResumedCompletion:
    """The part of an unfinished completion that its reader has, for another engine to go on with. Its log-probabilities
    are not told: there may be more of them than a link's frame holds, and nobody computes with them.
    """

    index: int
    token_ids: list[int]
    num_chars: int = 0  # of its text
    is_finished: bool = False  # whether its reader knows how it has ended


@dataclass
class RequestTimes:
    """When things happened, in seconds of the engine's clock; only differences mean something."""

    arrival_s: float
    scheduled_s: float | None = None  # when its first row went to the workers
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    @property
    def arrival_time(self) -> float:
        """``arrival_s``, by vLLM's name; so the next ones."""
        return self.arrival_s

    @property
    def first_scheduled_time(self) -> float | None:
        """``scheduled_s``."""
        return self.scheduled_s

    @property
    def first_token_time(self) -> float | None:
        """``first_token_s``."""
        return self.first_token_s

    @property
    def last_token_time(self) -> float | None:
        """``last_token_s``."""
        return self.last_token_s

    @property
    def finished_time(self) -> float | None:
        """``finished_s``."""
        return self.finished_s

    def mark(self, now_s: float, *, finished: bool) -> None:
        """A token has come."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        if finished:
            self.finished_s = now_s


@dataclass
class RequestOutput:
    """All completions of one prompt."""

    request_id: Any  # the engine's number, an int; of AsyncLLM, the text that its caller gave
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    times: RequestTimes
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # likewise, per token of the prompt; None first
    num_cached_tokens: int | None = None  # of the prompt, whose KV an earlier request had left; None: not begun
    num_preemptions: int = 0  # how often KV of its completions was freed for others, once it is finished

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
