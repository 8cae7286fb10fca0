"""Writes the tiny exports of modelopt in the folder above, with the tokens and logits that they must give.

    python tests/checkpoints/scripts/modelopt_checkpoints.py

needs the package nvidia-modelopt (0.47), which tests do not. It quantises a model with random weights, exports it, and
dequantises each stored tensor by its own classes. ``oracle.json`` has what transformers computes in fp32 with these
weights: it reads the files themselves wrongly.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from oracle import PROMPT, oracle
from published import HERE, PREFIX, published, random_model, with_weights
from safetensors.torch import load_file

CASES = {
    "modelopt_fp8": mtq.FP8_DEFAULT_CFG,
    "modelopt_fp8_channel": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "modelopt_nvfp4": mtq.NVFP4_DEFAULT_CFG,
}


def dequantised(name: str, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the weight ``name`` of an export in fp32."""
    w, owner = stored[name], name.removesuffix(".weight")
    plain: torch.Tensor = w.float()
    if w.dtype == torch.float8_e4m3fn:
        scale = stored[f"{owner}.weight_scale"].float()
        scale = scale[:, None] if scale.dim() == 1 else scale
        plain = FP8QTensor(w.shape, torch.float32, w).dequantize(scale=scale)
    elif w.dtype == torch.uint8:
        shape = torch.Size([w.shape[0], 2 * w.shape[1]])
        scales = {"scale": stored[f"{owner}.weight_scale"], "double_scale": stored[f"{owner}.weight_scale_2"].float()}
        plain = NVFP4QTensor(shape, torch.float32, w).dequantize(block_sizes={-1: 16}, **scales)
    return plain


def write(name: str, settings: dict[str, Any], seed: int, *, experts: bool) -> bool:
    """Returns False if a token of this seed's model is a near tie."""
    model = random_model(seed, experts=experts).bfloat16()
    names = [*published(model)]
    path = HERE / f"{PREFIX[experts]}_{name}"
    shutil.rmtree(path, ignore_errors=True)
    quantised = mtq.quantize(model, copy.deepcopy(settings), lambda module: module(torch.tensor([PROMPT])))
    export_hf_checkpoint(quantised, dtype=torch.bfloat16, export_dir=path)
    for file in Path(path).iterdir():
        if file.name not in ("config.json", "hf_quant_config.json", "model.safetensors"):
            file.unlink()
    stored = load_file(path / "model.safetensors")
    numbers = {each: dequantised(each, stored) for each in names}
    known = oracle(with_weights(random_model(seed, experts=experts), numbers))
    (path / "oracle.json").write_text(json.dumps(known))
    return known is not None


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case, config in CASES.items():
        for kind in (False, True):
            print(case, next(seed for seed in range(100) if write(case, config, seed, experts=kind)))
