"""``vllm.LLM`` over ``lamina.LLM``: models by made folders, options by the names that they have here."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig

import lamina

from .models import made

BACKENDS = {"FLASH_ATTN": "native", "TRITON_ATTN": "numba", "FLEX_ATTENTION": "reference"}
RENAMED = {"max_num_batched_tokens": "prefill_chunk"}
DTYPES = {"half": "float16", "float": "float32"}
TRAINED = 2048  # tokens of the shipped model
# They say how vLLM computes, or what a test is not about.
MEANINGLESS = frozenset({
    "enforce_eager", "gpu_memory_utilization", "disable_log_stats", "runner", "convert", "tokenizer_mode",
    "kernel_config", "long_prefill_token_threshold", "max_num_partial_prefills",
    "compilation_config", "enable_chunked_prefill", "swap_space", "async_scheduling", "disable_custom_all_reduce",
    "kv_cache_memory_bytes", "num_gpu_blocks_override", "tensor_parallel_size", "block_size", "load_format",
    "distributed_executor_backend", "disable_cascade_attn", "disable_hybrid_kv_cache_manager",
    "enable_prompt_embeds",
})  # fmt: skip


class LLM(lamina.LLM):
    def __init__(self, model: str, *, tokenizer: str | None = None, **options: Any) -> None:
        backend = (options.pop("attention_config", None) or {}).get("backend") or options.pop("attention_backend", None)
        kept = {RENAMED.get(k, k): v for k, v in options.items() if k not in MEANINGLESS and v is not None}
        if backend:
            kept["attention"] = BACKENDS.get(backend, "auto")
        if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
            kept["deterministic"] = True
        kept["dtype"] = DTYPES.get(kept.get("dtype", "auto"), kept.get("dtype", "auto"))
        kept.setdefault("max_model_len", TRAINED)
        self._caches = bool(kept.get("enable_prefix_caching", True))
        self._vocabulary = int(AutoConfig.from_pretrained(made(model)).vocab_size)
        super().__init__(made(model), tokenizer=made(tokenizer) if tokenizer else None, **kept)

    @property
    def llm_engine(self) -> Any:
        """Of vLLM's engine: whether prefixes are cached, how many tokens there are, whether it is idle."""
        cache = SimpleNamespace(enable_prefix_caching=self._caches)
        model = SimpleNamespace(get_vocab_size=lambda: self._vocabulary)
        config = SimpleNamespace(cache_config=cache, model_config=model)
        unfinished = lambda: int(not self.engine.idle)  # noqa: E731
        return SimpleNamespace(vllm_config=config, model_config=model, get_num_unfinished_requests=unfinished)

    def __del__(self) -> None:
        self.close()
