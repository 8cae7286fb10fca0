"""Reads a rank's part of a checkpoint: of each weight only the bytes that the rank keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention_routing import WHOLE_MODEL, WeightShard
from .checkpoint import QUANTIZED, stored_weights, weight_files
from .errors import ModelError, UnsupportedModelError
from .quantization import QuantizedTensor, Read, gguf_weights
from .quantization.gguf_file import is_gguf
from .tensor_parallel_shard import ShardedDim, ShardPlan
from .weight_names import FLOATS, WeightNames, name_first, text_weights
from .weight_pages import unmap_pages

# Conversions of weights during reading after which each weight can be cut by itself.
_SPREADS = {"MergeModulelist", "Concatenate"}


WHOLE = ShardPlan(WHOLE_MODEL, {}, {})  # of a model that one rank has


class WeightBytes(NamedTuple):
    """The bytes of a rank's weights: mapped ones, in the pages of their files that all readers share, and copied
    ones.
    """

    mapped: int
    copied: int


class WeightRead(NamedTuple):
    """The way to read a stored weight: it becomes ``target`` or a part of it. ``sharded_dim``: None for all of it."""

    target: str
    sharded_dim: ShardedDim | None
    copied: bool


class LazySlice:
    """A part of a weight in a file, read by ``[...]``: mapped if it is contiguous, else copied."""

    def __init__(self, stored: Any, cut: ShardedDim, part: WeightShard) -> None:
        """``stored``: safetensors' slice of the whole weight."""
        self._stored, self._cut, self._part = stored, cut, part

    def __getitem__(self, index: Any) -> Tensor:
        shape = self._stored.get_shape()
        spans = self._cut.spans(self._part, shape[self._cut.dim])
        before = (slice(None),) * (len(shape) + self._cut.dim)
        pieces = [self._stored[(*before, span)] for span in spans]
        part = pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, self._cut.dim)
        if part.data_ptr() != pieces[0].data_ptr():
            for x in pieces:  # copied; other readers of these pages have their own mapping
                unmap_pages(x)
        return part


class DequantizedWeight:
    """A quantised weight in its files, whose values in fp32 are computed by ``[...]``, as of a safetensors slice."""

    def __init__(self, weight: QuantizedTensor, read: Read) -> None:
        self._weight, self._read = weight, read

    def get_shape(self) -> list[int]:
        return list(self._weight.shape)

    def get_dtype(self) -> str:
        return QUANTIZED

    def __getitem__(self, index: Any) -> Tensor:
        return self._weight.values(self._read)[index]


class StoredTensors:
    """The tensors of a checkpoint's open files. ``mapped``, ``passing``: slices by name, in two mappings of each file.
    Tensors of the first stay mapped. The second is for those that are copied: its pages are unmapped at the end.
    """

    def __init__(self, directory: Path, files: contextlib.ExitStack) -> None:
        """Opens the files until ``files`` ends. Raises SafetensorError, OSError."""
        from safetensors import safe_open

        self.mapped: dict[str, Any] = {}
        self.passing: dict[str, Any] = {}
        self.read: Read = self._whole
        if is_gguf(directory):
            self.read = gguf_weights.tensor_reader(directory)
            return
        for file in weight_files(directory):
            for slices in (self.mapped, self.passing):
                opened = files.enter_context(safe_open(file, framework="pt"))
                slices.update((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 - it is no mapping

    def _whole(self, name: str) -> Tensor:
        tensor: Tensor = self.passing[name][...] if self.passing[name].get_shape() else self.passing[name][()]
        return tensor


def read_shard(
    model: nn.Module, directory: Path, shard: ShardPlan, dtype: torch.dtype, tensors: StoredTensors,
    without: Collection[str] = (),
) -> None:  # fmt: skip
    """Fill a model on the meta device that ``shard`` has shrunk. ``without``: names of stored weights that are not
    read. Raises ModelError, SafetensorError, OSError.
    """
    from transformers.modeling_utils import LoadStateDictConfig

    # This repeats from_pretrained, which accepts no weights of other shapes than the configuration's.
    loading: Any = model
    cut = _ShardReader(model, shard)
    config = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=loading._get_dtype_plan(dtype),
        weight_mapping=cut.names.mapping,
        use_safetensors=True,
    )
    weights = (w for w in stored_weights(directory) if w.name not in without)
    sliced = {w.name: cut(w.name, *_sources(w.name, w.quantized, tensors)) for w in weights}
    info, _ = loading._load_pretrained_model(model, sliced, None, config)
    if wrong := sorted(info.mismatched_keys):
        name, got, expected = wrong[0]
        raise ModelError(f"{directory}: {name} is {list(got)} instead of {list(expected)} on each rank")
    info = loading._finalize_model_loading(model, config, info)
    if missing := sorted(info.missing_keys):
        raise ModelError(f"{directory} lacks weights of {type(model).__name__}: {name_first(missing)}")


def _sources(name: str, quantized: QuantizedTensor | None, tensors: StoredTensors) -> tuple[Any, Any]:
    if quantized is None:
        return tensors.mapped[name], tensors.passing[name]
    values = DequantizedWeight(quantized, tensors.read)
    return values, values


class _ShardReader:
    """Reads of each stored weight what ``shard`` has of the weight that it becomes."""

    def __init__(self, model: nn.Module, shard: ShardPlan) -> None:
        self.names = WeightNames(model)
        self._shard = shard

    def __call__(self, name: str, mapped: Any, passing: Any) -> Any:
        """Return the part of a weight to read. ``mapped``, ``passing``: the weight in two mappings of its file."""
        read = self.read(name, mapped.get_dtype(), len(mapped.get_shape()))
        source = passing if read.copied else mapped
        return source if read.sharded_dim is None else LazySlice(source, read.sharded_dim, self._shard.weight_shard)

    def read(self, name: str, dtype: str, ndim: int) -> WeightRead:
        """Return the way to read the stored weight ``name``. ``dtype``: by safetensors' name."""
        target, converter = self.names.find(name)
        cut, becomes = self._shard.sharded_dims.get(target), self.names.tensors.get(target)
        copied = converter is not None or (becomes is not None and FLOATS.get(dtype) != becomes.dtype)
        if cut is None:
            return WeightRead(target, None, copied)
        if converter is not None:
            if strange := {type(op).__name__ for op in converter.operations} - _SPREADS:
                raise UnsupportedModelError(
                    f"--tensor-parallel-size: {name} is converted by {strange.pop()} when it is read, and cannot be cut"
                )
            if cut.ranges:
                raise UnsupportedModelError(
                    f"--tensor-parallel-size: {name} becomes a part of {target}, and cannot be cut"
                )
            if len(converter.source_patterns) == cut.pieces:
                cut = ShardedDim(cut.dim)  # the pieces are separate weights
        return WeightRead(target, cut, copied or cut.is_scattered or cut.dim + ndim > 0)


def weight_bytes(model: nn.Module, directory: Path, shard: ShardPlan | None = None) -> WeightBytes:
    """Return the bytes of a model whose weights are read from ``directory``; of mapped ones, those for texts. Reads
    headers alone. The model is on the meta device; ``shard`` has shrunk it, if given.
    """
    cutter = _ShardReader(model, shard or WHOLE)
    reads = [cutter.read(w.name, w.dtype, len(w.shape)) for w in stored_weights(directory)]
    copied_names = {read.target for read in reads if read.copied}
    names: dict[int, set[str]] = {}  # all names of weights that are tied
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), set()).add(name)
    mapped, copied, read = 0, sum(b.nbytes for b in model.buffers()), {id(weight) for _, weight in text_weights(model)}
    for weight in model.parameters():
        if names[id(weight)] & copied_names:
            copied += weight.nbytes
        elif id(weight) in read:
            mapped += weight.nbytes
    return WeightBytes(mapped, copied)
