"""Writes the tiny checkpoints of GPTQ in the folder above, with the tokens and logits that they must give.

    python tests/checkpoints/scripts/gptq_checkpoints.py PATH_OF_GPTQMODEL/gptqmodel/nn_modules/qlinear/__init__.py

takes that file of gptqmodel 7.7.0, whose PackableQuantLinear dequantises random words: its two methods that do so run
alone, as the package needs a GPU's torch. ``oracle.json`` has what transformers computes in fp32 with these weights.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from oracle import oracle
from published import (
    HERE,
    PREFIX,
    configuration,
    drawn_order,
    is_quantised,
    published,
    random_model,
    with_weights,
)  # fmt: skip
from safetensors.torch import save_file

GROUP = 32
# name -> bits, version, whether groups have any inputs
KINDS = {
    "gptq": (4, "gptq", False),
    "gptq_int8": (8, "gptq", False),
    "gptq_v2_int8": (8, "gptq_v2", False),
    "gptq_act": (4, "gptq_v2", True),
}


def methods(path: str) -> dict[str, Any]:
    """Returns the functions that dequantise, of gptqmodel's class."""
    (owner,) = (
        node
        for node in ast.parse(Path(path).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "PackableQuantLinear"
    )
    wanted = ("dequantize_weight", "_dequantize_from_codes")
    body = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    space: dict[str, Any] = {"t": torch, "_torch_right_shift": torch.bitwise_right_shift}
    exec(compile(ast.Module(body, []), path, "exec"), space)
    return {name: space[name] for name in wanted}


def dequantized(functions: dict[str, Any], bits: int, words: Any, zeros: Any, scales: Any, order: Any) -> torch.Tensor:
    """Returns the weight [K, N] as gptqmodel's second version has it."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    layer = SimpleNamespace(
        planar=False, bits=bits, maxq=2**bits - 1, pack_factor=32 // bits, dequant_dtype=torch.int32, qweight=words,
        qzeros=zeros, scales=scales, g_idx=order, in_features=len(order), wf_unsqueeze_zero=shifts.view(1, 1, -1),
        wf_unsqueeze_neg_one=shifts.view(1, -1, 1), _init_wf_unsqueeze_buffers=lambda: None,
    )  # fmt: skip
    for name, function in functions.items():
        setattr(layer, name, MethodType(function, layer))
    w: torch.Tensor = layer.dequantize_weight()
    return w


def write(name: str, functions: dict[str, Any], seed: int, *, experts: bool) -> bool:
    """Returns False if a token of this seed's model is a near tie."""
    bits, version, any_inputs = KINDS[name]
    model = random_model(seed, experts=experts)
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for key, w in published(model).items():
        if not is_quantised(key):
            numbers[key] = tensors[key] = w.half().contiguous()
            continue
        owner, (outputs, inputs) = key.removesuffix(".weight"), w.shape
        groups, count = inputs // GROUP, 32 // bits
        words = torch.randint(-(2**31), 2**31, (inputs // count, outputs)).int()
        middle = 2 ** (bits - 1) + torch.randint(-1, 2, (groups, outputs // count, count))
        places = torch.arange(0, 32, bits)
        zeros = (middle << places).sum(-1).int()
        order = torch.arange(inputs) // GROUP
        order = order[drawn_order(key, inputs)] if any_inputs else order
        scales = ((0.05 + 0.05 * torch.rand(groups, outputs)) * 16 / 2**bits).half()
        numbers[key] = dequantized(functions, bits, words, zeros, scales.float(), order).T
        stored = zeros if version == "gptq_v2" else ((middle - 1) << places).sum(-1).int()  # the first has one less
        tensors |= {f"{owner}.qweight": words, f"{owner}.qzeros": stored, f"{owner}.scales": scales}
        tensors |= {f"{owner}.g_idx": order.int()}
    path = HERE / f"{PREFIX[experts]}_{name}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    settings = {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version, "desc_act": any_inputs,
        "sym": False, "lm_head": False,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(configuration(model, "float16", settings), indent=1))
    known = oracle(with_weights(model, numbers))
    (path / "oracle.json").write_text(json.dumps(known))
    return known is not None


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        found = methods(sys.argv[1])
        for kind in (False, True):
            for case in KINDS:
                seeds = (seed for seed in range(100) if write(case, found, seed, experts=kind))
                print(PREFIX[kind], case, next(seeds))
