"""The configuration and the weights in a GGUF file.

Formats of blocks come from the package gguf. Names and architectures come from tables of transformers. Nothing in a
file chooses code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina.models.errors import ModelError, UnsupportedModelError
from lamina.models.model_files import check_counts, one_line

from . import QuantizedTensor, Read
from .gguf_blocks import PACKED, grouped_codes
from .gguf_file import check_file
from .grouped_codes import GroupedCodes

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS = {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"}


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
        config = AutoConfig.for_model(kind, **settings)
    except Exception as error:  # any class, as architectures have their own checks
        raise ModelError(f"{path} has no valid configuration: {one_line(error)}") from error
    kinds = {tensor.tensor_type.name for tensor in _reader(path, _stamp(path)).tensors if len(tensor.shape) > 1}
    plain = [_FLOATS[name] for name in _FLOATS if name in kinds] if kinds <= _FLOATS.keys() else []
    config.dtype = plain[0] if len(plain) == 1 else torch.bfloat16
    return config


def stored_weights(path: Path) -> list[QuantizedTensor]:
    """Return the weights in a file by the names that transformers' model has for them. Raises ModelError."""
    return list(_weights(path, _stamp(path)))


def tensor_reader(path: Path) -> Read:
    """Return a function that reads a tensor of the file: floats, or bytes [..., bytes of a row] of blocks."""
    tensors = {tensor.name: tensor for tensor in _reader(path, _stamp(path)).tensors}
    return lambda name: _bytes_of(tensors[name])


def meta_reader(path: Path) -> Read:
    """Return the same function for tensors on the meta device."""
    read = tensor_reader(path)
    return lambda name: torch.empty_like(read(name), device="meta")


def _stamp(path: Path) -> tuple[int, int, int]:
    check_file(path)
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


@lru_cache(maxsize=4)
def _reader(path: Path, stamp: tuple[int, int, int]) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(f"{path} is GGUF, which needs the package gguf: pip install 'lamina[gguf]'") from error
    import numpy as np

    class Reader(GGUFReader):  # type: ignore[misc]
        """Looks at the file as a plain array: slices of a memmap take more than half of the time."""

        data: Any

        def _get(self, *args: Any, **options: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            return super()._get(*args, **options)

    try:
        reader = Reader(path)
    except Exception as error:  # any class: the file is not trusted
        raise ModelError(f"{path} is truncated or corrupt, fetch it again: {one_line(error)}") from error
    if strange := next((t for t in reader.tensors if t.tensor_type.name not in {*_FLOATS, *_BLOCKS}), None):
        known = ", ".join(sorted({*_FLOATS, *_BLOCKS}))
        raise UnsupportedModelError(f"{path}: {strange.name} is {strange.tensor_type.name}; read are {known}")
    return reader


@lru_cache(maxsize=4)
def _settings(path: Path, stamp: tuple[int, int, int]) -> dict[str, Any]:
    _reader(path, stamp)  # its errors are clearer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        settings: dict[str, Any] = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
    except Exception as error:  # any class: the file is not trusted
        raise UnsupportedModelError(f"{path} is of a kind that transformers cannot read: {one_line(error)}") from error
    return settings


@lru_cache(maxsize=4)
def _weights(path: Path, stamp: tuple[int, int, int]) -> tuple[QuantizedTensor, ...]:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    reader, settings = _reader(path, stamp), _settings(path, stamp)
    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(path))
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    try:
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
                return torch.from_numpy(result.weights.copy())
        whole: Tensor = joined["tensors"].popitem()[1]
        return whole

    own = tuple(int(n) for n in reversed(tensors[0].shape))
    return QuantizedTensor(name, shape or own, parts, values, _packed(tensors, processor, own, shape))


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
    name, kind = tensors[0].name, tensors[0].tensor_type.name
    return lambda read: grouped_codes(kind, name, read(name)[order.to(read(name).device)])


def _bytes_of(tensor: Any) -> Tensor:
    return torch.from_numpy(tensor.data.copy())
