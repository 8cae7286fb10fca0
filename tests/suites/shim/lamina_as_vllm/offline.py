"""``vllm.LLM`` over ``lamina.LLM``: models by made folders, options by the names that they have here."""

from __future__ import annotations

import os
from typing import Any

import lamina

from .models import made

BACKENDS = {"FLASH_ATTN": "native", "TRITON_ATTN": "numba", "FLEX_ATTENTION": "reference"}
RENAMED = {"max_num_batched_tokens": "prefill_chunk"}
# They say how vLLM computes, or what a test is not about.
MEANINGLESS = frozenset({
    "enforce_eager", "gpu_memory_utilization", "disable_log_stats", "runner", "convert", "tokenizer_mode", "kernel_config",
    "compilation_config", "enable_chunked_prefill", "swap_space", "async_scheduling", "disable_custom_all_reduce",
    "kv_cache_memory_bytes", "num_gpu_blocks_override", "skip_tokenizer_init_", "tensor_parallel_size", "block_size",
    "distributed_executor_backend", "load_format", "disable_cascade_attn", "max_logprobs_",
})  # fmt: skip


class LLM(lamina.LLM):
    def __init__(self, model: str, *, tokenizer: str | None = None, **options: Any) -> None:
        backend = (options.pop("attention_config", None) or {}).get("backend") or options.pop("attention_backend", None)
        kept = {RENAMED.get(k, k): v for k, v in options.items() if k not in MEANINGLESS and v is not None}
        if backend:
            kept["attention"] = BACKENDS[backend]
        if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
            kept["deterministic"] = True
        super().__init__(made(model), tokenizer=made(tokenizer) if tokenizer else None, **kept)

    def __del__(self) -> None:
        self.close()
