"""Mixtures of experts whose experts are stored with few bits: they compute what transformers does in fp32 with weights
that the published formulas give, number by number.

Covers: lamina/models/quantization/pack_experts.py, lamina/models/quantization/quantized_experts.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lamina.models.load import load
from lamina.models.quantization.quantized_experts import ExpertWeights
from lamina.models.quantization.quantized_linear import QuantizedLinear
from lamina.ops.gemm import get

pytestmark = pytest.mark.no_retry
GROUP, SIZE = 32, {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16, "vocab_size": 160}
CONFIG: dict[str, Any] = SIZE | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "initializer_range": 0.4, "tie_word_embeddings": False,
}  # fmt: skip
IDS = torch.tensor([[3, 17, 99, 4, 56, 140, 8, 21]])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word

Stored = dict[str, Tensor]


def nibble(words: list[list[int]], row: int, column: int, bits: int = 4) -> int:
    """The number at ``column`` of a row of words, whose lowest bits come first."""
    count = 32 // bits
    return (words[row][column // count] >> (bits * (column % count))) % 2**bits


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()


def scales(*shape: int) -> Tensor:
    return (0.03 + 0.03 * torch.rand(shape)).half()


def awq(outputs: int, inputs: int, name: str) -> tuple[Stored, list[list[float]]]:
    groups = inputs // GROUP
    stored = {"qweight": words(inputs, outputs // 8), "qzeros": words(groups, outputs // 8)}
    stored["scales"] = scales(groups, outputs)
    q, z, s = (stored[name].tolist() for name in ("qweight", "qzeros", "scales"))

    def at(packed: list[list[int]], row: int, n: int) -> int:
        return nibble(packed, row, n // 8 * 8 + AWQ_ORDER.index(n % 8))

    w = [[s[k // GROUP][n] * (at(q, k, n) - at(z, k // GROUP, n)) for k in range(inputs)] for n in range(outputs)]
    return stored, w


def gptq(
    bits: int, added: int, *, mixed: bool, joined: str = "up_proj"
) -> Callable[[int, int, str], tuple[Stored, list[list[float]]]]:
    """``mixed``: groups have any inputs, the same for gate and up unless their names are not ``joined``."""

    def made(outputs: int, inputs: int, name: str) -> tuple[Stored, list[list[float]]]:
        groups, count = inputs // GROUP, 32 // bits
        stored = {"qweight": words(inputs // count, outputs), "qzeros": words(groups, outputs // count)}
        stored["scales"] = (scales(groups, outputs).float() * 16 / 2**bits).half()
        of = torch.arange(inputs) // GROUP
        draw = torch.Generator().manual_seed(crc32(name.replace(joined, "gate_proj").encode()))
        stored["g_idx"] = (of[torch.randperm(inputs, generator=draw)] if mixed else of).int()
        q, z, s = stored["qweight"].T.tolist(), stored["qzeros"].tolist(), stored["scales"].tolist()
        of = stored["g_idx"].tolist()
        w = [
            [s[of[k]][n] * (nibble(q, n, k, bits) - nibble(z, of[k], n, bits) - added) for k in range(inputs)]
            for n in range(outputs)
        ]
        return stored, w

    return made


def int4(outputs: int, inputs: int, name: str) -> tuple[Stored, list[list[float]]]:
    """compressed-tensors, pack-quantized and symmetric."""
    stored = {"weight_packed": words(outputs, inputs // 8), "weight_scale": scales(outputs, inputs // GROUP)}
    stored["weight_shape"] = torch.tensor([outputs, inputs])
    q, s = stored["weight_packed"].tolist(), stored["weight_scale"].tolist()
    return stored, [[s[n][k // GROUP] * (nibble(q, n, k) - 8) for k in range(inputs)] for n in range(outputs)]


def w8a8(outputs: int, inputs: int, name: str) -> tuple[Stored, list[list[float]]]:
    """compressed-tensors, int-quantized by channel."""
    stored = {"weight": torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)}
    stored["weight_scale"] = scales(outputs, 1) / 16
    s = stored["weight_scale"].tolist()
    return stored, [[s[n][0] * q for q in row] for n, row in enumerate(stored["weight"].tolist())]


def mxfp4(outputs: int, inputs: int, name: str) -> tuple[Stored, list[list[float]]]:
    """compressed-tensors, mxfp4-pack-quantized: a byte has the even input's number in its lower half."""
    stored = {"weight_packed": torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)}
    stored["weight_scale"] = torch.randint(120, 124, (outputs, inputs // 32), dtype=torch.uint8)
    q, s = stored["weight_packed"].tolist(), stored["weight_scale"].tolist()

    def at(n: int, k: int) -> float:
        code = q[n][k // 2] >> 4 * (k % 2) & 15
        return (-1.0) ** (code >> 3) * E2M1[code & 7] * 2.0 ** (s[n][k // 32] - 127)

    return stored, [[at(n, k) for k in range(inputs)] for n in range(outputs)]


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WEIGHTS = {"num_bits": 4, "group_size": GROUP, "strategy": "group", "symmetric": True, "type": "int"}
BY_ACTIVATION = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (gptq(4, 1, mixed=False), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq_v2": (
        gptq(4, 0, mixed=False),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "gptq_8": (gptq(8, 1, mixed=False), {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
    "gptq_act": (gptq(4, 1, mixed=True), BY_ACTIVATION),
    "gptq_apart": (gptq(4, 1, mixed=True, joined="none"), BY_ACTIVATION),
    "int4": (
        int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
        },
    ),
    "w8a8": (w8a8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "mxfp4": (mxfp4, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}),
}


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Any]:
    """A checkpoint of each format, and the model that it describes, in fp32."""
    make, settings = KINDS[request.param]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG))
    model.save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    tensors, known = dict[str, Tensor](), dict[str, Tensor]()
    for name, w in plain.items():
        known[name] = tensors[name] = w.half().contiguous()
        if name.endswith("_proj.weight"):
            stored, numbers = make(*w.shape, name)
            known[name] = torch.tensor(numbers)
            del tensors[name]
            tensors |= {f"{name.removesuffix('.weight')}.{kind}": t for kind, t in stored.items()}
    save_file({n: t.float() for n, t in known.items()}, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    (path := tmp_path / "quantised").mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "plain" / "config.json").read_text()) | {"quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))
    right = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    return request.param, path, right


def error(model: Any, right: Any) -> float:
    with torch.no_grad():
        due = right(IDS).logits
        return float((model(IDS).logits - due).abs().max() / due.std())


@pytest.mark.long(but=["gptq"])
def test_experts(checkpoint: tuple[str, Path, Any]) -> None:
    name, path, right = checkpoint
    model = load(path, dtype="float32", backend=get("native", 1)).model
    packed = sum(isinstance(module, QuantizedLinear) for module in model.modules())
    assert packed == 8  # the projections of attention
    experts = [module for module in model.modules() if isinstance(module, ExpertWeights)]
    assert len(experts) == (0 if name == "gptq_apart" else 4)
    assert error(model, right) < 1e-4
    tensors = load_file(path / "model.safetensors")
    parts = (f"model.layers.1.mlp.experts.2.up_proj.{kind}" for kind in ("weight_packed", "qweight", "weight"))
    changed = next(tensors[part] for part in parts if part in tensors)
    changed.view(torch.uint8)[0] ^= 0x5A
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert error(load(path, dtype="float32", backend=get("native", 1)).model, right) > 1e-3
