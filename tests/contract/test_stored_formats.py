"""The contract of lamina.models.quantization.StoredFormat, run over a tiny checkpoint of every format.

Each was written by its format's own library (tests/checkpoints). Its oracle.json has the tokens and logits that
transformers computes in fp32 with the weights as that library unpacks them.

Covers: lamina/models/quantization/awq.py, lamina/models/quantization/compressed_tensors.py,
lamina/models/quantization/gptq.py,
lamina/models/quantization/grouped_codes.py, lamina/models/quantization/pack_weights.py,
lamina/models/quantization/quantized_linear.py, lamina/ops/gemm/quantized_op.py.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamina.models.convert import convert_model
from lamina.models.errors import ModelError
from lamina.models.load import load
from lamina.models.quantization.quantized_experts import ExpertWeights
from lamina.models.quantization.quantized_linear import QuantizedLinear
from lamina.ops.gemm import get
from lamina.ops.gemm.quantized import PackedForm
from lamina.ops.gemm.quantized_op import QUANTIZED_LINEAR_OP
from lamina.ops.rows import bind_rows, chain_slices
from lamina.ops.rows.program import ChainedSlice

pytestmark = pytest.mark.no_retry
CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/oracle.json"))
UNPACKED = {
    f"{family}_{form}"
    for family in ("llama", "qwen3_moe")
    for form in ("fp8_channel", "modelopt_fp8", "modelopt_fp8_channel")
}  # become numbers of the model's dtype
INT8_ROWS = {
    f"{family}_{form}" for family in ("llama", "qwen3_moe") for form in ("w8a8_dynamic", "w4a8")
}  # rows become int8 where weights are packed
REORDERED = {"llama_gptq_act", "llama_int4_act"}  # their layers pick numbers of rows, which torch does
BOUND = 1e-4  # of the spread of logits


def oracle(name: str) -> dict[str, Any]:
    known: dict[str, Any] = json.loads((CHECKPOINTS / name / "oracle.json").read_text())
    return known


def worst(model: Any, known: dict[str, Any]) -> float:
    """The difference of the logits of the last token, relative to their spread; infinite for other tokens."""
    prompt, tokens = known["prompt"], known["tokens"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    if logits.argmax(-1).tolist() != tokens:
        return float("inf")
    due = torch.tensor(known["logits"])
    return float((logits[-1, : len(due)] - due).abs().max() / logits[-1].std())


@pytest.mark.parametrize("entry", ["", "native", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_formats_own_library(name: str, entry: str) -> None:
    backend = get(entry, 1) if entry else None
    model = load(CHECKPOINTS / name, dtype="float32", backend=backend).model
    packed = sum(isinstance(module, QuantizedLinear) for module in model.modules())
    assert (packed > 0) == (bool(entry) and name not in UNPACKED)
    if name in INT8_ROWS and entry:
        layers = [module for module in model.modules() if isinstance(module, QuantizedLinear | ExpertWeights)]
        assert len(layers) == (14 if name.startswith("llama") else 4 + 2)
        assert all(PackedForm.decode(layer.form).int8_inputs for layer in layers)
        floats = load(CHECKPOINTS / name, dtype="float32", backend=backend, quantization_compute="float").model
        assert worst(floats, oracle(name)) > BOUND, "rows of floats would not be seen"
    if name in INT8_ROWS and not entry:
        return  # nothing is packed
    assert worst(model, oracle(name)) < BOUND
    (w,) = (p for n, p in model.named_parameters() if n == "model.layers.0.input_layernorm.weight")
    w.data[5] += 0.05
    assert worst(model, oracle(name)) > BOUND, "another weight would not be seen"


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.startswith("llama") and name not in UNPACKED | REORDERED]
)
def test_slices_of_packed_layers_are_native_programs(name: str) -> None:
    backend = get("native", 1)
    program = bind_rows(convert_model(load(CHECKPOINTS / name, backend=backend).model, max_model_len=64), backend)
    targets = [node.target for part in program.slices for node in part.module.graph.nodes]
    assert QUANTIZED_LINEAR_OP not in targets
    assert all(isinstance(part, ChainedSlice) for part in chain_slices(program).slices)


def changed(tmp_path: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(CHECKPOINTS / name, path := tmp_path / name)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    return path


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("entry", ["", "native"])
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama_int4_group", lambda t: t.pop(f"{UP}.weight_scale"), f"{UP}.weight_packed has no {UP}.weight_scale"),
        ("llama_int4_group", lambda t: t[f"{UP}.weight_scale"].fill_(torch.nan), f"{UP}.weight_scale has a scale that"),
        ("llama_int4_group", lambda t: t[f"{UP}.weight_scale"].zero_(), f"{UP}.weight_scale has a scale of zero"),
        (
            "llama_int4_group",
            lambda t: t.update({f"{UP}.weight_packed": t[f"{UP}.weight_packed"][:, :7]}),
            f"{UP}.weight_packed has 7 words and 2 groups in a row, which no scheme of config.json has",
        ),
        (
            "llama_int4_group",
            lambda t: t.update({f"{UP}.weight_packed": t[f"{UP}.weight_packed"][:64]}),
            rf"{UP}.weight_(shape|scale|packed)",
        ),
        (
            "llama_int4_zeros",
            lambda t: t.update({f"{UP}.weight_zero_point": t[f"{UP}.weight_zero_point"][:3]}),
            f"{UP}.weight_zero_point",
        ),
        ("llama_w8a8", lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"][:9]}), f"{UP}.weight_scale"),
        ("llama_gptq", lambda t: t.pop(f"{UP}.qzeros"), f"{UP}.qweight has no {UP}.qzeros: fetch the model again"),
        ("llama_gptq", lambda t: t[f"{UP}.scales"].fill_(torch.inf), f"{UP}.scales has a scale that is no finite"),
        ("llama_gptq", lambda t: t[f"{UP}.scales"].zero_(), f"{UP}.scales has a scale of zero"),
        (
            "llama_gptq",
            lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"][:7]}),
            rf"{UP}.scales \[2, 128\] does not fit {UP}.qweight \[7, 128\]",
        ),
        ("llama_gptq_int8", lambda t: t.update({f"{UP}.qzeros": t[f"{UP}.qzeros"][:, :9]}), f"{UP}.scales"),
        (
            "llama_gptq",
            lambda t: t[f"{UP}.g_idx"].copy_(t[f"{UP}.g_idx"].flip(0)),
            f"{UP}.g_idx orders inputs by activation, and config.json says that desc_act is false: set it to true",
        ),
        ("llama_gptq_act", lambda t: t[f"{UP}.g_idx"].fill_(2), f"{UP}.g_idx has no groups of one size"),
        ("llama_gptq_act", lambda t: t[f"{UP}.g_idx"].fill_(-1), f"{UP}.g_idx has no groups of one size"),
        (
            "llama_gptq_act",
            lambda t: t.update({f"{UP}.g_idx": t[f"{UP}.g_idx"].float()}),
            f"{UP}.g_idx is of torch.float32: whole numbers are read",
        ),
        ("llama_int4_act", lambda t: t[f"{UP}.weight_g_idx"].fill_(1), f"{UP}.weight_g_idx has no groups of one size"),
        (
            "llama_int4_act",
            lambda t: t.update({f"{UP}.weight_g_idx": t[f"{UP}.weight_g_idx"][:9]}),
            rf"{UP}.weight_g_idx \[9\] does not fit 64 inputs",
        ),
        (
            "llama_mxfp4",
            lambda t: t[f"{UP}.weight_scale"].fill_(255),
            f"{UP}.weight_scale has a scale that is no number",
        ),
    ],
)
def test_bad_tensors_are_refused_by_name(
    tmp_path: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object], words: str, entry: str
) -> None:
    path = changed(tmp_path, name, change)
    with pytest.raises(ModelError, match=words) as refused:
        load(path, backend=get(entry, 1) if entry else None)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", sorted(REORDERED))
def test_groups_with_inputs_of_all_ranks_become_numbers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Columns of such a weight are cut, and its inputs are not."""
    with caplog.at_level(logging.WARNING):
        model = load(CHECKPOINTS / name, dtype="float32", backend=get("native", 1), rank=0, size=2).model
    packed = [key for key, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    assert {key.rpartition(".")[2] for key in packed} == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    words = "o_proj.weight is not packed, but becomes numbers of --dtype: its groups have inputs of all ranks"
    assert words in caplog.text


def in_order(tensors: dict[str, torch.Tensor], *, unset: bool) -> None:
    """Stores the groups of inputs that are in order, or -1."""
    for name in (name for name in tensors if name.endswith("g_idx")):
        tensors[name] = torch.arange(len(tensors[name])).int() // 32
        if unset:
            tensors[name].fill_(-1)


@pytest.mark.parametrize(
    ("name", "unset"), [("llama_gptq_act", False), ("llama_int4_act", False), ("llama_int4_act", True)]
)
def test_groups_whose_inputs_are_in_order_need_none(tmp_path: Path, name: str, unset: bool) -> None:
    path = changed(tmp_path, name, lambda tensors: in_order(tensors, unset=unset))
    for size in (1, 2):
        model = load(path, dtype="float32", backend=get("native", 1), rank=0, size=size).model
        layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        assert layers
        assert all(layer.order is None for layer in layers)


EMBEDDINGS = "model.embed_tokens"


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_whose_groups_have_any_inputs_are_looked_up_in_order(
    tmp_path: Path, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def pack(tensors: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(0)
        rows, width = tensors.pop(f"{EMBEDDINGS}.weight").shape
        groups = (torch.arange(width) // 32)[torch.randperm(width)].int()
        tensors[f"{EMBEDDINGS}.weight_packed"] = torch.randint(-(2**31), 2**31, (rows, width // 8)).int()
        tensors[f"{EMBEDDINGS}.weight_scale"] = (0.03 + 0.03 * torch.rand(rows, width // 32)).bfloat16()
        tensors[f"{EMBEDDINGS}.weight_shape"] = torch.tensor([rows, width])
        tensors[f"{EMBEDDINGS}.weight_g_idx"] = groups
        if tied:
            tensors.pop("lm_head.weight")

    path = changed(tmp_path, "llama_int4_act", pack)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    ids, plain = torch.tensor([[3, 17, 90, 4]]), load(path, dtype="float32").model
    with caplog.at_level(logging.WARNING):
        packed = load(path, dtype="float32", backend=get("native", 1)).model
    with torch.no_grad():
        due = plain(ids).logits
        assert float((packed(ids).logits - due).abs().max() / due.std()) < BOUND
    assert f"{EMBEDDINGS}.weight is not packed, but becomes numbers of --dtype: groups of embeddings" in caplog.text


def test_biases_of_zeros_in_layers_without_biases(tmp_path: Path) -> None:
    """AutoGPTQ writes one for each quantised layer."""

    def add(tensors: dict[str, torch.Tensor], value: float) -> None:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            bias = torch.full((tensors[name].shape[1],), value).half()
            tensors[name.replace("qweight", "bias")] = bias

    path = changed(tmp_path / "zeros", "llama_gptq", lambda tensors: add(tensors, 0.0))
    assert worst(load(path, dtype="float32", backend=get("native", 1)).model, oracle("llama_gptq")) < BOUND
    path = changed(tmp_path / "ones", "llama_gptq", lambda tensors: add(tensors, 1.0))
    with pytest.raises(ModelError, match=r"does not use: model.layers.0.mlp.down_proj.bias and 13 more"):
        load(path, backend=get("native", 1))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "is quantised by bitsandbytes, which is not read: use a checkpoint of"),
        ({"quant_method": "exl3"}, "exl3, which is not read"),
        ({"quant_method": "aqlm"}, "aqlm, which is not read"),
        ({"quant_method": "awq", "bits": 3}, "awq: 3 bits"),
        ({"quant_method": "gptq", "bits": 3}, "gptq: 3 bits of the checkpoint_format gptq are not read: use 4 or 8"),
        ({"quant_method": "gptq", "bits": "4"}, "gptq: 4 bits"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "gptq: 4 bits of the checkpoint_format marlin are"),
        ({"quant_method": "gptq", "checkpoint_format": ["gptq"]}, "of the checkpoint_format"),
        ({"quant_method": "novel"}, r"unknown quantisation \(novel\)"),
        ("novel", r"unknown quantisation \(novel\)"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "the format marlin-24 is not read"),
        ({"quant_method": "fp8", "weight_block_size": 3}, "weight_block_size"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, settings: Any, words: str) -> None:
    shutil.copytree(CHECKPOINTS / NAMES[0], path := tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=words):
        load(path)
