"""fp8 and MXFP4 as DeepSeek-V3 and gpt-oss are published, with the weights as transformers' own functions unpack them.

Covers: lamina/models/quantization/fp8.py, lamina/models/quantization/mxfp4.py,
lamina/models/quantization/scaled_floats.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations import finegrained_fp8
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lamina import LLM, SamplingParams
from lamina.models.errors import ModelError
from lamina.models.load import load
from lamina.models.quantization.quantized_experts import ExpertWeights
from lamina.ops.gemm import get

if not hasattr(finegrained_fp8, "_dequantize_fp8_weight"):
    pytest.skip(f"transformers {transformers.__version__} has no oracle for blocks of fp8", allow_module_level=True)
pytestmark = pytest.mark.no_retry
PROMPT, TOKENS, BOUND = [3, 17, 29, 4, 56, 40, 8], 8, 1e-4
Tensors = dict[str, Tensor]


def fp8(block: list[int]) -> Callable[[str, Tensor], tuple[Tensors, Tensor]]:
    def store(name: str, w: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = (-(-n // b) for n, b in zip(w.shape, block, strict=True))
        scale = 0.001 + 0.01 * torch.rand(rows, columns)
        spread = scale.repeat_interleave(block[0], 0)[: w.shape[0]].repeat_interleave(block[1], 1)[:, : w.shape[1]]
        stored = (w / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        plain = finegrained_fp8._dequantize_fp8_weight(stored, scale, block, torch.float32)
        return {name: stored, f"{name}_scale_inv": scale}, plain

    return store


def mxfp4(name: str, w: Tensor) -> tuple[Tensors, Tensor]:
    experts, inputs, outputs = w.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(121, 124, blocks.shape[:3], dtype=torch.uint8)
    plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, plain


CASES: dict[str, tuple[str, Callable[[str, Tensor], tuple[Tensors, Tensor]], str, dict[str, Any]]] = {
    "deepseek": ("deepseek-v3", fp8([128, 128]), "_proj.weight", {"weight_block_size": [128, 128]}),
    "small-blocks": ("qwen3", fp8([24, 16]), "_proj.weight", {"weight_block_size": [24, 16]}),
    "gpt-oss": ("gpt-oss", mxfp4, "_proj", {"modules_to_not_convert": ["lm_head"]}),
}


def checkpoints(tmp_path: Path, case: str) -> tuple[Path, Any]:
    """A checkpoint in the format, and the model of transformers with the same weights."""
    family, store, ending, settings = CASES[case]
    known = next(f for f in FAMILIES if f.name == family)
    torch.manual_seed(3)
    plain, path = tmp_path / "plain", tmp_path / "quantised"
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


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    path, theirs = checkpoints(tmp_path, case)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        due = theirs(ids).logits
        found = load(path, dtype="float32").model(ids).logits
        packed = load(path, dtype="float32", backend=get("native", 1)).model
        kept = packed(ids).logits
    assert max(float((x - due).abs().max() / due.std()) for x in (found, kept)) < BOUND
    experts = [module for module in packed.modules() if isinstance(module, ExpertWeights)]
    assert len(experts) == (2 * theirs.config.num_hidden_layers if case == "gpt-oss" else 0)
    longer = theirs.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(path), dtype="float32", transport="loopback") as llm:
        (output,) = llm.generate([PROMPT], greedy)
    assert output.outputs[0].token_ids == longer[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("small-blocks", lambda name: name.endswith("up_proj.weight_scale_inv"), "up_proj.weight is fp8 and has no"),
        ("gpt-oss", lambda name: name.endswith("down_proj_scales"), "down_proj_blocks has no .*down_proj_scales"),
    ],
)
def test_a_missing_scale_is_refused_by_name(
    tmp_path: Path, case: str, change: Callable[[str], bool], words: str
) -> None:
    path, _ = checkpoints(tmp_path, case)
    tensors = load_file(path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not change(k)}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=words):
        load(path)
