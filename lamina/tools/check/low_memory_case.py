"""Options with too little memory for one sequence, so that memory workers lend, or for all running ones, so that some
are preempted. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lamina.config.engine_config import CHUNK_TOKENS, EngineConfig
from lamina.kv.stored_format import stored_dtype
from lamina.protocol.control import ComputeReady
from lamina.protocol.step_plan import LayerShape
from lamina.workers.compute.kv_capacity import store_bytes


class LowMemoryCase:
    """Memory limits for sequences of which the longest has ``longest`` tokens, on a model of ``layers``, all heads."""

    def __init__(
        self, longest: int, layers: Sequence[LayerShape], max_model_len: int, prompts: Sequence[int] = ()
    ) -> None:
        """``prompts``: tokens of each, in order of arrival."""
        self._longest, self._layers, self._limit, self._prompts = longest, layers, max_model_len, prompts
        self._stored = longest - 1  # the last token is drawn, and not stored

    def options(self, config: EngineConfig) -> dict[str, Any]:
        """Return options with which each memory worker of ``config`` holds the longest sequence without its last
        stripe. Raises ValueError if that is its only one.
        """
        home = (self._stored - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        if not home:
            raise ValueError(
                f"no sequence has more than one stripe of {CHUNK_TOKENS} tokens, so nothing can be lent: use longer "
                f"prompts or a larger --max-tokens"
            )
        dtype = stored_dtype(config.kv.kv_cache_dtype, getattr(torch, config.model.dtype))
        nbytes = store_bytes(self._layers, dtype, home, config.kv.block_size) // config.topology.tensor_parallel_size
        most = -(-self._longest // CHUNK_TOKENS) * CHUNK_TOKENS
        return {"max_model_len": min(self._limit, most), "kv_memory": str(nbytes)}

    def preemption_options(self, config: EngineConfig) -> dict[str, Any]:
        """Return options with which the prompts that run at once fit, but not all of their completions."""
        size, first = config.kv.block_size, self._prompts[: config.batching.max_num_seqs]
        one = -(-self._longest // size)
        blocks = max(one + 1, sum(-(-(tokens + 1) // size) for tokens in first))
        dtype = stored_dtype(config.kv.kv_cache_dtype, getattr(torch, config.model.dtype))
        nbytes = store_bytes(self._layers, dtype, blocks * size, size)
        return {"max_model_len": min(self._limit, one * size), "kv_memory": str(nbytes)}

    def why_not_low(self, ready: ComputeReady) -> str:
        """Return why memory workers that are ``ready`` need not lend for the longest sequence; "" = they must."""
        full = [min(n) for n, window in zip(ready.num_blocks, ready.windows, strict=True) if not window]
        if not full:
            return "all layers have a window, and lend nothing"
        home = max(full) * ready.block_size
        return f"a memory worker holds {home} tokens, so nothing need be lent" if home >= self._stored else ""
