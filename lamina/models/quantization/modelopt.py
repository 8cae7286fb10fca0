"""Exports of NVIDIA's modelopt: fp8 by tensor or channel, and NVFP4, whose two scales both multiply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lamina.models.errors import ModelError, UnsupportedModelError

from . import QuantizedTensor, Read
from .grouped_codes import E2M1, GroupedCodes, check_scales, unpack_nibbles
from .scaled_floats import FP8, scaled_float

if TYPE_CHECKING:
    from lamina.models.checkpoint import StoredWeight

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
_ABOUT = ("weight_scale", "weight_scale_2", "input_scale")
_GROUP = 16  # numbers of an NVFP4 scale
_INPUTS = "pre_quant_scale"


def open_format(settings: dict[str, Any]) -> Export:
    """Return the format of a quantization_config, or of hf_quant_config.json. Raises UnsupportedModelError."""
    algorithm = settings.get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise UnsupportedModelError(f"modelopt: {algorithm} is not read: use one of {', '.join(ALGORITHMS)}")
    return Export()


class Export:
    """The StoredFormat of ``weight`` as fp8, or as two 4-bit floats in a byte, with ``weight_scale``."""

    def find(self, stored: Mapping[str, StoredWeight]) -> Iterator[QuantizedTensor]:
        for name, weight in stored.items():
            base, _, kind = name.rpartition(".")
            if kind == _INPUTS:
                raise UnsupportedModelError(f"{name} scales inputs, which is not read: use an export without AWQ")
            if kind != "weight" or weight.dtype not in (FP8, "U8"):
                continue
            if (scale := f"{base}.weight_scale") not in stored:
                raise ModelError(f"{name} has no {scale}: fetch the model again")
            parts = (name, *(part for about in _ABOUT if (part := f"{base}.{about}") in stored))
            if weight.dtype == FP8:
                yield scaled_float(base, parts, stored, "weight_scale")
            else:
                yield _nvfp4(base, parts, stored)


def _nvfp4(base: str, parts: tuple[str, ...], stored: Mapping[str, StoredWeight]) -> QuantizedTensor:
    weight, scale, whole = (stored.get(f"{base}.{name}") for name in ("weight", "weight_scale", "weight_scale_2"))
    assert weight is not None
    assert scale is not None
    if whole is None:
        raise ModelError(f"{weight.name} has no {base}.weight_scale_2: fetch the model again")
    columns, size = (weight.shape[0], 2 * weight.shape[1]) if len(weight.shape) == 2 else (0, 0)
    if not columns or size % _GROUP or scale.shape != (columns, size // _GROUP) or scale.dtype != FP8:
        raise ModelError(
            f"{scale.name} {scale.dtype} {list(scale.shape)} does not fit {weight.name} {list(weight.shape)}"
        )

    def codes(read: Read) -> GroupedCodes:
        factor = check_scales(whole.name, read(whole.name))
        if factor.numel() != 1:
            raise ModelError(f"{whole.name} {list(factor.shape)} must be one number")
        scales = check_scales(scale.name, read(scale.name).float(), zero=True) * factor.float().reshape(())
        return GroupedCodes(unpack_nibbles(read(weight.name)), scales, values=E2M1)

    return QuantizedTensor(weight.name, (columns, size), parts, lambda read: codes(read).dequantized(), codes)
