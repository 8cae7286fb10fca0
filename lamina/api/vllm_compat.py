"""Options of vLLM's engine, as arguments of ``LLM`` and as flags. Each has its name here, or a reason why it means
nothing here, or a replacement if it does not exist here. Values of flags are text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any


def _no(value: Any) -> bool:
    """Return the opposite of a switch."""
    return not value


def _number(value: Any) -> Any:
    """Return the number that a flag's text spells; other values unchanged."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


# Options that do the same thing: the name here, and the conversion of the value. None requests nothing.
_SAME: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "attention_backend": ("attention", str),
    "enforce_eager": ("cuda_graphs", _no),
    "kv_cache_memory_bytes": ("kv_memory", str),
    "max_num_batched_tokens": ("prefill_chunk", _number),
}
_CHUNKS = "prompts are always computed in chunks, of --prefill-chunk tokens"
_GRAPHS = "--no-cuda-graphs switches graphs off"
_FILES = "weights are mapped from their files"
_TEXT = "prompts are text here"
# Options that mean nothing here, with any value -> the reason.
_NOTHING: dict[str, str] = {
    "enable_chunked_prefill": _CHUNKS,
    "max_num_partial_prefills": _CHUNKS,
    "long_prefill_token_threshold": _CHUNKS,
    "swap_space": "preempted sequences are computed again, or saved by --preemption-mode swap",
    "max_seq_len_to_capture": _GRAPHS,
    "cudagraph_capture_sizes": _GRAPHS,
    "compilation_config": _GRAPHS,
    "disable_custom_all_reduce": "--collective chooses how ranks add up",
    "disable_cascade_attn": "--attention-backend chooses what computes attention",
    "disable_hybrid_kv_cache_manager": "layers with a window always give back what they see no more",
    "disable_log_stats": "LLM.get_metrics and GET /metrics always count",
    "async_scheduling": "rounds are always queued ahead",
    "use_tqdm_on_load": "LLM(progress=True) shows a bar while workers start",
    "max_parallel_loading_workers": _FILES,
    "limit_mm_per_prompt": _TEXT,
    "mm_processor_kwargs": _TEXT,
    "mm_processor_cache_gb": _TEXT,
    "allowed_local_media_path": _TEXT,
    "enable_auto_tool_choice": "tools are always there; --tool-call-parser names their format",
    "max_loras": "there are no adapters here",
    "max_lora_rank": "there are no adapters here",
    "max_cpu_loras": "there are no adapters here",
}
_ADAPTER = "merge the adapter into the weights (merge_and_unload of peft), and give that directory as MODEL"
_OF_MODEL = "give the directory of that revision as MODEL (hf download MODEL --revision REVISION)"
_WORKERS = "requests go to one engine: start several servers and a load balancer"
# Option -> the values, in addition to None, that request nothing; its replacement.
_INSTEAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "revision": (("main",), _OF_MODEL),
    "code_revision": (("main",), _OF_MODEL),
    "tokenizer_revision": (("main",), "give a directory as --tokenizer"),
    "pipeline_parallel_size": (
        (1,), "--pipeline n rotates n batches over n - 1 replicas; layers are not divided"
    ),
    "data_parallel_size": ((1,), _WORKERS),
    "api_server_count": ((1,), _WORKERS),
    "distributed_executor_backend": (("mp", "uni"), "--launcher and --cluster say where workers are started"),
    "tokenizer_mode": (("auto", "hf", "fast"), "--tokenizer takes a Hugging Face tokenizer"),
    "load_format": (("auto", "safetensors", "hf"), "weights are read from safetensors"),
    "config_format": (("auto", "hf"), "the configuration is read from config.json"),
    "runner": (("auto", "generate"), "models generate text here"),
    "task": (("auto", "generate"), "models generate text here"),
    "convert": (("auto", "none"), "models generate text here"),
    "model_impl": (("auto", "transformers"), "the model's code is that of transformers"),
    "cpu_offload_gb": ((0, 0.0), "weights stay on the compute worker's device"),
    "num_gpu_blocks_override": ((), "--kv-cache-memory-bytes SIZE sets what each memory worker keeps for KV"),
    "speculative_config": (({},), "greedy tokens are the same without it: leave it out"),
    "kv_transfer_config": (({},), "--kv-offload dir=DIR and --prefill-workers move KV here"),
    "enable_lora": ((False,), _ADAPTER),
    "lora_modules": ((), _ADAPTER),
    "enable_expert_parallel": ((False,), "--tensor-parallel-size shares the weights of experts, too"),
    "enable_prompt_embeds": ((False,), "prompts are text or token ids"),
    "enable_return_routed_experts": ((False,), "no experts are reported"),
    "skip_tokenizer_init": ((False,), "ask with detokenize=False and prompts as token ids"),
    "logprobs_mode": (("raw_logprobs",), "log-probabilities are those before penalties and temperature"),
    "logits_processors": (([],), "lamina.wrap(model).generate takes logits_processor"),
    "hf_token": ((True,), "set HF_TOKEN in the environment"),
    "download_dir": ((), "set HF_HOME in the environment"),
    "override_generation_config": (({},), "--generation-config takes a directory that has a generation_config.json"),
    "structured_outputs_config": (({},), "llguidance compiles structured outputs, without settings"),
    "attention_config": (({},), "--attention-backend chooses what computes attention"),
}  # fmt: skip
# The same if a pool is on a GPU; otherwise it means nothing.
_GPU = ("gpu_memory_utilization", "--kv-cache-memory-bytes SIZE sets what each memory worker keeps for KV")
_DEVICES = ("compute_device", "memory_device")
# Options that are switches, without a value as flags.
SWITCHES = frozenset({
    "enforce_eager", "enable_chunked_prefill", "disable_custom_all_reduce", "disable_cascade_attn",
    "disable_hybrid_kv_cache_manager", "disable_log_stats", "async_scheduling", "use_tqdm_on_load", "enable_lora",
    "enable_prompt_embeds", "enable_return_routed_experts", "skip_tokenizer_init", "enable_auto_tool_choice",
    "enable_expert_parallel",
})  # fmt: skip
PASTED: Collection[str] = (*_SAME, *_NOTHING, *_INSTEAD, _GPU[0])


def translate_vllm_options(pasted: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return ``pasted`` by their names here, and a line for each option that means nothing here and is ignored.
    ``options``: our options that are given with them. Raises ValueError, with a replacement, for an option that has no
    counterpart and requests something.
    """
    on_gpu = any(str(options.get(name, "")).startswith("cuda") for name in _DEVICES)
    nothing = _NOTHING if on_gpu else _NOTHING | dict([_GPU])
    replacements, lines = dict[str, Any](), list[str]()
    for name, value in pasted.items():
        if value is None:
            continue
        if name in _SAME:
            here, changed = _SAME[name]
            replacements[here] = changed(value)
        elif name in nothing:
            lines.append(f"{_flag(name)} is ignored: {nothing[name]}")
        elif str(value) not in map(str, _INSTEAD.get(name, ((), ""))[0]):
            raise ValueError(f"{_flag(name)} is not supported: {replacement_of(name)}")
    return replacements, lines


def replacement_of(name: str) -> str:
    """Return the replacement of an option that does not exist here; "" if none is known."""
    return dict([_GPU]).get(name) or _INSTEAD.get(name, ((), ""))[1]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
