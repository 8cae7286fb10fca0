"""The names of stored weights in a model, and the stored weights that a model would not use, or would misread.

transformers renames weights as it reads them, casts them to the model's dtype, and leaves out those that it does not
know. The last two give a model that runs and writes nonsense, so they are refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from .checkpoint import StoredWeight, holds_zeros, stored_weights
from .errors import ModelError
from .quantization.quantized_linear import packed_weights

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_OLD_BUFFER = re.compile(r"\b((attn|attention)\.(bias|masked_bias|causal_mask)|inv_freq)$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class AbsentPart(nn.Module):
    """A part of a multimodal model that no text runs through, where it is not made. It has no weights."""


class WeightTarget(NamedTuple):
    """The weight of a model that a stored one becomes, or becomes a part of by ``converter``, of transformers."""

    name: str
    converter: Any


class WeightNames:
    """The map from stored names to those of a model, as transformers' own loading has it. ``tensors``: by name; those
    of packed weights are on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.mapping: list[Any] = get_model_conversion_mapping(model)
        self._renamings = [m for m in self.mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in self.mapping if isinstance(m, WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._prefix: Any = model.base_model_prefix
        self.tensors: dict[str, torch.Tensor] = model.state_dict() | packed_weights(model)

    def find(self, name: str) -> WeightTarget:
        """Return what the stored weight ``name`` becomes, whether or not the model has a weight of that name."""
        from transformers.core_model_loading import rename_source_key

        new, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.tensors)
        if new not in self.tensors and name in self.tensors:  # it has its name already
            new, pattern = rename_source_key(name, [], [], self._prefix, self.tensors)
        return WeightTarget(new, self._by_pattern.get(pattern))


def check_all_used(model: nn.Module, directory: Path, *, allow_unused: bool = False) -> None:
    """Raise ModelError if the directory has a weight that ``model`` does not have, or has in a type that is no rounding
    of the stored one. ``model`` may lie on the meta device. Reads headers, and biases of quantised layers that have
    none: GPTQ gives them zeros. These are no fault, nor are weights that transformers knows to leave out for this
    class. ``allow_unused``: nor are others.
    """
    names, further = WeightNames(model), _speculating_layers(model)
    absent = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, AbsentPart))
    unused: dict[str, str] = {}  # names in the files, by those that the model would have
    stored = stored_weights(directory)
    packed = {weight.name.removesuffix(".weight") for weight in stored if weight.quantized}
    for weight in stored:
        target = names.find(weight.name).name
        if target not in names.tensors:
            layer = _LAYER.search(weight.name)
            if (
                not (absent and target.startswith(absent))
                and not _is_old_buffer(weight)
                and not (weight.name.removesuffix(".bias") in packed and holds_zeros(directory, weight.name))
                and not (layer and int(layer[1]) in further)
            ):
                unused[target] = weight.name
        elif not _can_hold(names.tensors[target].dtype, weight):
            raise ModelError(
                f"{directory}: {weight.name} is stored as {weight.dtype}, where {type(model).__name__} has "
                f"{str(names.tensors[target].dtype).removeprefix('torch.')}: these are quantised weights without "
                f"quantization_config in config.json; use a bfloat16 or float32 checkpoint"
            )
    left = sorted(unused[name] for name in _unexpected(model, unused))
    if left and not allow_unused:
        raise ModelError(
            f"{directory} has weights that {type(model).__name__} with this config.json does not use: "
            f"{name_first(left)}; --allow-unused-weights leaves them out"
        )


def stored_matrices(directory: Path) -> Iterator[StoredWeight]:
    """Yield the stored weights of at least two dimensions whose type is a plain floating-point one."""
    weights = (w for w in stored_weights(directory) if len(w.shape) > 1 and w.dtype in FLOATS)
    return (w for w in weights if not _is_old_buffer(w))


def text_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that a text runs through, with all of their names. Of a multimodal model these are its
    language model's, and the embeddings of tokens in and out.
    """
    parts = [model]
    if model.config.get_text_config(decoder=True) is not model.config:
        parts = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    own = {id(weight) for part in parts if part is not None for weight in part.parameters()}
    return ((n, w) for n, w in model.named_parameters(remove_duplicate=False) if id(w) in own)


def name_first(names: list[str]) -> str:
    """Return text that names the first one and counts the others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _can_hold(dtype: torch.dtype, weight: StoredWeight) -> bool:
    return weight.quantized is not None or dtype.is_floating_point == (weight.dtype in FLOATS)


def _is_old_buffer(weight: StoredWeight) -> bool:
    """Return whether older versions stored a tensor that is no weight: rotary frequencies, or a mask or its number."""
    match = _OLD_BUFFER.search(weight.name)
    return match is not None and (match[1] == "inv_freq" or weight.shape[:2] in ((), (1,), (1, 1)))


def _speculating_layers(model: Any) -> range:
    """Return the numbers of layers after the last one that predict further tokens, by the configuration."""
    text = model.config.get_text_config(decoder=True)
    counts = [getattr(text, name, None) for name in ("num_hidden_layers", "num_nextn_predict_layers")]
    first, count = (number if isinstance(number, int) else 0 for number in counts)
    return range(first, first + count)


def _unexpected(model: Any, names: Iterable[str]) -> set[str]:
    """Return the names that are not on transformers' own lists of weights to leave out."""
    info = SimpleNamespace(missing_keys=set(), unexpected_keys=set(names))
    model._adjust_missing_and_unexpected_keys(info)
    return set(info.unexpected_keys)
