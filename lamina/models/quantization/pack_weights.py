"""Replaces linear layers and embeddings whose stored weights are quantised by layers that keep them packed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lamina.models.checkpoint import StoredWeight, stored_tensors, stored_weights
from lamina.models.errors import ModelError, UnsupportedModelError
from lamina.models.read_shard import StoredTensors
from lamina.models.tensor_parallel_shard import ShardedDim, ShardPlan
from lamina.models.weight_names import WeightNames, text_weights
from lamina.ops.gemm import LinearBackend

from . import INPUT_GROUPS, QuantizedTensor, Read, gguf_weights
from .gguf_file import is_gguf
from .grouped_codes import GroupedCodes
from .pack_experts import PackedExperts, Source, replace_experts
from .quantized_embedding import QuantizedEmbedding, is_table, scale_of
from .quantized_linear import QuantizedLinear
from .round_to_nearest import RoundToNearest

log = logging.getLogger(__name__)
_DTYPES = {
    "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8, "BF16": torch.bfloat16, "F16": torch.float16,
    "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool,
}  # fmt: skip


class PackedLayer(NamedTuple):
    """Layers that keep one weight packed: a linear layer, embeddings, or both; the stored weight, and a rank's part of
    it. ``is_only_use``: False if other embeddings have the same weight, as numbers.
    """

    layers: tuple[QuantizedLinear | QuantizedEmbedding, ...]
    weight: QuantizedTensor
    cut: ShardedDim | None
    shard: ShardPlan
    is_only_use: bool

    @property
    def stored(self) -> frozenset[str]:
        """The names of stored weights that nothing else reads."""
        return frozenset([self.weight.name] if self.is_only_use else [])

    def fill(self, read: Read, backend: LinearBackend) -> None:
        """Give the layers their packed weight. Raises ModelError."""
        codes = _part(self.weight, self.cut, self.shard, read)
        assert codes is not None  # as on the meta device
        packed = codes.for_kernels()
        assert packed is not None
        data, form = backend.pack_quantized(packed)
        for layer in self.layers:
            layer.data, layer.form = data, form
            if isinstance(layer, QuantizedLinear):
                layer.order = codes.order


def replace_layers(
    model: nn.Module,
    directory: Path,
    shard: ShardPlan,
    backend: LinearBackend,
    rounding: RoundToNearest | None = None,
    compute: str = "auto",
) -> list[PackedLayer | PackedExperts]:
    """Replace each linear layer, table of embeddings and expert of ``model``, on the meta device, whose stored weight
    ``backend`` can keep packed; the new ones have no contents yet. ``shard`` has shrunk the model. ``rounding``: of
    linear layers and experts that are stored as floats. ``compute``: of --quantization-compute. Raises
    UnsupportedModelError that names a weight which no cut leaves whole groups of.
    """
    stored = stored_weights(directory)
    if rounding is None and not any(w.quantized and (w.quantized.packed or w.quantized.experts) for w in stored):
        return []
    with ExitStack() as files:
        read = _on_meta(directory, cache(lambda: StoredTensors(directory, files)))
        return _replaced(model, stored, shard, backend, rounding, compute, read)


def _replaced(
    model: nn.Module,
    stored: Sequence[StoredWeight],
    shard: ShardPlan,
    backend: LinearBackend,
    rounding: RoundToNearest | None,
    compute: str,
    read: Read,
) -> list[PackedLayer | PackedExperts]:
    names, replaced = WeightNames(model), list[PackedLayer | PackedExperts]()
    experts: dict[str, list[Source]] = {}
    targets = [names.find(weight.name) for weight in stored]
    layers = _Matrices(model, {target.name for target in targets})
    for weight, (target, converter) in zip(stored, targets, strict=True):
        quantized = weight.quantized
        if quantized is None and rounding is not None and layers.reads_text(target):
            quantized = rounding.weight(weight, is_head=layers.is_head(target))
        quantized = quantized and quantized.computed(compute)
        if quantized is not None:
            experts.setdefault(target, []).append(Source(quantized, converter))
        if quantized is None or quantized.packed is None or converter is not None:
            continue
        owners, is_only_use = layers.owners(target, with_tables=weight.quantized is not None)
        cuts = {shard.sharded_dims.get(f"{name}.weight") for name in owners}
        if len(cuts) > 1:
            _log_unpacked(quantized, "ranks have other parts of the head than of the embeddings")
        if len(cuts) != 1:
            continue
        codes = _part(quantized, cut := cuts.pop(), shard, read)
        if codes is None:
            _log_unpacked(quantized, "its groups have inputs of all ranks (desc_act, actorder)")
            continue
        packed = codes.for_kernels()
        if packed is None:
            continue
        if codes.order is not None and layers.has_table(owners):
            _log_unpacked(quantized, "groups of embeddings have any inputs (desc_act, actorder)")
            continue
        idle = packed.codes.shape[1] - _inputs(quantized, cut, shard)
        own = layers.replace(owners, *backend.pack_quantized(packed), codes.order, idle)
        replaced.append(PackedLayer(own, quantized, cut, shard, is_only_use))
    return replaced + replace_experts(model, experts, shard, read, backend)


class _Matrices:
    """The linear layers and embeddings of a model, by the names of their weights. One weight may be that of the
    embeddings and of the layer that computes logits, the head: it has the embeddings' name.
    """

    def __init__(self, model: Any, targets: Collection[str]) -> None:
        """``targets``: what the stored weights become."""
        self._model, self._modules = model, dict(model.named_modules())
        self._text = {name for name, _ in text_weights(model)}
        head = model.get_output_embeddings()
        self._head = next((name for name, module in self._modules.items() if module is head), "")
        own, shared = f"{self._head}.weight", _shared_parameters(model)
        self._others = {name for names in shared if own in names for name in names} - {own}
        stored = {name for name in self._others if name in targets}
        self._tied = stored if own not in targets else set()
        self._not_alone = {name for names in shared for name in names} - ({own} if stored else set())

    def reads_text(self, target: str) -> bool:
        return target in self._text

    def is_head(self, target: str) -> bool:
        return target in self._tied or target == f"{self._head}.weight"

    def owners(self, target: str, *, with_tables: bool) -> tuple[list[str], bool]:
        """Return the names of the layers that may have a weight packed: a linear layer, and embeddings
        (``with_tables``); and whether no others have it. Other classes than torch's count if they scale embeddings.
        """
        is_tied = target in self._tied
        if not target.endswith(".weight") or (target in self._not_alone and not is_tied):
            return [], False
        names = [f"{self._head}.weight", *sorted(self._others)] if is_tied else [target]
        layers = {name.removesuffix(".weight"): self._modules.get(name.removesuffix(".weight")) for name in names}
        linear = [owner for owner, layer in layers.items() if type(layer) is nn.Linear]
        tables = [owner for owner, layer in layers.items() if is_table(layer)]
        if with_tables and len(linear) + len(tables) == len(names):
            return [*linear, *tables], True
        return linear[:1], not is_tied

    def has_table(self, owners: Sequence[str]) -> bool:
        return any(is_table(self._modules[owner]) for owner in owners)

    def replace(
        self, owners: Sequence[str], data: Tensor, form: str, order: Tensor | None, idle_inputs: int
    ) -> tuple[QuantizedLinear | QuantizedEmbedding, ...]:
        """Put layers of one packed weight into the places of ``owners``, whose weights are then those of no others."""
        made: list[QuantizedLinear | QuantizedEmbedding] = []
        for owner in owners:
            old = self._modules[owner]
            if is_table(old):
                made.append(QuantizedEmbedding(data, form, old.weight.dtype, scale_of(old)))
            else:
                order = None if order is None else order.to(data.device)
                made.append(QuantizedLinear(data, form, old._parameters["bias"], order, idle_inputs))
            parent, _, key = owner.rpartition(".")
            setattr(self._model.get_submodule(parent), key, made[-1])
        gone = {f"{owner}.weight" for owner in owners}
        tied = getattr(self._model, "all_tied_weights_keys", {})
        self._model.all_tied_weights_keys = {to: by for to, by in tied.items() if to not in gone}
        return tuple(made)


def _log_unpacked(weight: QuantizedTensor, why: str) -> None:
    log.warning("%s is not packed, but becomes numbers of --dtype: %s", weight.name, why)


def _part(weight: QuantizedTensor, cut: ShardedDim | None, shard: ShardPlan, read: Read) -> GroupedCodes | None:
    """Return a rank's part; None if it has inputs of groups that lie on all ranks. Raises UnsupportedModelError."""
    assert weight.packed is not None
    codes, part = weight.packed(read).without_idle_order(), shard.weight_shard
    if cut is not None:
        spans = cut.spans(part, codes.codes.shape[cut.dim])
        group = codes.group
        own = codes.inputs(spans) if cut.dim == -1 else codes.columns(spans)
        if own is None and codes.order is not None:
            return None
        if own is None:
            raise UnsupportedModelError(
                f"--tensor-parallel-size {part.size} cuts {weight.name} inside of its groups of {group} inputs: use "
                f"fewer ranks"
            )
        codes = own
        if cut.dim == -1 and codes.int8_inputs and part.size > 1:
            codes = _with_idle_inputs(weight, codes, part.size)
    return codes


def _with_idle_inputs(weight: QuantizedTensor, codes: GroupedCodes, ranks: int) -> GroupedCodes:
    if (own := codes.with_idle_inputs()) is None:
        raise UnsupportedModelError(
            f"--tensor-parallel-size {ranks} cuts {weight.name}, whose zero points by channel do not go with rows of "
            f"int8: use one rank, or leave activations floats"
        )
    return own


def _inputs(weight: QuantizedTensor, cut: ShardedDim | None, shard: ShardPlan) -> int:
    """Return the inputs of a rank's part of a weight."""
    sizes = list(weight.shape) if cut is None else cut.local_shape(shard.weight_shard, weight.shape)
    return int(sizes[-1])


def _on_meta(directory: Path, opened: Callable[[], StoredTensors]) -> Read:
    if is_gguf(directory):
        return gguf_weights.meta_reader(directory)
    headers = stored_tensors(directory)

    def read(name: str) -> Tensor:
        header = headers[name]
        if header.dtype not in _DTYPES:
            raise ModelError(f"{name} is {header.dtype}, which is not read: fetch the model again")
        if name.endswith(INPUT_GROUPS):
            return opened().read(name)
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
