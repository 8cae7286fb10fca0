"""The model that benchmarks share: a Llama shape with random weights, made on the spot."""

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


def make(folder: Path, dtype: str, shape: dict[str, int] | None = None, max_len: int = 16384) -> Path:
    """Write the model to ``folder`` as safetensors, unless it is there. ``dtype`` as in torch, such as "bfloat16"."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "config.json").exists():
        return folder
    options: dict[str, Any] = {**SHAPE, **(shape or {}), "max_position_embeddings": max_len}
    torch.manual_seed(0)
    config = LlamaConfig(**options, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


@contextmanager
def made(dtype: str, shape: dict[str, int] | None = None, max_len: int = 16384) -> Iterator[Path]:
    """Yield the directory of a model as ``make`` writes it, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield make(Path(folder) / "model", dtype, shape, max_len)
