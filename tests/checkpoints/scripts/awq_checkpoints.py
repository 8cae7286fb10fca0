"""Writes the tiny checkpoints of AWQ in the folder above, with the tokens and logits that they must give.

    python tests/checkpoints/scripts/awq_checkpoints.py PATH_OF_AUTOAWQ/awq/utils/packing_utils.py

takes that file of autoawq 0.2.9, which dequantises random words. ``oracle.json`` has what transformers computes in fp32
with these weights.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from typing import Any

import torch
from oracle import oracle
from published import HERE, PREFIX, configuration, is_quantised, published, random_model, with_weights
from safetensors.torch import save_file

GROUP = 32


def write(dequantize: Any, seed: int, *, experts: bool) -> bool:
    """Returns False if a token of this seed's model is a near tie."""
    model = random_model(seed, experts=experts)
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for key, w in published(model).items():
        if not is_quantised(key):
            numbers[key] = tensors[key] = w.half().contiguous()
            continue
        owner, (outputs, inputs) = key.removesuffix(".weight"), w.shape
        words = torch.randint(-(2**31), 2**31, (inputs, outputs // 8), dtype=torch.int64).int()
        zeros = torch.full((inputs // GROUP, outputs // 8), 0x77778787, dtype=torch.int64)
        scales = (0.05 + 0.05 * torch.rand(inputs // GROUP, outputs)).half()
        tensors |= {f"{owner}.qweight": words, f"{owner}.qzeros": zeros.int(), f"{owner}.scales": scales}
        numbers[key] = dequantize(words, zeros.int(), scales.float(), 4, GROUP).T
    path = HERE / f"{PREFIX[experts]}_awq"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    settings = {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": ["mlp.gate"] if experts else None,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(configuration(model, "float16", settings), indent=1))
    known = oracle(with_weights(model, numbers))
    (path / "oracle.json").write_text(json.dumps(known))
    return known is not None


if __name__ == "__main__":
    torch.set_num_threads(1)
    library = runpy.run_path(sys.argv[1])
    for kind in (False, True):
        print(next(seed for seed in range(100) if write(library["dequantize_gemm"], seed, experts=kind)))
