"""Writes tiny checkpoints in the folder above whose groups have inputs in the order of activations.

    python tests/checkpoints/scripts/actorder_checkpoint.py

needs the package compressed-tensors in a version that writes such checkpoints (0.12), which tests do not. That library
packs and unpacks each weight. ``oracle.json`` has what transformers computes in fp32 with these weights.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs
from oracle import oracle
from published import (
    HERE,
    PREFIX,
    UNQUANTISED,
    configuration,
    drawn_order,
    is_quantised,
    published,
    random_model,
    with_weights,
)  # fmt: skip
from safetensors.torch import save_file

ARGS = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True, "actorder": "group"}


def packed(w: torch.Tensor, order: torch.Tensor, compressor: Any, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Returns the tensors that stand for w, whose groups have inputs in ``order``."""
    group = ARGS["group_size"]
    of = (torch.arange(w.shape[1]) // group)[order].int()
    most = w[:, of.argsort(stable=True)].unflatten(1, (-1, group)).abs().amax(-1)
    scale = (most / 7.0).bfloat16()
    parts = compressor.compress_weight(w, scale.float(), args, torch.zeros_like(scale, dtype=torch.int8), of)
    return {**parts, "weight_scale": scale, "weight_g_idx": of}


def write(seed: int, *, experts: bool) -> bool:
    """Returns False if a token of this seed's model is a near tie."""
    model = random_model(seed, experts=experts)
    args, compressor = QuantizationArgs(**ARGS), PackedQuantizationCompressor()
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for key, exact in published(model).items():
        owner, w = key.removesuffix(".weight"), exact.bfloat16().float()
        if not is_quantised(key):
            numbers[key] = tensors[key] = w.bfloat16().contiguous()
            continue
        stored = packed(w, drawn_order(key, w.shape[1]), compressor, args)
        tensors |= {f"{owner}.{k}": v.contiguous() for k, v in stored.items()}
        wide = {**stored, "weight_scale": stored["weight_scale"].float()}  # its products stay in fp32
        numbers[key] = compressor.decompress_weight(wide, args).float()
    path = HERE / f"{PREFIX[experts]}_int4_act"
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    settings = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "ignore": UNQUANTISED if experts else UNQUANTISED[:1],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": ARGS, "input_activations": None}},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(configuration(model, "bfloat16", settings), indent=1))
    known = oracle(with_weights(model, numbers))
    (path / "oracle.json").write_text(json.dumps(known))
    return known is not None


if __name__ == "__main__":
    torch.set_num_threads(1)
    for kind in (False, True):
        print(next(seed for seed in range(100) if write(seed, experts=kind)))
