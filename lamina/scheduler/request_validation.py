"""Which tokens a request may name, and why it gets none."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from lamina.config.conflicts import KV_DISCARD, PRIORITY, SESSION_ID, conflict_text, need_text
from lamina.config.engine_config import EngineConfig
from lamina.request import SamplingParams

from .sessions.cache_options import CacheOptions
from .sessions.context_overflow import ContextOverflow
from .sessions.token_ranges import TokenRanges

FULL_ATTENTION_SALT = b" dense"  # behind the salt of sequences that attend all of their KV where others attend some
MAX_PROMPT_LOGPROBS = 1 << 20  # of a prompt, which come back at once
NOT_FINITE = "the largest logit is not a finite number: weights or activations are broken, or too large for --dtype"


def check_token_ids(prompt: list[int], params: SamplingParams, vocabulary: int) -> None:
    """Raises ValueError, in one line, for a token that there is not, and for bad words that nobody has made tokens."""
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


def check_stop_tokens(params: SamplingParams, stops: Collection[int], vocabulary: int) -> None:
    """Raises ValueError where ``min_tokens`` bans all tokens that there are, as each is one of ``stops``."""
    if params.min_tokens and set(stops).issuperset(range(vocabulary)):
        raise ValueError(
            f"min_tokens {params.min_tokens} bans the stop tokens until then, and stop_token_ids with the end tokens "
            f"are all {vocabulary} of the vocabulary: leave one out, or leave out min_tokens"
        )


def prompt_too_long_message(tokens: int, limit: int) -> str:
    """Of a prompt that leaves no room for a token, in the words by which clients and scripts know it."""
    return (
        f"This model's maximum context length is {limit} tokens (--max-model-len). The decoder prompt (length "
        f"{tokens}) plus the number of requested output tokens (at least 1) is longer than the maximum model length of "
        f"{limit}. Make sure that `max_model_len` is no smaller than the number of text tokens (prompt + requested "
        f"output tokens)."
    )


def all_tokens_banned_message(params: SamplingParams, outputs: int) -> str:
    """Of a completion of so many tokens that has none left that it may have. ``min_tokens`` forbids no more once there
    are so many.
    """
    forbids = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words_token_ids,
        "min_tokens": outputs < params.min_tokens,
    }
    given = [name for name, value in forbids.items() if value]
    if given == ["min_tokens"]:
        return (
            f"min_tokens {params.min_tokens} bans the stop tokens so far, and the model gives no other token: lower "
            f"it, or name fewer stops"
        )
    return f"{' and '.join(given)} forbid every token that the model gives: allow more tokens, or forbid fewer"


def check_cache_options(terms: CacheOptions, params: SamplingParams, config: EngineConfig) -> None:
    """Raises ValueError where a request cannot be taken on such terms, whatever its prompt is."""
    if terms.priority and config.batching.scheduling_policy == "fcfs":
        raise ValueError(need_text(PRIORITY, ["--scheduling-policy priority"]))
    if terms.session is not None:
        check_session(params, config)


def check_session(params: SamplingParams, config: EngineConfig) -> None:
    """Raises ValueError where a request cannot be a turn of a session."""
    if params.n > 1:
        raise ValueError(f"n must be 1 with session_id, not {params.n}: a session goes on behind one answer")
    if not config.caches_prefixes:
        raise ValueError(conflict_text(SESSION_ID, "--no-enable-prefix-caching"))
    if evicts_kv(params, config):
        raise ValueError(conflict_text(SESSION_ID, "--kv-sparsity evict"))


def check_discard(ranges: TokenRanges, length: int, params: SamplingParams, overflow: ContextOverflow | None) -> None:
    """Raises ValueError where a prompt of ``length`` cannot lose these tokens."""
    if overflow is None:
        raise ValueError(need_text(KV_DISCARD, ["--context-overflow truncate"]))
    if params.prompt_logprobs is not None:
        raise ValueError("kv_discard does not go with prompt_logprobs, which are of all tokens: leave out one")
    overflow.check(ranges, length)


def kv_mode_of(salt: bytes, params: SamplingParams, config: EngineConfig) -> tuple[bytes, bool, bool]:
    """Of a request's sequences: their salt, whether they keep some of their KV alone, and whether they attend all of it
    where those of others attend some. Such a one begins with nothing that others have approximated.
    """
    dense = config.kv.selects_blocks and params.kv_sparsity == "none"
    return salt + FULL_ATTENTION_SALT if dense else salt, evicts_kv(params, config), dense


def evicts_kv(params: SamplingParams, config: EngineConfig) -> bool:
    """Whether a request keeps some of its KV alone. Raises ValueError where it asks for what the engine has not."""
    if params.kv_sparsity not in (None, "none", config.kv.kv_sparsity):
        raise ValueError(
            f"kv_sparsity {params.kv_sparsity}: this engine has --kv-sparsity {config.kv.kv_sparsity}: start it with "
            f"--kv-sparsity {params.kv_sparsity}, or ask for none"
        )
    return config.kv.drops_blocks and params.kv_sparsity != "none"
