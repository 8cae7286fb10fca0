"""Fields and methods of vLLM's SamplingParams and LLM that are not supported: accepted if they request nothing,
otherwise refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")

# Of vLLM 0.32: the order of its fields as positional arguments.
ORDER = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "watermarking", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
)  # fmt: skip
_GRAMMAR = "take structured_outputs=StructuredOutputsParams(...)"
# Name -> the values, in addition to None, that request nothing; the replacement.
UNSERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "guided_decoding": ((), _GRAMMAR),
    "response_format": (({"type": "text"},), _GRAMMAR),
    "logits_processors": (([],), "lamina.wrap(model).generate takes logits_processor"),
    "watermarking": ((False,), "lamina.wrap(model).generate takes watermarking_config"),
    "logprob_token_ids": (([],), "take logprobs=-1, the whole vocabulary"),
    "prompt_logprob_token_ids": (([],), "take prompt_logprobs=-1, the whole vocabulary"),
    "prompt_logprob_start": ((0,), "take prompt_logprobs, and leave out the first ones"),
    "flat_logprobs": ((False,), "logprobs are a list of mappings, one for each token"),
    "spaces_between_special_tokens": ((True, False), ""),  # today's tokenizers put none there in any case
    "output_kind": ((0,), "outputs are cumulative: LLM.generate returns them finished, LLM.stream as they grow"),
    "stream_interval": ((1,), "LLM.stream gives to a slow reader all that has grown"),
    "skip_clone": ((True, False), ""),
    "extra_args": (({},), "nothing here reads it"),
    "best_of": ((1,), "take n, and choose by cumulative_logprob"),
    "use_beam_search": ((False,), "take n, and choose by cumulative_logprob"),
    "skip_reading_prefix_cache": ((False,), "LLM.reset_prefix_cache forgets KV of earlier requests"),
    "thinking_token_budget": ((-1,), "take max_tokens"),
    "repetition_detection": ((), "take frequency_penalty or max_tokens"),
    "routed_experts_prompt_start": ((0,), "no experts are reported"),
    "trace_decode_token_ids": ((), "score given tokens as a prompt, with prompt_logprobs"),
}
_ENDS = "models generate text here, and nothing else comes out of them"
# The same for arguments of its LLM's methods.
_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "lora_request": (([],), "merge the adapter into the weights, and open that directory"),
    "tokenization_kwargs": (({},), "tokenize yourself, and pass prompts as token ids"),
    "mm_processor_kwargs": (({},), "prompts are text here"),
    "prompt_token_ids": ((), "pass token ids as prompts"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "guided_options_request": ((), _GRAMMAR),
}
# Its methods that do not exist here.
_METHODS = {
    "beam_search": "take n of SamplingParams, and choose by cumulative_logprob",
    **dict.fromkeys(("classify", "embed", "encode", "reward", "score"), _ENDS),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), "LLM.stream queues requests, and yields them"),
    **dict.fromkeys(("sleep", "wake_up", "release_kv_cache_memory"), "LLM.close gives everything back"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "LLM.stats has counters of every worker"),
    **dict.fromkeys(("start_profile", "stop_profile"), "LLM(trace=FILE) records a run"),
    "llm_engine": "LLM.engine is one of another make",
    "from_engine_args": "pass options to LLM",
}


def check_arguments(method: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument that requests something, TypeError for an unknown one."""
    for name, value in given.items():
        if name not in _ARGUMENTS:
            raise TypeError(f"{method} takes no argument {name!r}")
        neutral, instead = _ARGUMENTS[name]
        if value is not None and value not in neutral:
            raise ValueError(f"{name} is not served here: {instead}")


def unsupported_attribute(name: str) -> str:
    """Return the error's text for an attribute that an LLM does not have."""
    return f"LLM has no {name!r}" + (f": {_METHODS[name]}" if name in _METHODS else "")


def vllm_arguments(kind: type[T]) -> type[T]:
    """Make a dataclass accept arguments in vLLM's order, and its other fields by name. The class raises ValueError for
    an unsupported field.
    """
    begin: Any = kind.__init__

    @wraps(begin)
    def init(self: T, *args: Any, **given: Any) -> None:
        if len(args) > len(ORDER):
            raise TypeError(f"{kind.__name__} takes {len(ORDER)} arguments without names, not {len(args)}")
        both = [name for name in ORDER[: len(args)] if name in given]
        if both:
            raise TypeError(f"{kind.__name__} got two values for {both[0]}")
        given |= dict(zip(ORDER, args, strict=False))
        known = getattr(kind, "__dataclass_fields__")  # noqa: B009 - a dataclass's attribute that mypy does not know
        check_supported_fields({name: value for name, value in given.items() if name not in known}, known)
        begin(self, **{name: value for name, value in given.items() if name in known})

    setattr(kind, "__init__", init)  # noqa: B010 - mypy takes it for a method of all classes
    return kind


def check_supported_fields(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ValueError for a field that requests something, and for an unknown field; ``known``: the
    supported ones.
    """
    for name, value in given.items():
        if name not in UNSERVED:
            near = get_close_matches(name, known, n=1)
            raise ValueError(f"{name} is no sampling parameter{f': did you mean {near[0]}?' if near else ''}")
        neutral, instead = UNSERVED[name]
        plain = value.value if isinstance(value, Enum) else value
        if value is not None and not any(type(plain) is type(n) and plain == n for n in neutral):
            shown = " ".join(repr(value).split())
            raise ValueError(f"{name}={shown[:80]} is not served here: {instead}")
