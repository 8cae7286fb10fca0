"""Intake: checks prompts, truncates them if configured, and makes requests with their sequences."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from itertools import chain

from lamina.config.conflicts import KV_DISCARD, PRIORITY, SESSION_EVICT, SESSION_ID, conflict_text, need_text
from lamina.config.engine_config import EngineConfig
from lamina.kv.sparsity import OBSERVED_DECODE_ROWS
from lamina.protocol.control import ComputeReady
from lamina.request import CompletionOutput, RequestOutput, RequestTimes, SamplingParams
from lamina.scheduler.sampling_requests import completion_seed
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.scheduler.sessions.context_overflow import ContextOverflow, build_context_overflow
from lamina.scheduler.sessions.session_table import Sessions, SessionTurn
from lamina.scheduler.sessions.token_ranges import TokenRanges, remove_ranges, union
from lamina.scheduler.sparsity.kept_kv import FULL_ATTENTION_SALT, KeptKv

from .request import DecodeToken, IncrementalDetokenizer, Request, build_text_streams

MAX_PROMPT_LOGPROBS = 1 << 20  # values of one prompt, since they are returned at once


class RequestIntake:
    """Makes the requests of one engine, with consecutive ids. Requests without a seed get one."""

    def __init__(self, config: EngineConfig, info: ComputeReady, num_kv_shards: int, sessions: Sessions) -> None:
        """``info``: the model's constant facts. Raises ValueError for a context too short to be truncated."""
        self._config, self._sessions = config, sessions
        self._drops_blocks, self._selects_blocks = config.kv.drops_blocks, config.kv.selects_blocks
        self._scored_rows = max(config.kv.kv_observation_window, OBSERVED_DECODE_ROWS)
        self._prefill_unit = config.batching.prefill_chunk if config.model.deterministic else 1
        self._max_model_len, self._vocab_size, self._eos = info.max_model_len, info.vocab_size, info.eos_token_ids
        stripe_round_tokens = info.stripe_blocks * info.block_size * num_kv_shards
        self._overflow = build_context_overflow(config.overflow, info.max_model_len, stripe_round_tokens)
        self._seeds, self._next_request = random.Random(config.batching.seed), 0

    def check(self, prompt: list[int], params: SamplingParams, terms: CacheOptions) -> None:
        """Raise ValueError, in one line, for a prompt or parameters that cannot be served."""
        self._check_cache_options(terms, params)
        if terms.discard_ranges:
            check_discard(terms.discard_ranges, len(prompt), params, self._overflow)
        if not prompt:
            raise ValueError("the decoder prompt cannot be empty: it needs at least one token")
        truncates = self._overflow is not None and params.prompt_logprobs is None
        if len(prompt) >= self._max_model_len and not truncates:
            raise ValueError(prompt_too_long_message(len(prompt), self._max_model_len))
        check_token_ids(prompt, params, self._vocab_size)
        self._check_sparsity(params)
        check_stop_tokens(params, self._stops(params), self._vocab_size)

    def make(
        self,
        prompt: list[int],
        params: SamplingParams,
        terms: CacheOptions,
        now_s: float,
        *,
        text: str | None,
        make_detokenizer: Callable[[], IncrementalDetokenizer] | None,
        decode_token: DecodeToken | None,
        external_sampling: bool,
        cacheable: bool,
        accepted: bool,
    ) -> Request:
        """Return a request that arrived at ``now_s``; its sequences have no session yet. See ``Engine.add``."""
        request_id, self._next_request = self._next_request, self._next_request + 1
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        discarded = TokenRanges() if external_sampling else self._ranges_to_discard(prompt, params, terms)
        left = remove_ranges(prompt, discarded) if discarded else prompt
        sparse = params.kv_sparsity != "none"
        dense = self._selects_blocks and not sparse  # it reuses no KV that sparse requests computed
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
                salt=terms.salt + FULL_ATTENTION_SALT if dense else terms.salt,
                priority=terms.priority,
                options=terms,
                turn=SessionTurn(None, discarded, prompt if discarded else []),
                kept=KeptKv(self._drops_blocks and sparse, self._scored_rows, self._prefill_unit, dense),
                do_not_cache=not cacheable,
                external_sampling=external_sampling,
            )
            for index in range(params.n)
        ]
        output = RequestOutput(request_id, text, list(prompt), [s.output for s in sequences], RequestTimes(now_s))
        output.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        texts = build_text_streams(params, make_detokenizer)
        return Request(output, sequences, texts, decode_token, is_accepted=accepted)

    def _check_sparsity(self, params: SamplingParams) -> None:
        """Raise ValueError if a request asks for another sparsity than the engine's."""
        own = self._config.kv.kv_sparsity
        if params.kv_sparsity not in (None, "none", own):
            raise ValueError(
                f"kv_sparsity {params.kv_sparsity}: this engine has --kv-sparsity {own}: start it with "
                f"--kv-sparsity {params.kv_sparsity}, or ask for none"
            )

    def _check_cache_options(self, terms: CacheOptions, params: SamplingParams) -> None:
        """Raise ValueError for cache options that this engine cannot serve, whatever the prompt is."""
        if terms.priority and self._config.batching.scheduling_policy == "fcfs":
            raise ValueError(need_text(PRIORITY, ["--scheduling-policy priority"]))
        if terms.session is None:
            return
        if params.n > 1:
            raise ValueError(f"n must be 1 with session_id, not {params.n}: a session continues after one answer")
        if not self._config.caches_prefixes:
            raise ValueError(conflict_text(SESSION_ID, "--no-enable-prefix-caching"))
        self._check_sparsity(params)
        if self._drops_blocks and params.kv_sparsity != "none" and not self._config.offload.backend:
            raise ValueError(need_text(SESSION_EVICT, ["--kv-offloading-size", "--kv-offload dir="]))

    def _ranges_to_discard(self, prompt: list[int], params: SamplingParams, terms: CacheOptions) -> TokenRanges:
        """The tokens to drop: because the context is too long, or because the session dropped them before."""
        if self._overflow is None or params.prompt_logprobs is not None:
            return TokenRanges()
        session = self._sessions.get(terms.session) if terms.session else None
        before = union([*(session.discarded_ranges if session else ()), *terms.discard_ranges])
        return self._overflow.ranges_to_discard(len(prompt), params.max_tokens, before)

    def _stops(self, params: SamplingParams) -> frozenset[int]:
        return frozenset([*([] if params.ignore_eos else self._eos), *(params.stop_token_ids or [])])


def check_token_ids(prompt: list[int], params: SamplingParams, vocabulary: int) -> None:
    """Raise ValueError, in one line, for a token that does not exist, and for bad words that are no tokens yet."""
    if params.bad_words and params.bad_words_token_ids is None:
        raise ValueError("bad_words need a tokenizer: pass tokenizer=, or name their tokens in bad_words_token_ids")
    if params.prompt_logprobs is not None:
        each = 1 + (vocabulary if params.prompt_logprobs < 0 else min(params.prompt_logprobs, vocabulary))
        if len(prompt) * each > MAX_PROMPT_LOGPROBS:
            text = (
                f"prompt_logprobs of {len(prompt)} tokens, {each} of each, are more than {MAX_PROMPT_LOGPROBS} values"
            )
            raise ValueError(f"{text}: ask for fewer of each, or of parts of the prompt")
    named: dict[str, Collection[int]] = {
        "the prompt": prompt,
        "stop_token_ids": params.stop_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": [*chain.from_iterable(params.bad_words_token_ids or ())],
    }
    for name, ids in named.items():
        different = {*ids}
        if different and not 0 <= min(different) <= max(different) < vocabulary:
            bad = next(t for t in ids if not 0 <= t < vocabulary)
            raise ValueError(f"{name}: token id {bad} is out of vocabulary: it has {vocabulary} tokens")


def check_structure(params: SamplingParams, *, has_vocabulary: bool) -> None:
    """Raises ValueError for structured outputs where no front end has compiled them: it needs a tokenizer."""
    asked = params.structured_outputs
    if asked is not None and (asked.compiled is None or not has_vocabulary):
        raise ValueError("structured_outputs need a tokenizer: pass tokenizer=, or leave them out")


def check_stop_tokens(params: SamplingParams, stops: Collection[int], vocabulary: int) -> None:
    """Raises ValueError where ``min_tokens`` bans all tokens that there are, as each is one of ``stops``."""
    if params.min_tokens and set(stops).issuperset(range(vocabulary)):
        raise ValueError(
            f"min_tokens {params.min_tokens} bans the stop tokens until then, and stop_token_ids with the end tokens "
            f"are all {vocabulary} of the vocabulary: leave one out, or leave out min_tokens"
        )


def prompt_too_long_message(tokens: int, limit: int) -> str:
    """The error for a prompt that leaves no room for a token, in vLLM's words, which clients and scripts match."""
    return (
        f"This model's maximum context length is {limit} tokens (--max-model-len). The decoder prompt (length "
        f"{tokens}) plus the number of requested output tokens (at least 1) is longer than the maximum model length of "
        f"{limit}. Make sure that `max_model_len` is no smaller than the number of text tokens (prompt + requested "
        f"output tokens)."
    )


def check_discard(ranges: TokenRanges, length: int, params: SamplingParams, overflow: ContextOverflow | None) -> None:
    """Raises ValueError if these tokens cannot be dropped from a prompt of ``length`` tokens."""
    if overflow is None:
        raise ValueError(need_text(KV_DISCARD, ["--context-overflow truncate"]))
    if params.prompt_logprobs is not None:
        raise ValueError("kv_discard excludes prompt_logprobs, which are of all tokens: leave out one")
    overflow.check(ranges, length)
