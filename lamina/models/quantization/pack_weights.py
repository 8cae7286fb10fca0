"""Replaces linear layers whose stored weights are quantised by layers that keep them packed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lamina.models.checkpoint import stored_tensors, stored_weights
from lamina.models.errors import ModelError, UnsupportedModelError
from lamina.models.tensor_parallel_shard import ShardedDim, ShardPlan
from lamina.models.weight_names import WeightNames
from lamina.ops.gemm import LinearBackend

from . import QuantizedTensor, Read, gguf_weights
from .gguf_file import is_gguf
from .grouped_codes import GroupedCodes
from .quantized_linear import QuantizedLinear

_DTYPES = {
    "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8, "BF16": torch.bfloat16, "F16": torch.float16,
    "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool,
}  # fmt: skip


class PackedLayer(NamedTuple):
    """A layer that keeps its weight packed: the layer, the stored weight, and a rank's part of it."""

    layer: QuantizedLinear
    weight: QuantizedTensor
    cut: ShardedDim | None


def replace_layers(model: nn.Module, directory: Path, shard: ShardPlan, backend: LinearBackend) -> list[PackedLayer]:
    """Replace each linear layer of ``model``, on the meta device, whose stored weight ``backend`` can keep packed; the
    new ones have no contents yet. ``shard`` has shrunk the model. Raises UnsupportedModelError that names a weight
    which no cut leaves whole groups of.
    """
    stored = {w.name: w for w in stored_weights(directory)}
    if not any(w.quantized and w.quantized.packed for w in stored.values()):
        return []
    names, modules, replaced = WeightNames(model), dict(model.named_modules()), list[PackedLayer]()
    read = _on_meta(directory)
    shared = _shared_parameters(model)
    for weight in stored.values():
        if weight.quantized is None or weight.quantized.packed is None:
            continue
        target, converter = names.find(weight.name)
        owner, _, kind = target.rpartition(".")
        linear = modules.get(owner)
        if converter is not None or kind != "weight" or type(linear) is not nn.Linear or target in shared:
            continue
        cut = shard.sharded_dims.get(target)
        codes = _part(weight.quantized, cut, shard, read)
        packed = codes.for_kernels()
        if packed is None:
            continue
        data, form = backend.pack_quantized(packed)
        layer = QuantizedLinear(data, form, linear.bias, codes.order)
        parent, _, key = owner.rpartition(".")
        setattr(model.get_submodule(parent), key, layer)
        replaced.append(PackedLayer(layer, weight.quantized, cut))
    return replaced


def fill(layers: list[PackedLayer], shard: ShardPlan, read: Read, backend: LinearBackend) -> None:
    """Give each layer its packed weight, one after the other. Raises ModelError."""
    for layer, weight, cut in layers:
        codes = _part(weight, cut, shard, read)
        packed = codes.for_kernels()
        assert packed is not None  # as on the meta device
        layer.data, layer.form = backend.pack_quantized(packed)
        layer.order = codes.order


def _part(weight: QuantizedTensor, cut: ShardedDim | None, shard: ShardPlan, read: Read) -> GroupedCodes:
    assert weight.packed is not None
    codes, part = weight.packed(read), shard.weight_shard
    if cut is not None:
        spans = cut.spans(part, codes.codes.shape[cut.dim])
        group = codes.group
        own = codes.inputs(spans) if cut.dim == -1 else codes.columns(spans)
        if own is None and codes.order is not None:
            raise UnsupportedModelError(
                f"--tensor-parallel-size {part.size} cuts {weight.name}, whose groups have inputs of all ranks "
                f"(desc_act): use one rank, or a checkpoint without desc_act"
            )
        if own is None:
            raise UnsupportedModelError(
                f"--tensor-parallel-size {part.size} cuts {weight.name} inside of its groups of {group} inputs: use "
                f"fewer ranks"
            )
        codes = own
    return codes


def _on_meta(directory: Path) -> Read:
    if is_gguf(directory):
        return gguf_weights.meta_reader(directory)
    headers = stored_tensors(directory)

    def read(name: str) -> Tensor:
        header = headers[name]
        if header.dtype not in _DTYPES:
            raise ModelError(f"{name} is {header.dtype}, which is not read: fetch the model again")
        return torch.empty(header.shape, dtype=_DTYPES[header.dtype], device="meta")

    return read


def _shared_parameters(model: nn.Module) -> set[str]:
    """Return the names of weights that several modules have, such as tied embeddings."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return {name for same in names.values() if len(same) > 1 for name in same}
