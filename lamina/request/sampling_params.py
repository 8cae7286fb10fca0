"""The sampling parameters of a request. No torch here."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from .structured_outputs import StructuredOutputsParams
from .unsupported_options import check_supported_fields, vllm_arguments

FILTERS = ("min_p", "top_k", "top_p")  # in vLLM's order
KV_SPARSITY_MODES = ("none", "evict", "select")  # what happens to a request's KV
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_WHOLE = ("n", "top_k", "min_tokens")
_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@vllm_arguments
@dataclass(kw_only=True)
class SamplingParams:
    """The parameters of a generation. Names, defaults and order of arguments are vLLM's. A request takes a ``clone``:
    fields may be set between requests, and are checked as each one begins. vLLM's other fields are accepted if they
    request nothing, otherwise refused by name (``unsupported_options.py``).

    A token is a pure function of the logits, these parameters, the tokens so far, ``seed`` and the index of the output
    token. It does not depend on other sequences of the batch or on the worker that samples. The logits are changed in
    vLLM's order: logit bias, repetition penalty, frequency and presence penalty. Tokens that are forbidden (all but the
    allowed ones, bad words, stop tokens before ``min_tokens``) stay so. Then come temperature, and the filters in the
    order of ``filter_order``. Each filter counts the probabilities of the tokens that earlier filters have left. So
    top_p is a share of the tokens that min_p and top_k keep (vLLM). In transformers min_p comes last.
    """

    n: int = 1  # completions of each prompt
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = all
    min_p: float = 0.0  # drop tokens less probable than this share of the best one's probability
    filter_order: tuple[str, ...] = FILTERS
    presence_penalty: float = 0.0  # subtracted from the logit of every token that the completion has
    frequency_penalty: float = 0.0  # subtracted from the logit for each time that the completion has the token
    repetition_penalty: float = 1.0  # logits of tokens of prompt and completion: divided if positive, else multiplied
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit
    allowed_token_ids: list[int] | None = None  # only these are chosen, end tokens included; None = all
    bad_words: list[str] | None = field(default_factory=list)  # the token that completes one is not chosen
    max_tokens: int | None = 16  # None = up to the model's length
    min_tokens: int = 0  # no stop token before that many
    stop: str | list[str] | None = field(default_factory=list)
    include_stop_str_in_output: bool = False  # whether the returned text ends with the stop string
    stop_token_ids: list[int] | None = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None  # None or -1 = the engine draws one
    logprobs: int | None = None  # alternatives reported for each token; -1 = the whole vocabulary
    prompt_logprobs: int | None = None  # the same, for each token of the prompt but the first
    skip_special_tokens: bool = True  # in the text
    detokenize: bool = True  # False: no text, only tokens
    truncate_prompt_tokens: int | None = None  # keep this many last prompt tokens; -1 = as many as fit, None = all
    kv_sparsity: str | None = None  # "none" keeps all KV, whatever the engine does; None = as the engine is started
    structured_outputs: StructuredOutputsParams | None = None  # what the whole completion follows
    # ``bad_words`` as token ids; None = a tokenizer makes them.
    bad_words_token_ids: list[list[int]] | None = None

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
        _check(self.min_tokens >= 0, f"min_tokens must be greater than or equal to 0, not {self.min_tokens}")
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens,
                f"min_tokens must be less than or equal to max_tokens {self.max_tokens}, not {self.min_tokens}",
            )
        _check(all(self.stop_strings), "stop must not contain an empty string")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            text = f"{name} must be at least 0, or -1 for the whole vocabulary, not {count}"
            _check(count is None or -1 <= count < 1 << 31, text)
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2.0 <= getattr(self, name) <= 2.0, f"{name} must lie in -2..2, not {getattr(self, name)}")
        _check(  # beyond, products of logits are no numbers any more
            0.01 <= self.repetition_penalty <= 100.0,
            f"repetition_penalty must lie in 0.01..100, not {self.repetition_penalty}",
        )
        self._check_order()
        _check(
            self.kv_sparsity in (None, *KV_SPARSITY_MODES),
            f"kv_sparsity must be one of {', '.join(KV_SPARSITY_MODES)}, not {self.kv_sparsity!r}",
        )
        _check(0.0 <= self.min_p <= 1.0, f"min_p must lie in 0..1, not {self.min_p}")
        for token, bias in (self.logit_bias or {}).items():
            _check(-100.0 <= bias <= 100.0, f"logit_bias of token {token} must lie in -100..100, not {bias}")
        self._check_tokens()
        self._check_structure()
        _check(self.detokenize or not self.stop_strings, "stop strings need text: leave out detokenize=False, or stop")
        _check(self.seed is None or 0 <= self.seed < 1 << 63, f"seed must lie in 0..2**63-1, not {self.seed}")

    def _check_order(self) -> None:
        order = self.filter_order
        if not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(FILTERS):
            raise ValueError(f"filter_order must have each of {', '.join(FILTERS)} once, not {order!r}")
        self.filter_order = tuple(order)

    def _check_structure(self) -> None:
        given: Any = self.structured_outputs
        if isinstance(given, Mapping):
            try:
                given = StructuredOutputsParams(**given)
            except TypeError as e:
                raise ValueError(f"structured_outputs: {e}") from e
        if given is not None:
            if not isinstance(given, StructuredOutputsParams):
                raise ValueError(f"structured_outputs must be a StructuredOutputsParams, not {given!r}")
            self.structured_outputs = copy(given)

    def _check_tokens(self) -> None:
        kept = self.truncate_prompt_tokens
        text = f"truncate_prompt_tokens must be at least 1, or -1 for as many as fit, not {kept}"
        _check(kept is None or kept == -1 or kept >= 1, text)
        text = "allowed_token_ids is empty: name the tokens that may be chosen, or leave it out"
        _check(self.allowed_token_ids is None or bool(self.allowed_token_ids), text)
        _check(all(self.bad_words or []), "bad_words must not contain an empty string")
        _check(all(self.bad_words_token_ids or []), "bad_words_token_ids must not contain an empty list")

    def _normalise(self) -> None:
        """Convert numbers of numpy and other libraries to plain Python ones; None for a list means none."""
        if self.seed == -1:
            self.seed = None
        for name in _FLOATS:
            setattr(self, name, _number(float, getattr(self, name), name))
        for name in (*_WHOLE, *_OPTIONAL):
            value = getattr(self, name)
            if value is not None or name in _WHOLE:
                setattr(self, name, int(_number(operator.index, value, name)))
        self.stop = self.stop if isinstance(self.stop, str) else _texts(self.stop, "stop")
        self.bad_words = list(dict.fromkeys(_texts(self.bad_words, "bad_words")))
        if self.logit_bias is not None:
            self.logit_bias = _biases(self.logit_bias)
        self.stop_token_ids = _ids(self.stop_token_ids or [], "stop_token_ids")
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids(self.allowed_token_ids, "allowed_token_ids")
        if self.bad_words_token_ids is not None:
            self.bad_words_token_ids = [_ids(word, "bad_words_token_ids") for word in self.bad_words_token_ids]

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing that can change. Raises ValueError for a field that was set to a bad value,
        and for an unknown field.
        """
        known = self.__dataclass_fields__
        if others := {name: value for name, value in vars(self).items() if name not in known}:
            check_supported_fields(others, known)
        clone = copy(self)
        clone.__post_init__()
        return clone

    @property
    def adjusts_logits(self) -> bool:
        """True if penalties or bias change logits, or tokens are forbidden from first to last."""
        changed = self.presence_penalty or self.frequency_penalty or self.logit_bias
        forbidden = self.bad_words_token_ids or self.allowed_token_ids or self.structured_outputs
        return bool(changed or forbidden) or self.repetition_penalty != 1.0

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


def _number(kind: Callable[[Any], Any], value: Any, name: str) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{name} must be {'a number' if kind is float else 'an integer'}, not {value!r}") from e


def _texts(value: Any, name: str) -> list[str]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"{name} must be text or a list of texts, not {value!r}")
    return list(texts)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {value!r}")
    of = "logit_bias: a token id"
    return {_number(operator.index, t, of): _number(float, b, f"logit_bias of {t}") for t, b in value.items()}


def _ids(value: Any, name: str) -> list[int]:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be a list of token ids, not {value!r}")
    if type(value) is list and all(type(t) is int for t in value):  # usually of many tokens
        return value.copy()
    return [int(_number(operator.index, t, name)) for t in value]


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)
