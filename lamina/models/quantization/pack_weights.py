"""Replaces linear layers whose stored weights are quantised by layers that keep them packed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lamina.models.checkpoint import stored_tensors, stored_weights
from lamina.models.errors import ModelError, UnsupportedModelError
from lamina.models.tensor_parallel_shard import ShardedDim, ShardPlan
from lamina.models.weight_names import WeightNames, text_weights
from lamina.ops.gemm import LinearBackend

from . import QuantizedTensor, Read, gguf_weights
from .gguf_file import is_gguf
from .grouped_codes import GroupedCodes
from .pack_experts import PackedExperts, Source, replace_experts
from .quantized_linear import QuantizedLinear
from .round_to_nearest import RoundToNearest

_DTYPES = {
    "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8, "BF16": torch.bfloat16, "F16": torch.float16,
    "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool,
}  # fmt: skip


class PackedLayer(NamedTuple):
    """A layer that keeps its weight packed: the layer, the stored weight, and a rank's part of it. ``is_only_use``:
    False if embeddings have the same weight.
    """

    layer: QuantizedLinear
    weight: QuantizedTensor
    cut: ShardedDim | None
    shard: ShardPlan
    is_only_use: bool

    @property
    def stored(self) -> frozenset[str]:
        """The names of stored weights that nothing else reads."""
        return frozenset([self.weight.name] if self.is_only_use else [])

    def fill(self, read: Read, backend: LinearBackend) -> None:
        """Give the layer its packed weight. Raises ModelError."""
        codes = _part(self.weight, self.cut, self.shard, read)
        packed = codes.for_kernels()
        assert packed is not None  # as on the meta device
        self.layer.data, self.layer.form = backend.pack_quantized(packed)
        self.layer.order = codes.order


def replace_layers(
    model: nn.Module,
    directory: Path,
    shard: ShardPlan,
    backend: LinearBackend,
    rounding: RoundToNearest | None = None,
) -> list[PackedLayer | PackedExperts]:
    """Replace each linear layer of ``model``, on the meta device, whose stored weight ``backend`` can keep packed, and
    experts on one rank; the new ones have no contents yet. ``shard`` has shrunk the model. ``rounding``: of weights
    stored as floats. Raises UnsupportedModelError that names a weight which no cut leaves whole groups of.
    """
    stored = stored_weights(directory)
    if rounding is None and not any(w.quantized and (w.quantized.packed or w.quantized.experts) for w in stored):
        return []
    names, replaced, read = WeightNames(model), list[PackedLayer | PackedExperts](), _on_meta(directory)
    experts: dict[str, list[Source]] = {}
    targets = [names.find(weight.name) for weight in stored]
    layers = _Linears(model, {target.name for target in targets})
    for weight, (target, converter) in zip(stored, targets, strict=True):
        quantized = weight.quantized
        if quantized is None and rounding is not None and layers.reads_text(target):
            quantized = rounding.weight(weight, is_head=layers.is_head(target))
        owner = layers.owner(target)
        if quantized is not None:
            experts.setdefault(target, []).append(Source(quantized, converter))
        if quantized is None or quantized.packed is None or converter is not None or owner is None:
            continue
        bias, cut = model.get_submodule(owner)._parameters["bias"], shard.sharded_dims.get(f"{owner}.weight")
        codes = _part(quantized, cut, shard, read)
        packed = codes.for_kernels()
        if packed is None:
            continue
        layer = QuantizedLinear(*backend.pack_quantized(packed), bias, codes.order)
        layers.replace(owner, layer)
        replaced.append(PackedLayer(layer, quantized, cut, shard, is_only_use=target == f"{owner}.weight"))
    if shard.weight_shard.size == 1:
        replaced += replace_experts(model, experts, read, backend)
    return replaced


class _Linears:
    """The linear layers of a model, by the names of their weights. One weight may be that of the embeddings and of the
    layer that computes logits, the head: it has the embeddings' name.
    """

    def __init__(self, model: Any, targets: Collection[str]) -> None:
        """``targets``: what the stored weights become."""
        self._model, self._modules = model, dict(model.named_modules())
        self._text = {name for name, _ in text_weights(model)}
        head = model.get_output_embeddings()
        self._head = next((name for name, module in self._modules.items() if module is head), "")
        own, shared = f"{self._head}.weight", _shared_parameters(model)
        others = {name for names in shared if own in names for name in names} - {own}
        stored = {name for name in others if name in targets}
        self._tied = stored if own not in targets else set()
        self._not_alone = {name for names in shared for name in names} - ({own} if stored else set())

    def reads_text(self, target: str) -> bool:
        return target in self._text

    def is_head(self, target: str) -> bool:
        return target in self._tied or target == f"{self._head}.weight"

    def owner(self, target: str) -> str | None:
        """Return the name of the layer that multiplies by a weight; None if there is no plain one."""
        owner, _, kind = target.rpartition(".")
        if target in self._tied:
            owner = self._head
        elif kind != "weight" or target in self._not_alone:
            return None
        return owner if type(self._modules.get(owner)) is nn.Linear else None

    def replace(self, owner: str, layer: QuantizedLinear) -> None:
        """Put ``layer`` into a linear layer's place, whose weight is then that of no other module."""
        parent, _, key = owner.rpartition(".")
        setattr(self._model.get_submodule(parent), key, layer)
        tied = getattr(self._model, "all_tied_weights_keys", {})
        self._model.all_tied_weights_keys = {to: by for to, by in tied.items() if to != f"{owner}.weight"}


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


def _shared_parameters(model: Any) -> list[set[str]]:
    """Return sets of names of weights that several modules have, such as tied embeddings. A model that was shrunk has
    their names alone.
    """
    names: dict[int, set[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), set()).add(name)
    by_source: dict[str, set[str]] = {}
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        by_source.setdefault(source, {source}).add(name)
    return [same for same in (*names.values(), *by_source.values()) if len(same) > 1]
