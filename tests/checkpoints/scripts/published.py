"""Tiny models for the scripts that write checkpoints of them: their weights as published, and models with others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).parents[1]
SHAPE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False, "initializer_range": 0.4,
}  # fmt: skip
MIXTURE: dict[str, Any] = SHAPE | {
    "num_hidden_layers": 1, "moe_intermediate_size": 64, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
PREFIX = {False: "llama", True: "qwen3_moe"}  # of folders, by whether there are experts
UNQUANTISED = ["lm_head", "re:.*mlp.gate$"]


def random_model(seed: int, *, experts: bool) -> Any:
    """Returns a model with random weights in fp32."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIXTURE)) if experts else LlamaForCausalLM(LlamaConfig(**SHAPE))


def published(model: Any) -> dict[str, Tensor]:
    """Returns a model's weights by the names of its checkpoint, where each expert has its own."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    return {name: stored[name] for name in model.state_dict() if name in stored} | stored


def with_weights(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """Returns transformers' model in fp32 with other weights, by the same names."""
    with TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        numbers = {name: w.float().contiguous() for name, w in weights.items()}
        save_file(numbers, Path(folder) / "model.safetensors", {"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


def is_quantised(name: str) -> bool:
    """Returns whether formats have a weight in few bits."""
    return name.endswith("_proj.weight")


def drawn_order(name: str, inputs: int) -> torch.Tensor:
    """Returns inputs in an order that the layers of one input share, as activations give it."""
    for layer in ("up", "k", "v"):
        name = name.replace(f".{layer}_proj.", f".{'gate' if layer == 'up' else 'q'}_proj.")
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(crc32(name.encode())))


def configuration(model: Any, dtype: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json of a checkpoint. ``settings``: of quantisation."""
    known = model.config.to_dict() | {"dtype": dtype, "architectures": [type(model).__name__]}
    return known | {"quantization_config": dict(settings)}
