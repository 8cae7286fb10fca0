"""Exports of modelopt give the logits of plain weights, which this file computes from the bits of both floats.

transformers reads such files wrongly, so it is no oracle here.

Covers: lamina/models/quantization/modelopt.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_table.tiny_models import enlarge
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lamina.models.errors import ModelError
from lamina.models.load import load
from lamina.ops.gemm import get

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
IDS = torch.tensor([[3, 17, 9, 4, 56, 90, 8]])
Tensors = dict[str, torch.Tensor]


def fp8_value(byte: int) -> float:
    """E4M3: a sign, 4 bits of an exponent with bias 7, 3 bits of a fraction."""
    sign, exponent, fraction = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    return sign * (fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def fp4_value(code: int) -> float:
    """E2M1: a sign, 2 bits of an exponent with bias 1, 1 bit of a fraction."""
    sign, exponent, fraction = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (fraction * 0.5 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1))


FP8_VALUES, FP4_VALUES = np.array([fp8_value(b) for b in range(256)]), np.array([fp4_value(c) for c in range(16)])


def fp8(shape: tuple[int, int], draw: np.random.Generator, by_channel: bool) -> tuple[Tensors, np.ndarray]:
    codes = draw.choice([b for b in range(256) if b & 127 < 0x58], shape).astype(np.uint8)
    scale = draw.uniform(0.05, 0.2, (shape[0],) if by_channel else ()).astype(np.float32)
    plain = FP8_VALUES[codes] * (scale[:, None] if by_channel else scale)
    return {
        "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
        "weight_scale": torch.from_numpy(np.array(scale)),
        "input_scale": torch.tensor(0.5),
    }, plain


def nvfp4(shape: tuple[int, int], draw: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    codes = draw.integers(0, 16, shape).astype(np.uint8)
    scales = draw.integers(0x30, 0x58, (shape[0], shape[1] // 16)).astype(np.uint8)
    plain = FP4_VALUES[codes] * FP8_VALUES[scales].repeat(16, 1) * np.float32(0.03)
    return {
        "weight": torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4),
        "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.03),
        "input_scale": torch.tensor(0.5),
    }, plain


KINDS: dict[str, Callable[..., tuple[Tensors, np.ndarray]]] = {
    "FP8": lambda shape, draw: fp8(shape, draw, by_channel=False),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda shape, draw: fp8(shape, draw, by_channel=True),
    "NVFP4": nvfp4,
}


def export(path: Path, algorithm: str, *, in_config: bool = False, change: Any = None) -> LlamaForCausalLM:
    """Write an export, and return the model of its plain weights."""
    draw = np.random.default_rng(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    enlarge(model, seed=0)
    tensors, plain = dict[str, torch.Tensor](), dict(model.state_dict())
    for name, w in model.state_dict().items():
        base = name.removesuffix(".weight")
        if "_proj" in name:
            parts, values = KINDS[algorithm](tuple(w.shape), draw)
            tensors |= {f"{base}.{part}": value for part, value in parts.items()}
            plain[name] = torch.from_numpy(values.astype(np.float32))
        else:
            tensors[name] = w.clone()
    tensors |= {
        f"model.layers.{layer}.self_attn.{x}_proj.{x}_scale": torch.tensor(2.0) for layer in (0, 1) for x in "kv"
    }
    if change is not None:
        change(tensors)
    model.load_state_dict(plain)
    model.config.save_pretrained(path)
    said = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    if in_config:
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
        (path / "config.json").write_text(json.dumps(config))
    else:
        file = {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": said}
        (path / "hf_quant_config.json").write_text(json.dumps(file))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize("in_config", [False, True])
@pytest.mark.parametrize("algorithm", KINDS)
def test_logits_are_those_of_the_plain_weights(algorithm: str, in_config: bool, tmp_path: Path) -> None:
    plain = export(tmp_path, algorithm, in_config=in_config)
    ours = load(tmp_path, dtype="float32", backend=get("native", 1)).model
    with torch.no_grad():
        due, have = plain(IDS).logits, ours(IDS).logits
        assert (have - due).abs().max() < 1e-5 * due.std()
        plain.model.layers[1].mlp.up_proj.weight[3, 4] += 0.05 * plain.model.layers[1].mlp.up_proj.weight.std()
        assert (have - plain(IDS).logits).abs().max() > 1e-5 * due.std(), "another weight would not be seen"


NAME = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("algorithm", "change", "words"),
    [
        ("NVFP4", lambda t: t.pop(f"{NAME}.weight_scale_2"), f"{NAME}.weight has no {NAME}.weight_scale_2: fetch"),
        ("NVFP4", lambda t: t.pop(f"{NAME}.weight_scale"), f"{NAME}.weight has no {NAME}.weight_scale: fetch"),
        (
            "NVFP4",
            lambda t: t.update({f"{NAME}.weight_scale": t[f"{NAME}.weight_scale"].float()}),
            rf"{NAME}.weight_scale F32 \[48, 2\] does not fit {NAME}.weight \[48, 16\]",
        ),
        (
            "NVFP4",
            lambda t: t.update({f"{NAME}.weight_scale_2": torch.tensor(float("nan"))}),
            f"{NAME}.weight_scale_2 has a scale that is no finite number",
        ),
        (
            "NVFP4",
            lambda t: t.update({f"{NAME}.weight_scale_2": torch.ones(2)}),
            rf"{NAME}.weight_scale_2 \[2\] must be one number",
        ),
        (
            "NVFP4",
            lambda t: t.update({f"{NAME}.pre_quant_scale": torch.ones(32)}),
            f"{NAME}.pre_quant_scale scales inputs, which is not read: use an export without AWQ",
        ),
        (
            "FP8",
            lambda t: t.update({f"{NAME}.weight_scale": torch.tensor(0.0)}),
            f"{NAME}.weight_scale has a scale of zero",
        ),
        (
            "FP8",
            lambda t: t.update({f"{NAME}.weight_scale": torch.ones(3)}),
            rf"{NAME}.weight_scale \[3\] does not fit",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    algorithm: str, change: Callable[[Tensors], object], words: str, tmp_path: Path
) -> None:
    export(tmp_path, algorithm, change=change)
    with pytest.raises(ModelError, match=words) as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)


def test_other_algorithms_are_refused_by_name(tmp_path: Path) -> None:
    export(tmp_path, "FP8")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelError) as refused:
        load(tmp_path)
    assert str(refused.value) == (
        "modelopt: W4A8_AWQ is not read: use one of FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, W4A16_NVFP4, MIXED_PRECISION"
    )
