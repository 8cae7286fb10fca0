"""The nouns of a generation: what a user asks for and what comes back. No torch here."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

FILTERS = ("min_p", "top_k", "top_p")  # in vLLM's order
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(kw_only=True)
class SamplingParams:
    """How to generate. The names and defaults are the ones that vLLM users know. A request takes a ``clone`` of what it
    is given: fields may be set between requests, and are checked as each one begins.

    A token is a pure function of the logits, these parameters, the tokens so far, ``seed`` and the index of the output
    token: it does not depend on batch mates or on which worker samples. The logits are changed in this order:
    repetition penalty, frequency and presence penalty, logit bias, stop tokens before ``min_tokens``; then temperature,
    and the filters in the order of ``filter_order``. Each counts the probability of the tokens that those before it
    have left, as top_p shows: behind min_p and top_k it is a share of what they keep (vLLM). In transformers min_p
    comes last.
    """

    n: int = 1  # completions of each prompt
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = all
    min_p: float = 0.0  # drop tokens less probable than that share of the best one's probability
    filter_order: tuple[str, ...] = FILTERS
    presence_penalty: float = 0.0  # off the logit of every token that the completion has
    frequency_penalty: float = 0.0  # off the logit for each time that the completion has the token
    repetition_penalty: float = 1.0  # logits of tokens of prompt and completion: divided if positive, else multiplied
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit
    max_tokens: int | None = 16  # None = up to the model's length
    min_tokens: int = 0  # no stop token before that many
    stop: str | list[str] | None = field(default_factory=list)
    include_stop_str_in_output: bool = False  # whether the returned text ends with the stop string
    stop_token_ids: list[int] | None = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None  # None or -1 = the engine draws one
    logprobs: int | None = None  # alternatives reported for each token
    prompt_logprobs: int | None = None  # alternatives reported for each token of the prompt but the first
    skip_special_tokens: bool = True  # in the text
    detokenize: bool = True  # False: no text, only tokens
    truncate_prompt_tokens: int | None = None  # keep so many of the prompt's last tokens; None = all

    def __post_init__(self) -> None:
        self._normalise()
        for name in _FLOATS:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, not {getattr(self, name)}")
        _check(self.n >= 1, f"n must be at least 1, not {self.n}")
        _check(self.temperature >= 0.0, f"temperature must be at least 0 (0 = greedy), not {self.temperature}")
        _check(0.0 < self.top_p <= 1.0, f"top_p must lie in (0, 1], not {self.top_p}")
        _check(-1 <= self.top_k < 1 << 31, f"top_k must lie in 1..2147483647, or be 0 for all tokens, not {self.top_k}")
        _check(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}")
        _check(self.min_tokens >= 0, f"min_tokens must be at least 0, not {self.min_tokens}")
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens, f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}"
            )
        _check(all(self.stop_strings), "stop must not contain an empty string")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(count is None or 0 <= count <= 20, f"{name} must lie in 0..20, not {count}")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2.0 <= getattr(self, name) <= 2.0, f"{name} must lie in -2..2, not {getattr(self, name)}")
        _check(  # beyond, products of logits are no numbers any more
            0.01 <= self.repetition_penalty <= 100.0,
            f"repetition_penalty must lie in 0.01..100, not {self.repetition_penalty}",
        )
        self._check_order()
        _check(0.0 <= self.min_p <= 1.0, f"min_p must lie in 0..1, not {self.min_p}")
        for token, bias in (self.logit_bias or {}).items():
            _check(-100.0 <= bias <= 100.0, f"logit_bias of token {token} must lie in -100..100, not {bias}")
        _check(
            self.truncate_prompt_tokens is None or self.truncate_prompt_tokens >= 1,
            f"truncate_prompt_tokens must be at least 1, not {self.truncate_prompt_tokens}",
        )
        _check(self.detokenize or not self.stop_strings, "stop strings need text: leave out detokenize=False, or stop")
        _check(self.seed is None or 0 <= self.seed < 1 << 63, f"seed must lie in 0..2**63-1, not {self.seed}")

    def _check_order(self) -> None:
        order = self.filter_order
        if not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(FILTERS):
            raise ValueError(f"filter_order must have each of {', '.join(FILTERS)} once, not {order!r}")
        self.filter_order = tuple(order)

    def _normalise(self) -> None:
        """Plain Python numbers of what numpy and others pass; None for a list means none."""
        if self.seed == -1:
            self.seed = None
        for name in _FLOATS:
            setattr(self, name, _number(float, getattr(self, name), name))
        for name in ("n", "top_k", "min_tokens", *_OPTIONAL):
            value = getattr(self, name)
            if value is not None or name in ("n", "top_k", "min_tokens"):
                setattr(self, name, _number(operator.index, value, name))
        texts = [self.stop] if isinstance(self.stop, str | None) else self.stop
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str | None) for t in texts):
            raise ValueError(f"stop must be text or a list of texts, not {self.stop!r}")
        self.stop = self.stop if isinstance(self.stop, str) else list(self.stop or [])
        if self.logit_bias is not None:
            bias = self.logit_bias.items()
            name = "logit_bias"
            setattr(self, name, {_number(operator.index, t, name): _number(float, b, name) for t, b in bias})
        self.stop_token_ids = [_number(operator.index, t, "stop_token_ids") for t in self.stop_token_ids or []]

    def clone(self) -> SamplingParams:
        """A copy that shares nothing that can change. Raises ValueError for a field that was set to a bad value."""
        return replace(self)

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed by penalties or bias."""
        changed = self.presence_penalty or self.frequency_penalty or self.logit_bias
        return bool(changed) or self.repetition_penalty != 1.0

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token before temperature and filters, and its rank is its place in the list."""

    token_id: int
    logprob: float


class Blame(StrEnum):
    """Who can put an error right."""

    CLIENT = "client"  # with other parameters
    SERVER = "server"


@dataclass
class CompletionOutput:
    """One completion of a prompt so far. ``finish_reason``: None while it runs; "stop", "length", "abort", "error"."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped it, or the error
    logprobs: list[list[Logprob]] | None = None  # per token: the chosen one first, then the best alternatives
    blame: Blame | None = None  # of an error

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the chosen tokens; None where no ``logprobs`` were asked for."""
        return None if self.logprobs is None else sum(entry[0].logprob for entry in self.logprobs)

    def finished(self) -> bool:
        """Whether it grows no more."""
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a reader has of a completion that an engine did not finish, so that another one can go on with it."""

    index: int
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]] | None = None  # as in CompletionOutput: token and log-probability
    chars: int = 0  # of its text
    ended: bool = False  # whether its reader knows how it has ended


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
    prompt_logprobs: list[list[Logprob] | None] | None = (
        None  # per token of the prompt, as in CompletionOutput; None first
    )
    num_cached_tokens: int | None = None  # of the prompt, whose KV an earlier request had left; None: not begun

    @property
    def metrics(self) -> RequestTimes:
        """``times``, by vLLM's name."""
        return self.times

    @property
    def finished(self) -> bool:
        return all(o.finish_reason is not None for o in self.outputs)


def _number(kind: Callable[[Any], Any], value: Any, name: str) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{name} must be {'a number' if kind is float else 'an integer'}, not {value!r}") from e


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)
