"""MXFP4 as gpt-oss is published: experts with codes of 4 bits, 32 of which share a power of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.models.errors import ModelError

from . import QuantizedTensor, Read
from .grouped_codes import E2M1, GroupedCodes, powers_of_two, unpack_nibbles

if TYPE_CHECKING:
    from lamina.models.checkpoint import StoredWeight

_BLOCKS, _SCALES, _BYTES = "_blocks", "_scales", 16


def open_format(settings: dict[str, Any]) -> MicroscaledExperts:
    """Return the format of a quantization_config."""
    return MicroscaledExperts()


class MicroscaledExperts:
    """The StoredFormat of ``*_blocks`` [E, N, K / 32, 16] with ``*_scales`` [E, N, K / 32]; weights are [E, K, N]."""

    def find(self, stored: Mapping[str, StoredWeight]) -> Iterator[QuantizedTensor]:
        for name, blocks in stored.items():
            if not name.endswith(_BLOCKS):
                continue
            base = name.removesuffix(_BLOCKS)
            scales = stored.get(base + _SCALES)
            if scales is None:
                raise ModelError(f"{name} has no {base}{_SCALES}: fetch the model again")
            fits = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, _BYTES)
            if not fits or blocks.dtype != "U8" or scales.dtype != "U8":
                raise ModelError(f"{scales.name} {list(scales.shape)} does not fit {name} {list(blocks.shape)}")
            experts, columns, groups = scales.shape
            shape = (experts, groups * 2 * _BYTES, columns)
            each = partial(_each, name, scales.name)
            yield QuantizedTensor(base, shape, (name, scales.name), partial(_values, each), experts=each)


def _each(blocks: str, scales: str, read: Read) -> Iterator[GroupedCodes]:
    codes, by = read(blocks), powers_of_two(scales, read(scales))
    for q, own in zip(codes, by, strict=True):
        yield GroupedCodes(unpack_nibbles(q).flatten(1), own, values=E2M1)


def _values(each: Callable[[Read], Iterator[GroupedCodes]], read: Read) -> Tensor:
    return torch.stack([codes.dequantized().T for codes in each(read)])
