"""The nouns of a generation: what a user asks for and what comes back. No torch here."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to generate. The names and defaults are the ones that vLLM users know.

    A token is a pure function of the logits, these parameters, ``seed`` and the index of the output token: it does not
    depend on batch mates or on which worker samples.
    """

    n: int = 1  # completions of each prompt
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = all
    max_tokens: int | None = 16  # None = up to the model's length
    min_tokens: int = 0  # no stop token before that many
    stop: str | list[str] | None = field(default_factory=list)  # not part of the returned text
    stop_token_ids: list[int] | None = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None  # None = the engine draws one
    logprobs: int | None = None  # alternatives reported for each token

    def __post_init__(self) -> None:
        self._normalise()
        for name in ("temperature", "top_p"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, not {getattr(self, name)}")
        _check(self.n >= 1, f"n must be at least 1, not {self.n}")
        _check(self.temperature >= 0.0, f"temperature must be at least 0 (0 = greedy), not {self.temperature}")
        _check(0.0 < self.top_p <= 1.0, f"top_p must lie in (0, 1], not {self.top_p}")
        _check(-1 <= self.top_k < 1 << 31, f"top_k must be at least 1, or 0 for all tokens, not {self.top_k}")
        _check(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}")
        _check(self.min_tokens >= 0, f"min_tokens must be at least 0, not {self.min_tokens}")
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens, f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}"
            )
        _check(all(self.stop_strings), "stop must not contain an empty string")
        _check(self.logprobs is None or 0 <= self.logprobs <= 20, f"logprobs must lie in 0..20, not {self.logprobs}")
        _check(self.seed is None or 0 <= self.seed < 1 << 63, f"seed must lie in 0..2**63-1, not {self.seed}")

    def _normalise(self) -> None:
        """Plain Python numbers of what numpy and others pass; None for a list means none."""
        put = object.__setattr__  # frozen, but not yet handed out
        for name in ("temperature", "top_p"):
            put(self, name, _number(float, getattr(self, name), name))
        for name in ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs"):
            value = getattr(self, name)
            if value is not None or name in ("n", "top_k", "min_tokens"):
                put(self, name, _number(operator.index, value, name))
        put(self, "stop", self.stop if isinstance(self.stop, str) else list(self.stop or []))
        put(self, "stop_token_ids", [_number(operator.index, t, "stop_token_ids") for t in self.stop_token_ids or []])

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token before temperature and filters, and its rank is its place in the list."""

    token_id: int
    logprob: float


@dataclass
class CompletionOutput:
    """One completion of a prompt so far. ``finish_reason``: None while it runs, "stop", "length" or "abort"."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped it
    logprobs: list[list[Logprob]] | None = None  # per token: the chosen one first, then the best alternatives


@dataclass
class RequestTimes:
    """When things happened, in seconds of the engine's clock; only differences mean something."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

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

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    times: RequestTimes

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
