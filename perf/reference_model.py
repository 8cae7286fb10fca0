"""The models that benchmarks share, with random weights, made on the spot: a Llama shape, and hybrids whose recurrent
layers have the shape of a real one's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32000,
}
# name -> class in transformers, options of its configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SHAPE),
    "qwen3-next": (
        "Qwen3Next",
        {
            "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
            "head_dim": 128, "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "vocab_size": 32000,
        },
    ),
    "granite-4-h": (
        "GraniteMoeHybrid",
        {
            "hidden_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 48, "mamba_d_head": 64,
            "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "num_local_experts": 0,
            "num_experts_per_tok": 0, "shared_intermediate_size": 4096, "vocab_size": 32000,
        },
    ),
}  # fmt: skip


def make(
    folder: Path, dtype: str, shape: dict[str, int] | None = None, max_len: int = 16384, family: str = "llama"
) -> Path:
    """Write the model to ``folder`` as safetensors, unless it is there. ``dtype`` as in torch, such as "bfloat16"."""
    import torch
    import transformers

    if (folder / "config.json").exists():
        return folder
    name, known = FAMILIES[family]
    options: dict[str, Any] = {**known, **(shape or {}), "max_position_embeddings": max_len}
    torch.manual_seed(0)
    options |= {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


@contextmanager
def made(
    dtype: str, shape: dict[str, int] | None = None, max_len: int = 16384, family: str = "llama"
) -> Iterator[Path]:
    """Yield the directory of a model as ``make`` writes it, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield make(Path(folder) / "model", dtype, shape, max_len, family)
