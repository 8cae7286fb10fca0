"""Writes the tiny checkpoint llama_int4_act in this folder, whose groups have inputs in the order of activations.

    python tests/checkpoints/actorder_checkpoint.py

needs the package compressed-tensors in a version that writes such checkpoints (0.12), which tests do not. That library
packs and unpacks each weight. ``oracle.json`` has what transformers computes in fp32 with these weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs
from oracle import oracle
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

PATH = Path(__file__).parent / "llama_int4_act"
SHAPE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False, "initializer_range": 0.4,
}  # fmt: skip
ARGS = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True, "actorder": "group"}


def packed(w: torch.Tensor, compressor: Any, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Returns the tensors that stand for w, with inputs that are dealt to groups at random."""
    group = ARGS["group_size"]
    of = (torch.arange(w.shape[1]) // group)[torch.randperm(w.shape[1])].int()
    most = w[:, of.argsort(stable=True)].unflatten(1, (-1, group)).abs().amax(-1)
    scale = (most / 7.0).bfloat16()
    parts = compressor.compress_weight(w, scale.float(), args, torch.zeros_like(scale, dtype=torch.int8), of)
    return {**parts, "weight_scale": scale, "weight_g_idx": of}


def write(seed: int) -> bool:
    """Returns False if a token of this seed's model is a near tie."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    args, compressor = QuantizationArgs(**ARGS), PackedQuantizationCompressor()
    tensors: dict[str, torch.Tensor] = {}
    for key, w in model.state_dict().items():
        owner = key.removesuffix(".weight")
        if not key.endswith("_proj.weight"):
            tensors[key] = w.bfloat16().contiguous()
            continue
        stored = packed(w, compressor, args)
        tensors |= {f"{owner}.{k}": v.contiguous() for k, v in stored.items()}
        wide = {**stored, "weight_scale": stored["weight_scale"].float()}  # its products stay in fp32
        model.get_submodule(owner).weight.data = compressor.decompress_weight(wide, args).float()
    PATH.mkdir(exist_ok=True)
    save_file(tensors, PATH / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": ARGS, "input_activations": None}},
    }  # fmt: skip
    (PATH / "config.json").write_text(json.dumps(config, indent=1))
    known = oracle(model)
    (PATH / "oracle.json").write_text(json.dumps(known))
    return known is not None


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(next(seed for seed in range(100) if write(seed)))
