"""fp8 weights with scales by tensor, channel or block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from lamina.models.errors import ModelError

from . import QuantizedTensor, Read
from .grouped_codes import check_scales

if TYPE_CHECKING:
    from lamina.models.checkpoint import StoredWeight

FP8 = "F8_E4M3"


def scaled_float(
    base: str,
    parts: tuple[str, ...],
    stored: Mapping[str, StoredWeight],
    scale: str,
    block: tuple[int, int] = (128, 128),
) -> QuantizedTensor:
    """Return the weight ``base``.weight of fp8, which ``base``.``scale`` multiplies: one number, one for each column,
    or one for each ``block``. Raises ModelError for other shapes.
    """
    weight, scales = stored[f"{base}.weight"], stored[f"{base}.{scale}"]
    columns, size = weight.shape[-2:] if len(weight.shape) > 1 else (0, 0)
    by_block = (-(-columns // block[0]), -(-size // block[1]))
    ahead = weight.shape[:-2]
    whole = scales.shape in ((), (1,), (1, 1))
    if not columns or not (whole or scales.shape in ((columns,), (*ahead, columns, 1), (*ahead, *by_block))):
        raise ModelError(f"{scales.name} {list(scales.shape)} does not fit {weight.name} {list(weight.shape)}")

    def values(read: Read) -> Tensor:
        w, by = read(weight.name).float(), check_scales(scales.name, read(scales.name)).float()
        if whole:
            return w * by.reshape(())
        if by.shape[-1] == 1 or by.dim() == 1:
            return w * by.reshape(*ahead, columns, 1)
        spread = by.repeat_interleave(block[0], -2)[..., :columns, :].repeat_interleave(block[1], -1)[..., :size]
        return w * spread

    return QuantizedTensor(weight.name, weight.shape, parts, values)
