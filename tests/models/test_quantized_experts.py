"""Mixtures of experts whose experts are stored with few bits: they compute what transformers does in fp32 with weights
that the published formulas give, number by number.

Covers: lamina/models/quantization/pack_experts.py, lamina/models/quantization/quantized_experts.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
GROUP, SIZE = 32, {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16, "vocab_size": 160}
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


def awq(outputs: int, inputs: int) -> tuple[Stored, list[list[float]]]:
    groups = inputs // GROUP
    stored = {"qweight": words(inputs, outputs // 8), "qzeros": words(groups, outputs // 8)}
    stored["scales"] = scales(groups, outputs)
    q, z, s = (stored[name].tolist() for name in ("qweight", "qzeros", "scales"))

    def at(packed: list[list[int]], row: int, n: int) -> int:
        return nibble(packed, row, n // 8 * 8 + AWQ_ORDER.index(n % 8))

    w = [[s[k // GROUP][n] * (at(q, k, n) - at(z, k // GROUP, n)) for k in range(inputs)] for n in range(outputs)]
    return stored, w


def gptq(bits: int, added: int, *, mixed: bool) -> Callable[[int, int], tuple[Stored, list[list[float]]]]:
    def made(outputs: int, inputs: int) -> tuple[Stored, list[list[float]]]:
        groups, count = inputs // GROUP, 32 // bits
        stored = {"qweight": words(inputs // count, outputs), "qzeros": words(groups, outputs // count)}
        stored["scales"] = (scales(groups, outputs).float() * 16 / 2**bits).half()
        of = torch.arange(inputs) // GROUP
        stored["g_idx"] = (of[torch.randperm(inputs)] if mixed else of).int()
        q, z, s = stored["qweight"].T.tolist(), stored["qzeros"].tolist(), stored["scales"].tolist()
        of = stored["g_idx"].tolist()
        w = [
            [s[of[k]][n] * (nibble(q, n, k, bits) - nibble(z, of[k], n, bits) - added) for k in range(inputs)]
            for n in range(outputs)
        ]
        return stored, w

    return made


def int4(outputs: int, inputs: int) -> tuple[Stored, list[list[float]]]:
    """compressed-tensors, pack-quantized and symmetric."""
    stored = {"weight_packed": words(outputs, inputs // 8), "weight_scale": scales(outputs, inputs // GROUP)}
    stored["weight_shape"] = torch.tensor([outputs, inputs])
    q, s = stored["weight_packed"].tolist(), stored["weight_scale"].tolist()
    return stored, [[s[n][k // GROUP] * (nibble(q, n, k) - 8) for k in range(inputs)] for n in range(outputs)]


WEIGHTS = {"num_bits": 4, "group_size": GROUP, "strategy": "group", "symmetric": True, "type": "int"}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (gptq(4, 1, mixed=False), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq_v2": (
        gptq(4, 0, mixed=False),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "gptq_8": (gptq(8, 1, mixed=False), {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
    "gptq_act": (gptq(4, 1, mixed=True), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "int4": (
        int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
        },
    ),
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
            stored, numbers = make(*w.shape)
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
    assert len(experts) == (0 if name == "gptq_act" else 4)
    assert error(model, right) < 1e-4
    tensors = load_file(path / "model.safetensors")
    kind = "weight_packed" if name == "int4" else "qweight"
    tensors[f"model.layers.1.mlp.experts.2.up_proj.{kind}"][0] ^= 0x00F00F00
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert error(load(path, dtype="float32", backend=get("native", 1)).model, right) > 1e-3
