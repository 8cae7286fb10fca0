"""AWQ: codes of 4 bits, zero points and scales by group, with outputs in an order of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lamina.models.errors import ModelError, UnsupportedModelError
from lamina.ops.gemm.quantized import UINT4

from . import QuantizedTensor, Read
from .grouped_codes import GroupedCodes, check_scales, unpack_int32

if TYPE_CHECKING:
    from lamina.models.checkpoint import StoredWeight

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble of a word, from the lowest bits on


def open_format(settings: dict[str, Any]) -> ActivationAware:
    """Return the format of a quantization_config. Raises UnsupportedModelError."""
    bits, version = settings.get("bits", settings.get("w_bit", 4)), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise UnsupportedModelError(f"awq: {bits} bits of version {version} are not read: use 4 bits of version gemm")
    return ActivationAware()


class ActivationAware:
    """The StoredFormat of ``qweight`` [K, N / 8], ``qzeros`` [K / g, N / 8] and ``scales`` [K / g, N]."""

    def find(self, stored: Mapping[str, StoredWeight]) -> Iterator[QuantizedTensor]:
        for name, weight in stored.items():
            base, _, kind = name.rpartition(".")
            if kind == "qweight":
                names = name, f"{base}.qzeros", f"{base}.scales"
                yield _weight(base, weight, names, stored)


def _weight(
    base: str, weight: StoredWeight, names: tuple[str, str, str], stored: Mapping[str, StoredWeight]
) -> QuantizedTensor:
    if missing := next((n for n in names if n not in stored), None):
        raise ModelError(f"{names[0]} has no {missing}: fetch the model again")
    zeros, scales = stored[names[1]], stored[names[2]]
    size, words = weight.shape if len(weight.shape) == 2 else (0, 0)
    groups = scales.shape[0] if scales.shape else 0
    fits = (
        scales.shape == (groups, 8 * words)
        and zeros.shape == (groups, words)
        and groups
        and words
        and size
        and size % groups == 0
    )
    if not fits or {weight.dtype, zeros.dtype} != {"I32"}:
        raise ModelError(f"{scales.name} {list(scales.shape)} does not fit {weight.name} {list(weight.shape)}")

    def codes(read: Read) -> GroupedCodes:
        q = unpack_int32(read(names[0]), 4, _ORDER).T.contiguous()
        by = check_scales(names[2], read(names[2])).float().T.contiguous()
        zero = unpack_int32(read(names[1]), 4, _ORDER).T.float()
        return GroupedCodes(q, by, -by * zero, UINT4)

    shape = (8 * words, size)
    return QuantizedTensor(f"{base}.weight", shape, names, lambda read: codes(read).dequantized(), codes)
