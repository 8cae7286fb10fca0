"""Tiny checkpoints of fp8 and MXFP4 as DeepSeek-V3, Qwen and gpt-oss are published, and models of the same weights.

transformers' own functions unpack the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations import finegrained_fp8
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HAS_ORACLE = hasattr(finegrained_fp8, "_dequantize_fp8_weight")  # older releases have none
PROMPT, TOKENS = [3, 17, 29, 4, 56, 40, 8], 8
Tensors = dict[str, Tensor]


def fp8(rows_of: int, columns_of: int, scales: str = "scale_inv") -> Callable[[str, Tensor], tuple[Tensors, Tensor]]:
    """fp8 with a scale for each block of rows and columns; 0 is all of them. ``scales``: the end of their name."""

    def store(name: str, w: Tensor) -> tuple[Tensors, Tensor]:
        block = [size or whole for size, whole in zip((rows_of, columns_of), w.shape, strict=True)]
        rows, columns = (-(-n // b) for n, b in zip(w.shape, block, strict=True))
        scale = 0.001 + 0.01 * torch.rand(rows, columns)
        spread = scale.repeat_interleave(block[0], 0)[: w.shape[0]].repeat_interleave(block[1], 1)[:, : w.shape[1]]
        stored = (w / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        plain = finegrained_fp8._dequantize_fp8_weight(stored, scale, block, torch.float32)
        return {name: stored, f"{name}_{scales}": scale}, plain

    return store


def mxfp4(name: str, w: Tensor) -> tuple[Tensors, Tensor]:
    experts, inputs, outputs = w.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(121, 124, blocks.shape[:3], dtype=torch.uint8)
    plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, plain


CASES: dict[str, tuple[str, Callable[[str, Tensor], tuple[Tensors, Tensor]], str, dict[str, Any]]] = {
    "deepseek": ("deepseek-v3", fp8(128, 128), "_proj.weight", {"weight_block_size": [128, 128]}),
    "small-blocks": ("qwen3", fp8(24, 16), "_proj.weight", {"weight_block_size": [24, 16]}),
    "channels": ("qwen3", fp8(1, 0, "scale"), "_proj.weight", {}),
    "tensors": ("qwen3", fp8(0, 0, "scale"), "_proj.weight", {}),
    "gpt-oss": ("gpt-oss", mxfp4, "_proj", {"modules_to_not_convert": ["lm_head"]}),
}


def write(folder: Path, case: str) -> tuple[Path, Any]:
    """Writes a checkpoint of a case. Returns it, and the model of transformers with the same weights."""
    family, store, ending, settings = CASES[case]
    known = next(f for f in FAMILIES if f.name == family)
    torch.manual_seed(3)
    plain, path = folder / "plain", folder / "quantised"
    known.build().save_pretrained(plain)
    path.mkdir()
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    for name, w in list(tensors.items()):
        if not name.endswith(ending) or "kv_a_proj" in name:  # those of gpt-oss's attention end by .weight
            stored[name] = w.contiguous()
            continue
        parts, tensors[name] = store(name, w)
        stored |= parts
    assert len(stored) > len(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    method = "mxfp4" if case == "gpt-oss" else "fp8"
    raw = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": method, **settings}}))
    return path, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)


def tokens_of(model: Any, prompt: list[int] = PROMPT, count: int = TOKENS) -> list[int]:
    """Returns greedy tokens of transformers after a prompt."""
    longer = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    tokens: list[int] = longer[0, len(prompt) :].tolist()
    return tokens
