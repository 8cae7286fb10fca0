"""Prompts become requests: they are checked, truncated where that was asked for, and dealt into sequences."""

from __future__ import annotations

import random
from collections.abc import Callable

from lamina.config.engine_config import EngineConfig
from lamina.protocol.control import ComputeReady
from lamina.request import CompletionOutput, RequestOutput, RequestTimes, SamplingParams
from lamina.scheduler.request_validation import (
    check_cache_options,
    check_discard,
    check_stop_tokens,
    check_token_ids,
    evicts_kv,
    kv_mode_of,
    prompt_too_long_message,
)
from lamina.scheduler.sampling_requests import completion_seed
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.scheduler.sessions.context_overflow import build_context_overflow
from lamina.scheduler.sessions.session_table import Sessions
from lamina.scheduler.sessions.token_ranges import TokenRanges, remove_ranges, union

from .detokenizer import DecodeToken, IncrementalDetokenizer, build_text_streams
from .request import Request


class RequestIntake:
    """Makes the requests of one engine. Their numbers, and the seeds of those without one, follow one another."""

    def __init__(self, config: EngineConfig, info: ComputeReady, num_kv_shards: int, sessions: Sessions) -> None:
        """``info``: facts of the model, which stay. Raises ValueError for a context too short to be truncated."""
        self._config, self._sessions = config, sessions
        self._max_model_len, self._vocab_size, self._eos = info.max_model_len, info.vocab_size, info.eos_token_ids
        stripe = info.stripe * info.block_size * num_kv_shards
        self._overflow = build_context_overflow(config.overflow, info.max_model_len, stripe)
        self._seeds, self._next_request = random.Random(config.batching.seed), 0

    def check(self, prompt: list[int], params: SamplingParams, terms: CacheOptions) -> None:
        """Raises ValueError, in one line, for a prompt or parameters that cannot be served."""
        check_cache_options(terms, params, self._config)
        if terms.discard_ranges:
            check_discard(terms.discard_ranges, len(prompt), params, self._overflow)
        if not prompt:
            raise ValueError("the decoder prompt cannot be empty: it needs at least one token")
        truncates = self._overflow is not None and params.prompt_logprobs is None
        if len(prompt) >= self._max_model_len and not truncates:
            raise ValueError(prompt_too_long_message(len(prompt), self._max_model_len))
        check_token_ids(prompt, params, self._vocab_size)
        evicts_kv(params, self._config)
        check_stop_tokens(params, self._stops(params), self._vocab_size)

    def make(
        self,
        prompt: list[int],
        params: SamplingParams,
        terms: CacheOptions,
        now_s: float,
        *,
        text: str | None,
        make_pieces: Callable[[], IncrementalDetokenizer] | None,
        decode_token: DecodeToken | None,
        external_sampling: bool,
        cacheable: bool,
    ) -> Request:
        """Return a request that has come at ``now_s``, whose sequences belong to no session yet. See ``Engine.add``."""
        request_id, self._next_request = self._next_request, self._next_request + 1
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        discarded = TokenRanges() if external_sampling else self._ranges_to_discard(prompt, params, terms)
        left = remove_ranges(prompt, discarded) if discarded else prompt
        salt, drops, dense = kv_mode_of(terms.salt, params, self._config)
        limit, stops = self._max_model_len, self._stops(params)
        sequences = [
            Sequence(
                request_id,
                params,
                completion_seed(seed, index),
                list(left),
                CompletionOutput(index, logprobs=None if params.logprobs is None else []),
                max_len=limit if params.max_tokens is None else min(limit, len(left) + params.max_tokens),
                stop_tokens=stops,
                salt=salt,
                affinity_key=terms.affinity_key,
                priority=terms.priority,
                retention_s=terms.retention_s,
                discarded_ranges=discarded,
                original_prompt=prompt if discarded else [],
                evicts_kv=drops,
                full_attention=dense,
                do_not_cache=not cacheable,
                external_sampling=external_sampling,
            )
            for index in range(params.n)
        ]
        output = RequestOutput(request_id, text, list(prompt), [s.output for s in sequences], RequestTimes(now_s))
        output.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        return Request(output, sequences, build_text_streams(params, make_pieces), decode_token)

    def _ranges_to_discard(self, prompt: list[int], params: SamplingParams, terms: CacheOptions) -> TokenRanges:
        """The tokens that a prompt loses because its context is too long, or as its session has lost them before."""
        if self._overflow is None or params.prompt_logprobs is not None:
            return TokenRanges()
        session = self._sessions.get(terms.session) if terms.session else None
        before = union([*(session.discarded_ranges if session else ()), *terms.discard_ranges])
        return self._overflow.ranges_to_discard(len(prompt), params.max_tokens, before)

    def _stops(self, params: SamplingParams) -> frozenset[int]:
        return frozenset([*([] if params.ignore_eos else self._eos), *(params.stop_token_ids or [])])
