"""The configuration and the weights in a GGUF file.

Formats of blocks come from the package gguf. Names and architectures come from tables of transformers. Nothing in a
file chooses code.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.models.errors import ModelError, UnsupportedModelError
from lamina.models.model_files import check_counts, one_line

from . import QuantizedTensor, Read
from .gguf_blocks import PACKED, grouped_codes
from .gguf_file import check_file, parts_of
from .grouped_codes import GroupedCodes, joined

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MOST_ITEMS = 10_000  # of an array that has a value for each layer; larger ones are vocabularies
_TOKENS = "tokenizer.ggml.tokens"
_LOCK = threading.Lock()  # held by each reader of gguf.GGUFReader, which _settings replaces for a time
_CHECKED = 1 << 20  # numbers at once
_SIZES_OF_EXPERTS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def read_config(path: Path) -> Any:
    """Return the configuration in a file, of an architecture that transformers can read. Raises ModelError."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    settings = dict(_settings(path, _stamp(path)))
    kind = settings.pop("model_type", None)
    if kind not in CONFIG_MAPPING_NAMES:
        raise UnsupportedModelError(f"{path}: transformers has no architecture {kind!r}")
    check_counts(str(path), settings)
    try:
        known = AutoConfig.for_model(kind)
        settings |= {name: size for name, size in _sizes_of_experts(path).items() if hasattr(known, name)}
        config = AutoConfig.for_model(kind, **settings)
    except Exception as error:  # any class, as architectures have their own checks
        raise ModelError(f"{path} has no valid configuration: {one_line(error)}") from error
    kinds = {tensor.tensor_type.name for tensor in _reader(path, _stamp(path)).tensors if len(tensor.shape) > 1}
    plain = [FLOATS[name] for name in FLOATS if name in kinds] if kinds <= FLOATS.keys() else []
    config.dtype = plain[0] if len(plain) == 1 else torch.bfloat16
    return config


def _sizes_of_experts(path: Path) -> dict[str, int]:
    """Return what transformers does not read of a file: without it, experts have the sizes of the first such model."""
    fields = _reader(path, _stamp(path)).fields
    architecture = fields["general.architecture"].contents()
    known = {name: fields.get(f"{architecture}.{field}") for field, name in _SIZES_OF_EXPERTS.items()}
    return {name: int(field.contents()) for name, field in known.items() if field is not None}


def stored_weights(path: Path) -> list[QuantizedTensor]:
    """Return the weights in a file by the names that transformers' model has for them. Raises ModelError."""
    return list(_weights(path, _stamp(path)))


def tensor_reader(path: Path) -> Read:
    """Return a function that reads a tensor of the file: floats, or bytes [..., bytes of a row] of blocks."""
    tensors = {tensor.name: tensor for tensor in _reader(path, _stamp(path)).tensors}
    return lambda name: _bytes_of(tensors[name])


def meta_reader(path: Path) -> Read:
    """Return the same function for tensors on the meta device."""
    tensors = {tensor.name: tensor for tensor in _reader(path, _stamp(path)).tensors}

    def read(name: str) -> Tensor:
        stored = tensors[name].data
        return torch.empty(stored.shape, dtype=torch.from_numpy(stored[:0].copy()).dtype, device="meta")

    return read


Stamp = tuple[tuple[int, int, int], ...]


class _Header(NamedTuple):
    """The header of a file, or of all its parts: fields of the first part by name, and all tensors, as gguf's."""

    fields: Mapping[str, Any]
    tensors: Sequence[Any]


def _stamp(path: Path) -> Stamp:
    check_file(path)
    states = [part.stat() for part in parts_of(path)]
    return tuple((state.st_ino, state.st_size, state.st_mtime_ns) for state in states)


@lru_cache(maxsize=4)
def _reader(path: Path, stamp: Stamp) -> _Header:
    parts, readers = parts_of(path), []
    for part in parts:
        try:
            readers.append(_reader_class()(part))
        except Exception as error:  # any class: the file is not trusted
            raise ModelError(f"{part} is truncated or corrupt, fetch it again: {one_line(error)}") from error
    reader = _Header(readers[0].fields, [tensor for each in readers for tensor in each.tensors])
    _check_parts(parts, [each.fields for each in readers], [tensor.name for tensor in reader.tensors])
    if strange := next((t for t in reader.tensors if t.tensor_type.name not in {*FLOATS, *PACKED}), None):
        known = ", ".join(sorted({*FLOATS, *PACKED}))
        raise UnsupportedModelError(f"{path}: {strange.name} is {strange.tensor_type.name}; read are {known}")
    return reader


def _check_parts(paths: list[Path], fields: list[Mapping[str, Any]], names: list[str]) -> None:
    """Raise ModelError unless these are all parts of one file, by what they say of themselves."""

    def said(name: str, number: int) -> Any:
        return fields[number][name].contents() if name in fields[number] else None

    if len(paths) == 1 and said("split.count", 0) in (None, 0, 1):
        return
    for number, path in enumerate(paths):
        if (said("split.no", number), said("split.count", number)) != (number, len(paths)):
            raise ModelError(
                f"{path} says that it is part {said('split.no', number)} of {said('split.count', number)}, counted "
                f"from 0, and its name says {number} of {len(paths)}: fetch it again"
            )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ModelError(f"{paths[0]}: two parts have {twice}: fetch them again")
    if (due := said("split.tensors.count", 0)) is not None and due != len(names):
        raise ModelError(
            f"{paths[0]} says that all parts have {due} tensors, and they have {len(names)}: fetch them again"
        )


def _reader_class() -> Any:
    """Return gguf's reader without what takes seconds. It passes over vocabularies, of whose items gguf makes two
    arrays each. It takes slices of a plain array, not of a memmap.
    """
    import numpy as np

    with _LOCK:
        from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):  # type: ignore[misc]
        data: Any

        def _get(self, *args: Any, **options: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            return super()._get(*args, **options)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
            if count <= _MOST_ITEMS:
                return super()._get_field_parts(orig_offs, raw_type)
            end = orig_offs + 12
            if kind == GGUFValueType.STRING:
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", self.data, end)[0]
            else:
                end += count * self.gguf_scalar_to_np[GGUFValueType(kind)]().nbytes
            number = np.array([count], np.uint64)
            return end - orig_offs, [number], [], [GGUFValueType.ARRAY, GGUFValueType(kind)]

    return Reader


@lru_cache(maxsize=4)
def _settings(path: Path, stamp: Stamp) -> dict[str, Any]:
    reader = _reader(path, stamp)  # its errors are clearer
    import gguf
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with _LOCK:  # transformers imports the class when it is called, and would read all of the header again
        own = gguf.GGUFReader
        gguf.GGUFReader = lambda of, *args: reader if of == str(path) else own(of, *args)  # other threads read others
        try:
            settings: dict[str, Any] = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
        except Exception as error:  # any class: the file is not trusted
            reason = one_line(error)
            raise UnsupportedModelError(f"{path} is of a kind that transformers cannot read: {reason}") from error
        finally:
            gguf.GGUFReader = own
    tokens = reader.fields.get(_TOKENS)
    if tokens is not None and not tokens.data:  # which the reader passed over, and transformers counted
        settings["vocab_size"] = settings.get("vocab_size") or int(tokens.parts[-1][0])
    return settings


@lru_cache(maxsize=4)
def _weights(path: Path, stamp: Stamp) -> tuple[QuantizedTensor, ...]:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    reader, settings = _reader(path, stamp), _settings(path, stamp)
    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=settings)
    config = read_config(path)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
        names = weight_names(model, processor)
    except Exception as error:  # any class: the library has its own for architectures that it lacks
        raise UnsupportedModelError(f"{path} is of a kind that transformers cannot read: {one_line(error)}") from error
    owners: dict[str, list[Any]] = {}
    for tensor in reader.tensors:
        if (name := names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))) is not None:
            owners.setdefault(name, []).append(tensor)
    return tuple(_weight(name, own, processor, names, shapes.get(name)) for name, own in owners.items())


def weight_names(model: Any, processor: Any) -> dict[str, str]:
    """Return the names of a model's weights by those of a GGUF file, from the tables of transformers.

    transformers asks its tables for the whole model and once more for each of its modules, which takes seconds. Only
    the base model's names differ from those that the whole model has.
    """
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    base = model.base_model
    children = [] if base is model else [(model.base_model_prefix, _Named(base, []))]
    names: dict[str, str] = get_gguf_hf_weights_map(_Named(model, children), processor)
    return names


class _Named:
    """The part of a module that transformers reads for the names of its weights."""

    def __init__(self, module: Any, children: list[tuple[str, _Named]]) -> None:
        self.config, self.state_dict = module.config, module.state_dict
        self.named_children = lambda: children


def _weight(
    name: str, tensors: list[Any], processor: Any, names: dict[str, str], shape: tuple[int, ...] | None
) -> QuantizedTensor:
    parts = tuple(tensor.name for tensor in tensors)

    def values(read: Read) -> Tensor:
        from gguf import dequantize

        joined: dict[str, Any] = {"tensors": {}}
        for tensor in tensors:
            numbers = dequantize(tensor.data, tensor.tensor_type)
            result = processor.process(
                weights=numbers, name=tensor.name, tensor_key_mapping=names, parsed_parameters=joined
            )
            if result.name is not None:
                return _finite(parts, torch.from_numpy(result.weights.copy()))
        return _finite(parts, joined["tensors"].popitem()[1])

    own = tuple(int(n) for n in reversed(tensors[0].shape))
    experts = _experts(tensors, processor, names, shape)
    return QuantizedTensor(name, shape or own, parts, values, _packed(tensors, processor, own, shape), experts)


def _finite(parts: tuple[str, ...], values: Tensor) -> Tensor:
    pieces = torch.split(values.reshape(-1), _CHECKED)  # the check takes as much memory again
    if not all(bool(piece.isfinite().all()) for piece in pieces):
        raise ModelError(f"{parts[0]} has a value that is no finite number: fetch the model again")
    return values


def _packed(
    tensors: list[Any], processor: Any, own: tuple[int, ...], shape: tuple[int, ...] | None
) -> Callable[[Read], GroupedCodes] | None:
    """Return the way to read a weight as codes, if it is one tensor of blocks whose rows are moved at most."""
    if len(tensors) > 1 or len(own) != 2 or shape != own or tensors[0].tensor_type.name not in PACKED:
        return None
    import numpy as np

    # A processor that only moves rows does the same to their numbers.
    rows = np.arange(own[0], dtype=np.float32)[:, None]
    moved = processor.process(weights=rows, name=tensors[0].name, tensor_key_mapping={}, parsed_parameters={})
    if moved.name is None or moved.weights.shape != rows.shape:
        return None
    order = torch.from_numpy(moved.weights.copy()).flatten().long()
    if not torch.equal(order.sort().values, torch.arange(own[0])):
        return None
    name, kind, is_moved = tensors[0].name, tensors[0].tensor_type.name, not bool((order.diff() == 1).all())

    def codes(read: Read) -> GroupedCodes:
        stored = read(name)
        return grouped_codes(kind, name, stored[order.to(stored.device)] if is_moved else stored)

    return codes


def _experts(
    tensors: list[Any], processor: Any, names: dict[str, str], shape: tuple[int, ...] | None
) -> Callable[[Read], Iterator[GroupedCodes | None]] | None:
    """Return the way to read a weight of all experts as codes, if it has the rows of tensors of blocks in their order,
    expert by expert.
    """
    if shape is None or len(shape) != 3 or any(tensor.tensor_type.name not in PACKED for tensor in tensors):
        return None
    given = permutations(tensors) if len(tensors) < 3 else ()  # a file may have gate and up in any order
    parts = next((each for each in given if _are_joined(each, processor, names, shape)), None)
    if parts is None:
        return None
    kinds = [(tensor.tensor_type.name, tensor.name) for tensor in parts]

    def each(read: Read) -> Iterator[GroupedCodes | None]:
        stored = [read(name) for _, name in kinds]
        for number in range(shape[0]):
            own = zip(kinds, stored, strict=True)
            yield joined([grouped_codes(kind, name, rows[number]) for (kind, name), rows in own])

    return each


def _are_joined(tensors: Sequence[Any], processor: Any, names: dict[str, str], shape: tuple[int, ...]) -> bool:
    """Return whether a processor makes a weight of ``shape`` of the rows of tensors, one after the other."""
    import numpy as np

    # It does the same to the numbers of rows.
    known: dict[str, Any] = {"tensors": {}}
    numbers, rows, moved = np.arange(shape[0] * shape[1], dtype=np.float64).reshape(*shape[:2], 1), 0, None
    for tensor in tensors:
        own = tuple(int(n) for n in reversed(tensor.shape))
        if len(own) != 3 or (own[0], own[2]) != (shape[0], shape[2]) or rows + own[1] > shape[1]:
            return False
        part, rows = numbers[:, rows : rows + own[1]], rows + own[1]
        result = processor.process(weights=part, name=tensor.name, tensor_key_mapping=names, parsed_parameters=known)
        moved = result.weights if result.name is not None else next(iter(known["tensors"].values()))
    return moved is not None and rows == shape[1] and np.array_equal(np.asarray(moved), numbers)


def _bytes_of(tensor: Any) -> Tensor:
    return torch.from_numpy(tensor.data.copy())
