"""MXFP4 as gpt-oss is published: experts with codes of 4 bits, 32 of which share a power of two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

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
            yield QuantizedTensor(base, shape, (name, scales.name), _values(name, scales.name))


def _values(blocks: str, scales: str) -> Any:
    def values(read: Read) -> Tensor:
        codes, by = read(blocks), powers_of_two(scales, read(scales))
        experts, columns, _ = by.shape
        flat = GroupedCodes(unpack_nibbles(codes).reshape(experts * columns, -1), by.flatten(0, 1), values=E2M1)
        return flat.dequantized().view(experts, columns, -1).transpose(1, 2).contiguous()

    return values
