"""``vllm.LLM`` over ``lamina.LLM``: models by made folders, options by the names that they have here."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig

import lamina

from .models import made

BACKENDS = {"FLASH_ATTN": "native", "TRITON_ATTN": "numba", "FLEX_ATTENTION": "reference"}
TRAINED = 2048  # tokens of the shipped model
BLOCK = 16  # tokens of their KV block
# They fit the tests' own models to the tests' own machine, and no test is about them.
DROPPED = frozenset({
    "kernel_config", "tensor_parallel_size", "load_format", "distributed_executor_backend", "kv_cache_memory_bytes",
    "enable_prompt_embeds",
})  # fmt: skip


class LLM(lamina.LLM):
    def __init__(self, model: str, *, tokenizer: str | None = None, **options: Any) -> None:
        backend = (options.pop("attention_config", None) or {}).get("backend") or options.pop("attention_backend", None)
        blocks, config = options.pop("num_gpu_blocks_override", None), AutoConfig.from_pretrained(made(model))
        kept = {k: v for k, v in options.items() if k not in DROPPED and v is not None}
        if backend:
            kept["attention"] = BACKENDS.get(backend, "auto")
        if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
            kept["deterministic"] = True
        if blocks:
            kept["kv_memory"] = str(blocks * BLOCK * _bytes_of_token(config))
        kept = {"max_model_len": TRAINED, "block_size": BLOCK, **kept}
        self._caches = bool(kept.get("enable_prefix_caching", True))
        self._vocabulary = int(config.vocab_size)
        super().__init__(made(model), tokenizer=made(tokenizer) if tokenizer else None, **kept)

    @property
    def llm_engine(self) -> Any:
        """Stands for vLLM's engine: whether prefixes are cached, how many tokens there are, whether it is idle."""
        cache = SimpleNamespace(enable_prefix_caching=self._caches)
        model = SimpleNamespace(get_vocab_size=lambda: self._vocabulary)
        config = SimpleNamespace(cache_config=cache, model_config=model)
        scheduler = self.engine.scheduler
        unfinished = lambda: scheduler.num_unfinished + scheduler.num_waiting  # noqa: E731
        return SimpleNamespace(vllm_config=config, model_config=model, get_num_unfinished_requests=unfinished)

    def __del__(self) -> None:
        self.close()


def _bytes_of_token(config: Any) -> int:
    """Returns the bytes of K and V in bf16."""
    return 4 * int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim)
