"""The common part of ``LLM`` and ``AsyncLLM``: a model's pools, engine and tokenizer, and the conversion of prompts, in
every form that is accepted, for the engine. Other values raise an error of one line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from numbers import Integral
from types import MappingProxyType
from typing import Any

from lamina import netstack
from lamina.config.flat_options import make_config, replace_options
from lamina.engine.engine import Engine
from lamina.engine.scheduler_factory import build_parts
from lamina.engine.streams import EngineRequest, RequestStreams
from lamina.engine.tuning.profiling import tune_num_batches
from lamina.executor.transport_choice import choose_transport
from lamina.executor.worker_executor import WorkerExecutor
from lamina.grammar.front_end import GrammarFrontEnd
from lamina.grammar.vocabulary import vocabulary_of
from lamina.models.chat_template import RenderedChat
from lamina.models.checkpoint import peek_config
from lamina.models.generation_defaults import AUTO, default_sampling_params
from lamina.models.tokenizer import (
    Detokenizer,
    TokenSpeller,
    bad_words_ids,
    load_in_background,
    token_ids,
)
from lamina.protocol.control import Vocabulary
from lamina.request import Metric, SamplingParams
from lamina.utils.progress import start_progress

from .keyword_errors import keyword_text
from .vllm_compat import PASTED, translate_vllm_options

_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's names
logger = logging.getLogger(__name__)
MAX_LOGPROBS = 20  # the default limit of an LLM, as in vLLM
# Text, token ids, or a mapping with "prompt" or "prompt_token_ids" as in other engines.
Prompt = str | Sequence[int] | Mapping[str, Any]
FORMS = "text, token ids, or a list of those"


def metrics_of(engine: Engine) -> list[Metric]:
    """Return the engine's counters, by the names that vLLM's scripts use."""
    stats = engine.scheduler_stats
    used = (
        1.0 - free / all_
        for free, all_ in zip(engine.free_blocks, map(min, engine.worker_info.num_blocks), strict=True)
    )
    counts = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": max(used),
        "num_preemptions": stats.preemptions,
        "prefix_cache_queries": stats.queried_tokens,
        "prefix_cache_hits": stats.hit_tokens,
    }
    return [Metric(f"vllm:{name}", float(value)) for name, value in counts.items()]


class Frontend:
    """The started pools, engine and tokenizer of an ``LLM``. Raises as ``LLM`` does."""

    defaults: Mapping[str, Any] = MappingProxyType({})  # defaults of SamplingParams
    max_logprobs = MAX_LOGPROBS
    _speller: TokenSpeller | None = None
    _grammars: GrammarFrontEnd | None = None  # None: there is no tokenizer

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        progress: bool,
        options: dict[str, Any],
        engine_class: type[Engine] = Engine,
    ) -> None:
        generation_config = options.pop("generation_config", AUTO)
        self.max_logprobs = checked_limit(options.pop("max_logprobs", MAX_LOGPROBS))
        config, _ = choose_transport(make_config(our_option_names(options)))
        model = _checked_model(model)
        if isinstance(model, str):
            peek_config(model, config.model)
        elif config.batching.enable_prefix_caching is None and not config.offload.backend:  # its weights may change
            config = replace_options(config, {"enable_prefix_caching": False})
        remote = config.model.trust_remote_code
        self.defaults = default_sampling_params(model, generation_config, trust_remote_code=remote)
        with start_progress(progress) as on_progress:
            source = model if tokenizer is None else tokenizer
            here = not isinstance(model, str) or netstack.in_process(config.launch.scheme)
            limit_s = config.deadlines.start_timeout_s
            loading = load_in_background(source, trust_remote_code=remote, here=here, limit_s=limit_s)
            self.pools = WorkerExecutor(model, config, on_progress)
            try:
                self.tokenizer = loading.result(limit_s)
                words: Callable[[], Vocabulary] | None = None
                if self.tokenizer is not None:
                    info = self.pools.ready
                    words = cache(partial(vocabulary_of, self.tokenizer, info.vocab_size, info.eos_token_ids))
                    self._grammars = GrammarFrontEnd(words)
                trace, features = self.pools.tracer.recorder, self.pools.engine_features
                self.engine = engine_class(
                    self.pools,
                    config,
                    trace=trace,
                    features=features,
                    build=partial(build_parts, keeps_slo=False),
                    vocabulary=words,
                )
                tune_num_batches(self.engine, on_progress)
            except BaseException:
                self.pools.close()
                raise
        self.streams = RequestStreams(self.engine)

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters for prompts without their own."""
        return SamplingParams(**self.defaults)

    def engine_request(self, prompt: str | list[int], params: SamplingParams) -> EngineRequest:
        """Convert a prompt for the engine. Raises ValueError if it has no token ids and cannot be tokenized."""
        params = params.clone()  # the caller may set other values for the next request
        ids = self._encode(prompt)
        self._check_logprobs(params)
        if params.bad_words and params.bad_words_token_ids is not None:
            raise ValueError("bad_words and bad_words_token_ids say the same of other tokens: leave one out")
        if params.bad_words and self.tokenizer is not None:
            params.bad_words_token_ids = bad_words_ids(self.tokenizer, params.bad_words)
        if params.structured_outputs is not None and self._grammars is not None:
            self._grammars.fill(params)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-self._num_kept_prompt_tokens(params) :]
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: pass tokenizer= or use stop_token_ids")
        make_detokenizer, spell = None, None
        if self.tokenizer is not None and params.detokenize:
            tokenizer, skip = self.tokenizer, params.skip_special_tokens
            make_detokenizer = lambda: Detokenizer(tokenizer, ids, skip_special_tokens=skip)  # noqa: E731
            self._speller = spell = self._speller or TokenSpeller(tokenizer)
        text = prompt if isinstance(prompt, str) else None
        return EngineRequest(
            prompt=ids, params=params, text=text, make_detokenizer=make_detokenizer, decode_token=spell
        )

    def _check_logprobs(self, params: SamplingParams) -> None:
        most = self.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and most >= 0 and not 0 <= count <= most:
                wanted = "-1, the whole vocabulary" if count == -1 else count
                raise ValueError(f"{name} must be at most {most}, not {wanted}: start with max_logprobs={count}")

    def _num_kept_prompt_tokens(self, params: SamplingParams) -> int:
        """Return how many of a prompt's last tokens are kept."""
        kept = params.truncate_prompt_tokens or 0
        return kept if kept > 0 else max(1, self.engine.worker_info.max_model_len - (params.max_tokens or 1))

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError("text prompts need a tokenizer: pass tokenizer= or prompts as token ids")
        return token_ids(
            self.tokenizer, prompt, **{"add_special_tokens": False} if isinstance(prompt, RenderedChat) else {}
        )


def our_option_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with our names, and values, in place of vLLM's; None is the default. Logs options that mean
    nothing here. Raises ValueError.
    """
    given = {name: value for name, value in options.items() if value is not None}
    pasted = {name: given.pop(name) for name in options if name in PASTED and name in given}
    replacements, lines = translate_vllm_options(pasted, given)
    if both := next((name for name in replacements if name in given), None):
        raise ValueError(f"{' '.join(pasted)} and {both} say the same: leave one out")
    for line in lines:
        logger.warning(keyword_text(line))
    dtype = given.get("dtype")
    by_dtype = {"dtype": _DTYPES[dtype]} if isinstance(dtype, str) and dtype in _DTYPES else {}
    return {**given, **replacements, **by_dtype}


def checked_limit(count: Any) -> int:
    if type(count) is not int or count < -1:
        raise ValueError(f"max_logprobs must be at least 0, or -1 for the whole vocabulary, not {count!r}")
    return count


def _checked_model(model: Any) -> Any:
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if isinstance(model, str):
        if not model:
            raise ValueError("model is empty: give a directory, a hub id or a torch.nn.Module")
        return model
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a directory, a hub id or a torch.nn.Module, not {type(model).__name__}")
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise ValueError("model has weights that are not on the CPU: call model.to('cpu') first")
    return model


def prompt_list(prompts: Any) -> list[str | list[int]]:
    """Return one prompt or several as a list. Raises ValueError for anything that is no prompt."""
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_prompt(prompts)]
    try:
        several = list(prompts)
    except TypeError:
        raise ValueError(f"prompts must be {FORMS}, not {type(prompts).__name__}") from None
    return [_prompt(p) for p in several]


def params_list(count: int, params: Any) -> list[SamplingParams]:
    """Return sampling parameters for each of ``count`` prompts. Raises ValueError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError("sampling_params must be a SamplingParams, or a list with one for each prompt")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts: pass one, or one for each")
    return list(params)


def priority_list(count: int, priority: Any) -> list[int]:
    """Return a priority for each of ``count`` prompts; None is 0. Raises ValueError for non-integers and a wrong number
    of them.
    """
    each = list(priority) if isinstance(priority, list | tuple) else [0 if priority is None else priority] * count
    if not all(isinstance(p, Integral) for p in each):
        raise ValueError(f"priority must be a whole number, or a list with one for each prompt, not {priority!r}")
    if len(each) != count:
        raise ValueError(f"{len(each)} priorities for {count} prompts: pass one number, or one for each")
    return [int(p) for p in each]


def conversation_list(messages: Any) -> list[list[dict[str, Any]]]:
    """Return one conversation or several as a list. Raises ValueError for anything else."""
    if _is_conversation(messages):
        return [list(messages)]
    if isinstance(messages, Sequence) and messages and all(_is_conversation(m) for m in messages):
        return [list(m) for m in messages]
    raise ValueError('messages must be a list of {"role": ..., "content": ...}, or a list of such lists')


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, Mapping):
        contents = [prompt[k] for k in ("prompt_token_ids", "prompt") if prompt.get(k) is not None]
        if not contents or isinstance(contents[0], Mapping):
            raise ValueError('a prompt that is a mapping needs "prompt" (text) or "prompt_token_ids"')
        return _prompt(contents[0])
    if isinstance(prompt, str):
        return prompt
    if not _is_ids(prompt):
        raise ValueError(f"a prompt must be text or token ids, not {_words(prompt)}")
    return [int(t) for t in prompt]


def _is_ids(value: Any) -> bool:
    """Return True for a list of whole numbers, or a flat integer array of numpy or torch."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and (
        all(isinstance(t, int) or (hasattr(t, "__index__") and not hasattr(t, "__len__")) for t in value)
        and len(value) > 0
    )  # fmt: skip


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(m, Mapping) and "role" in m for m in value)
    )


def _words(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"a list of {type(value[0]).__name__}" if len(value) else "an empty list"
    return type(value).__name__
