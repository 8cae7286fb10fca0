"""Writes the tiny checkpoints of compressed-tensors in the folder above, with what they must give.

    python tests/checkpoints/scripts/compressed_tensors_checkpoints.py

needs the package compressed-tensors (0.20), which tests do not. It compresses a model with random weights and unpacks
each file by its own library. ``oracle.json`` has what transformers computes in fp32 with these weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from oracle import oracle
from published import HERE, PREFIX, UNQUANTISED, configuration, is_quantised, published, random_model, with_weights
from safetensors.torch import save_file

# name -> format, and arguments of the weights' quantization
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4_group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}),
    "int4_zeros": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    "int4_channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": True}),
    "int8_channel": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    "int8_zeros": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": False}),
    "w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}  # fmt: skip
CASES["w8a8_dynamic"] = CASES["w8a8"]
CASES["w4a8"] = CASES["int4_group"]
ACTIVATIONS = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
WITH_ACTIVATIONS = ("w8a8_dynamic", "w4a8")


@contextmanager
def rounded_inputs(model: torch.nn.Module, seed: int | None = None) -> Iterator[None]:
    """Has layers of few bits round their rows to int8 as the library does, in fp32. ``seed``: of errors in the rows'
    last bits.
    """
    args, plain = QuantizationArgs(**ACTIVATIONS), torch.nn.functional.linear
    own = {w.untyped_storage().data_ptr() for name, w in model.named_parameters() if "_proj" in name}
    noise = torch.Generator().manual_seed(seed or 0)

    def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        if w.untyped_storage().data_ptr() not in own:
            return plain(x, w, b)
        if seed is not None:
            x = x * (1 + 2.0**-24 * torch.randn(x.shape, generator=noise))
        rows = x.reshape(1, -1, x.shape[-1])  # the library gives all rows of two dimensions one scale
        rounded = fake_quantize(rows, *compute_dynamic_scales_and_zp(rows, args, model), args)
        return plain(rounded.view_as(x), w, b)

    torch.nn.functional.linear = linear
    try:
        yield
    finally:
        torch.nn.functional.linear = plain


def is_steady(model: torch.nn.Module, known: dict[str, Any]) -> bool:
    """Returns whether errors in last bits leave the answers as they are. They may make -127 of -128, and the reverse:
    a row's lowest number lies between, if its magnitude is the largest.
    """
    for seed in range(16):
        with rounded_inputs(model, seed):
            other = oracle(model)
        if other is None or other["tokens"] != known["tokens"]:
            return False
        if not torch.allclose(torch.tensor(other["logits"]), torch.tensor(known["logits"]), rtol=0, atol=1e-4):
            return False
    return True


def scales_of(w: torch.Tensor, args: QuantizationArgs, name: str) -> dict[str, torch.Tensor]:
    """Returns the parameters that quantize w, as a calibration would find them."""
    group = args.group_size or w.shape[1]
    parts = w.unflatten(1, (-1, group))
    most = parts.abs().amax(-1)
    if name == "nvfp4":
        whole = torch.tensor([448.0 * 6.0]) / w.abs().max()
        return {"weight_scale": (most / 6.0 * whole).to(torch.float8_e4m3fn).float(), "weight_global_scale": whole}
    if name == "mxfp4":
        return {"weight_scale": torch.exp2(torch.floor(torch.log2(most / 4.0)))}
    top = 448.0 if args.type == "float" else float((1 << (args.num_bits - 1)) - 1)
    if args.symmetric:
        return {"weight_scale": (most / top).bfloat16()}
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / ((1 << args.num_bits) - 1)).bfloat16()
    zero = (-(1 << (args.num_bits - 1)) - low / scale.float()).round().clamp(-(1 << (args.num_bits - 1)), top)
    return {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}


def unpacked(stored: dict[str, torch.Tensor], compressor: Any, scheme: QuantizationScheme) -> torch.Tensor:
    """Returns the weight by the library. Scales in fp32 keep its products from being rounded to bf16."""
    if (scales := stored["weight_scale"]).dtype == torch.float8_e4m3fn:
        rows, half = stored["weight_packed"].shape
        codes = unpack_fp4_from_uint8(stored["weight_packed"], rows, 2 * half, torch.float32)
        whole = stored["weight_global_scale"]
        return dequantize(codes, scales.float(), args=scheme.weights, dtype=torch.float32, global_scale=whole)
    wide = {k: v.float() if k == "weight_scale" and v.dtype == torch.bfloat16 else v for k, v in stored.items()}
    weight: torch.Tensor = compressor.decompress(wide, scheme)["weight"]
    return weight.float()


def write(name: str, form: str, args: dict[str, Any], seed: int, *, experts: bool) -> bool:
    """Returns False if a token of this seed's model is a near tie, or a number of experts' rows."""
    model = random_model(seed, experts=experts)
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for key, exact in published(model).items():
        owner, w = key.removesuffix(".weight"), exact.bfloat16().float()
        if not is_quantised(key):
            numbers[key] = tensors[key] = w.bfloat16().contiguous()
            continue
        stored = compressor.compress({"weight": w, **scales_of(w, weights, name)}, scheme)
        stored = {k: v.detach().contiguous() for k, v in stored.items()}
        tensors |= {f"{owner}.{k}": v for k, v in stored.items()}
        numbers[key] = unpacked(stored, compressor, scheme)
    path = HERE / f"{PREFIX[experts]}_{name}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    activations = ACTIVATIONS if name in WITH_ACTIVATIONS else None
    settings = {
        "quant_method": "compressed-tensors", "format": form, "ignore": UNQUANTISED if experts else UNQUANTISED[:1],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": activations}},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(configuration(model, "bfloat16", settings), indent=1))
    exact = with_weights(model, numbers)
    with rounded_inputs(exact) if name in WITH_ACTIVATIONS else nullcontext():
        known = oracle(exact)
    (path / "oracle.json").write_text(json.dumps(known))
    return known is not None and (name not in WITH_ACTIVATIONS or not experts or is_steady(exact, known))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case, (form, args) in CASES.items():  # or those that are named
        for kind in (False, True):
            if not sys.argv[1:] or case in sys.argv[1:]:
                print(case, next(seed for seed in range(100) if write(case, form, args, seed, experts=kind)))
