"""Converts a request to SamplingParams, within the server's limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lamina.request import SamplingParams
from lamina.server.engine_client.messages import EngineReady
from lamina.server.errors import ApiError, bad_request, context_length_error
from lamina.server.server_config import ServerConfig

from .openai_protocol import ChatRequest, CompletionRequest, Sampling
from .structured_output import structure_of

_NONE: Mapping[str, Any] = MappingProxyType({})
PARAMS = frozenset(f.name for f in dataclasses.fields(SamplingParams))
MAX_LISTED = 8  # wrong keys in one error
# Fields that go to SamplingParams under their own names if given.
_PLAIN = (
    "temperature", "top_k", "min_p", "n", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "ignore_eos", "allowed_token_ids", "bad_words", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "kv_sparsity",
)  # fmt: skip


def completion_params(
    request: CompletionRequest, config: ServerConfig, ready: EngineReady, defaults: Mapping[str, Any] = _NONE
) -> SamplingParams:
    """Convert a completion request. ``max_tokens`` 0, for scoring a prompt, becomes 1: the caller drops that token.
    ``defaults``: values of SamplingParams for fields that are not given; its max_tokens limits all requests. Raises
    ApiError.
    """
    n = request.n or 1
    if request.best_of not in (None, n):
        raise ApiError(400, f"best_of must equal n, not {request.best_of}", param="best_of", code="unsupported_value")
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens must be at least 1 without echo", param="max_tokens", code="invalid_value")
    limit = 16 if request.max_tokens is None else max(1, request.max_tokens)
    return _params(request, config, ready, defaults, limit, request.logprobs, "logprobs", echo=bool(request.echo))


def chat_params(
    request: ChatRequest, config: ServerConfig, ready: EngineReady, defaults: Mapping[str, Any] = _NONE
) -> SamplingParams:
    """Convert a chat request. ``max_tokens`` None: up to the context's end. ``defaults``: as for ``completion_params``.
    Raises ApiError.
    """
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    if request.max_completion_tokens is None and request.max_tokens == 0:
        raise ApiError(400, "max_tokens must be at least 1", param="max_tokens", code="invalid_value")
    limit = request.max_completion_tokens or request.max_tokens
    count = (request.top_logprobs or 0) if request.logprobs else None
    return _params(request, config, ready, defaults, limit, count, "top_logprobs", echo=False)


def _params(
    request: Sampling,
    config: ServerConfig,
    ready: EngineReady,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    logprobs_name: str,
    *,
    echo: bool,
) -> SamplingParams:
    _check_limits(request, config)
    _check_scores(request, config, ready, {logprobs_name: logprobs, "prompt_logprobs": request.prompt_logprobs})
    asked = max_tokens is not None
    given = {**defaults, **{name: value for name in _PLAIN if (value := getattr(request, name)) is not None}}
    if (most := given.pop("max_tokens", None)) is not None:
        max_tokens = most if max_tokens is None else min(most, max_tokens)
    if request.seed not in (None, -1):
        given["seed"] = request.seed % (1 << 63)
    if request.top_p is not None:
        given["top_p"] = max(request.top_p, 1e-9)  # 0 means: the best token only
    try:
        params = SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo and request.prompt_logprobs is None else request.prompt_logprobs,
            logit_bias=_logit_bias(request, ready),
            structured_outputs=structure_of(request),
        )
    except ValueError as e:
        raise bad_request(str(e), PARAMS) from e
    if asked and max_tokens is not None and max_tokens > ready.max_model_len:
        raise context_length_error(ready.max_model_len, f"{max_tokens} new tokens were asked for", "max_tokens")
    if params.min_tokens >= ready.max_model_len:
        raise ApiError(400, f"min_tokens {params.min_tokens} exceeds the context", param="min_tokens")
    for name in ("stop_token_ids", "allowed_token_ids"):
        bad = next((t for t in getattr(params, name) or [] if not 0 <= t < ready.vocab_size), None)
        if bad is not None:
            text = f"{name} must lie in the vocabulary: {bad} is out of vocabulary, 0..{ready.vocab_size - 1}"
            raise ApiError(400, text, param=name, code="invalid_value")
    return params


def _check_scores(
    request: Sampling, config: ServerConfig, ready: EngineReady, counts: Mapping[str, int | None]
) -> None:
    """Check numbers of alternatives. ``counts``: field -> its number; -1 = the whole vocabulary. Raises ApiError."""
    for name, count in counts.items():
        asked = ready.vocab_size if count == -1 else count or 0
        if 0 <= config.max_logprobs < asked:
            every = " (-1, the whole vocabulary)" if count == -1 else ""
            text = f"{name} must be at most {config.max_logprobs}, not {asked}{every}"
            raise ApiError(400, text, param=name, code="invalid_value")
    if request.prompt_logprobs and request.stream:
        text = "prompt_logprobs is not available with stream: true: leave out one"
        raise ApiError(400, text, param="prompt_logprobs", code="invalid_value")


def _check_limits(request: Sampling, config: ServerConfig) -> None:
    if (request.n or 1) > config.max_n:
        raise ApiError(400, f"n must be at most {config.max_n}, not {request.n}", param="n", code="invalid_value")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > config.max_stop or any(len(s) > config.max_stop_chars for s in stops):
        text = f"stop must be at most {config.max_stop} strings of at most {config.max_stop_chars} characters"
        raise ApiError(400, text, param="stop", code="invalid_value")
    if any(len(word) > config.max_stop_chars for word in request.bad_words or []):
        text = f"bad_words must have at most {config.max_stop_chars} characters each"
        raise ApiError(400, text, param="bad_words", code="invalid_value")
    for name in ("logit_bias", "stop_token_ids", "bad_words"):
        if len(getattr(request, name) or ()) > config.max_logit_bias:
            what = "words" if name == "bad_words" else "tokens"
            raise ApiError(400, f"{name} must be at most {config.max_logit_bias} {what}", param=name)


def _logit_bias(request: Sampling, ready: EngineReady) -> dict[int, float] | None:
    """Return logit_bias by token id; JSON's keys are strings. Raises ApiError."""
    if not request.logit_bias:
        return None
    vocab = ready.vocab_size
    bad = [k for k in request.logit_bias if not (k.isascii() and k.isdigit() and len(k) < 12 and int(k) < vocab)]
    if bad:
        named = ", ".join(repr(key[:64]) for key in bad[:MAX_LISTED])
        text = f"logit_bias has the key{'s' if len(bad) > 1 else ''} {named}: keys must be token ids below {vocab}"
        raise ApiError(400, text, param="logit_bias", code="invalid_value")
    bias = {int(key): value for key, value in request.logit_bias.items()}
    if len(bias) != len(request.logit_bias):
        raise ApiError(400, "logit_bias has a token id twice", param="logit_bias", code="invalid_value")
    return bias
