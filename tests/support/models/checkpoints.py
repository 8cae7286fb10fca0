"""Checkpoints of any size that cost no time and no disk: safetensors headers, and files with holes for zeros."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from lamina.models.load import from_config

ITEM_BYTES = {"F32": 4, "BF16": 2}


def write_checkpoint(path: Path, config: Any, *, dtype: str = "F32", num_files: int = 1) -> int:
    """A model directory of zeros, sharded; the bytes of its weights."""
    path.mkdir(exist_ok=True)
    model = from_config(config)
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    sizes = {name: prod(shape) * ITEM_BYTES[dtype] for name, shape in shapes.items()}
    total, at, files = sum(sizes.values()), 0, dict[str, list[str]]()
    for name, size in sizes.items():
        number = min(at * num_files // total, num_files - 1) + 1
        files.setdefault(f"model-{number:05}-of-{num_files:05}.safetensors", []).append(name)
        at += size
    for file, names in files.items():
        write_zeros(path / file, {name: (dtype, shapes[name]) for name in names})
    weight_map = {name: file for file, names in files.items() for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.save_pretrained(path)
    return total


def write_zeros(file: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A safetensors file of ``tensors``, name -> dtype and shape; their bytes are a hole."""
    header, at = dict[str, Any](), 0
    for name, (dtype, shape) in tensors.items():
        end = at + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + at)


def llama_config(*, hidden: int, layers: int, dtype: str = "float32", **more: Any) -> LlamaConfig:
    """With 16 query and 8 KV heads."""
    shape = {
        "vocab_size": 8192, "hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 2048,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "dtype": dtype,
        "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    return LlamaConfig(**{**shape, **more})
