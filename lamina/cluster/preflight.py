"""What can be checked of a model and a configuration before anything is started; for ``--dry-run``."""

from __future__ import annotations

from typing import Any

from lamina.config import EngineConfig


def check(model: str, config: EngineConfig) -> None:
    """Raises ValueError, naming the flag and the fix, ImportError where a backend was not built."""
    from lamina.models.checkpoint import check_weights, find_checkpoint, read_config, weight_bytes
    from lamina.models.load import max_model_len
    from lamina.workers.memory_store import available_bytes

    _check_names(config)
    directory = find_checkpoint(model, trust_remote_code=config.trust_remote_code)
    found = read_config(directory, trust_remote_code=config.trust_remote_code)
    limit = max_model_len(found)
    if config.max_model_len > limit:
        raise ValueError(f"--max-model-len {config.max_model_len} exceeds the model's own limit of {limit} tokens")
    heads = _kv_heads(found)
    if heads % config.memory_workers:
        fits = [str(b) for b in range(1, heads + 1) if heads % b == 0]
        raise ValueError(
            f"--memory-workers {config.memory_workers} does not divide the model's {heads} KV heads: "
            f"use one of {', '.join(fits)}"
        )
    check_weights(directory)
    need = weight_bytes(directory) * config.replicas + config.kv_bytes() * config.memory_workers
    free = available_bytes()
    if need > free:
        raise ValueError(
            f"weights of {config.replicas} replicas (--pipeline {config.pipeline}) and KV blocks (--kv-memory "
            f"{config.kv_memory}) need {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        )


def _check_names(config: EngineConfig) -> None:
    from lamina.attention import BACKENDS
    from lamina.gemm import BACKENDS as LINEAR
    from lamina.netstack import SCHEMES

    for name, value, known in (
        ("--transport", config.transport, SCHEMES),
        ("--attention", config.attention, ("auto", *BACKENDS)),
        ("--gemm", config.gemm, ("auto", *LINEAR)),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def _kv_heads(config: Any) -> int:
    """By the names that configurations have for it; 0 where it has another (the workers check the real shapes)."""
    text = config.get_text_config()
    for name in ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head"):
        if isinstance(value := getattr(text, name, None), int):
            return value
    return 0
