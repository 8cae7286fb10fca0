"""fp8 and MXFP4 as DeepSeek-V3 and gpt-oss are published, with the weights as transformers' own functions unpack them.

Covers: lamina/models/quantization/fp8.py, lamina/models/quantization/mxfp4.py,
lamina/models/quantization/scaled_floats.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from float_checkpoints import CASES, HAS_ORACLE, PROMPT, write
from safetensors.torch import load_file, save_file

from lamina.models.errors import ModelError
from lamina.models.load import load
from lamina.models.quantization.quantized_experts import ExpertWeights
from lamina.ops.gemm import get

if not HAS_ORACLE:
    pytest.skip(f"transformers {transformers.__version__} has no oracle for blocks of fp8", allow_module_level=True)
pytestmark = pytest.mark.no_retry
BOUND = 1e-4


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    path, theirs = write(tmp_path, case)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        due = theirs(ids).logits
        found = load(path, dtype="float32").model(ids).logits
        packed = load(path, dtype="float32", backend=get("native", 1)).model
        kept = packed(ids).logits
    assert max(float((x - due).abs().max() / due.std()) for x in (found, kept)) < BOUND
    experts = [module for module in packed.modules() if isinstance(module, ExpertWeights)]
    assert len(experts) == (2 * theirs.config.num_hidden_layers if case == "gpt-oss" else 0)


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
    path, _ = write(tmp_path, case)
    tensors = load_file(path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not change(k)}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=words):
        load(path)
