"""GPTQ: codes of 4 and 8 bits, with zero points and scales by group; groups may have any inputs (``desc_act``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lamina.models.errors import ModelError, UnsupportedModelError
from lamina.ops.gemm.quantized import UINT4

from . import QuantizedTensor, Read
from .grouped_codes import GroupedCodes, by_groups, check_scales, unpack_int32

if TYPE_CHECKING:
    from lamina.models.checkpoint import StoredWeight

ADDED = {"gptq": 1, "gptq_v2": 0}  # to stored zero points, by checkpoint_format
BITS = (4, 8)


def open_format(settings: dict[str, Any]) -> PostTraining:
    """Return the format of a quantization_config. Raises UnsupportedModelError."""
    bits, version = settings.get("bits", 4), settings.get("checkpoint_format") or "gptq"
    if bits not in BITS or version not in list(ADDED):
        raise UnsupportedModelError(
            f"gptq: {bits} bits of the checkpoint_format {version} are not read: use 4 or 8 bits of gptq or gptq_v2"
        )
    return PostTraining(bits, ADDED[version], by_activation=bool(settings.get("desc_act")))


class PostTraining:
    """The StoredFormat of ``qweight`` [K bits / 32, N], ``qzeros`` [G, N bits / 32], ``scales`` [G, N] and ``g_idx``
    [K], the group of each input.
    """

    def __init__(self, bits: int, added: int, *, by_activation: bool) -> None:
        """``added``: to stored zero points. ``by_activation``: groups may have any inputs."""
        self._bits, self._added, self._by_activation = bits, added, by_activation

    def find(self, stored: Mapping[str, StoredWeight]) -> Iterator[QuantizedTensor]:
        for name in stored:
            base, _, kind = name.rpartition(".")
            if kind == "qweight":
                yield self._weight(base, stored)

    def _weight(self, base: str, stored: Mapping[str, StoredWeight]) -> QuantizedTensor:
        parts = _parts(base, stored)
        weight, zeros, scales = (stored[name] for name in parts[:3])
        words, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
        order = stored.get(f"{base}.g_idx")
        size = order.shape[0] if order and order.shape else words * 32 // self._bits
        bits = words * 32 // size if size else 0  # a checkpoint may have layers of other bits than most
        groups = scales.shape[0] if scales.shape else 0
        fits = (
            bits in BITS
            and (order is None or order.shape == (size,))
            and groups
            and columns
            and size % groups == 0
            and words * 32 == size * bits
            and scales.shape == (groups, columns)
            and zeros.shape == (groups, columns * bits // 32)
            and columns * bits % 32 == 0
        )
        if not fits or {weight.dtype, zeros.dtype} != {"I32"}:
            raise ModelError(f"{scales.name} {list(scales.shape)} does not fit {weight.name} {list(weight.shape)}")
        layout = _Layout(base, bits, self._added, size, groups)
        codes = _mixed if order is not None and groups > 1 and self._by_activation else _codes
        return QuantizedTensor(
            f"{base}.weight",
            (columns, size),
            parts,
            lambda read: codes(layout, parts, read).dequantized(),
            lambda read: codes(layout, parts, read),
        )


class _Layout(NamedTuple):
    base: str
    bits: int
    added: int  # to stored zero points
    size: int  # K
    groups: int


def _parts(base: str, stored: Mapping[str, StoredWeight]) -> tuple[str, ...]:
    names = [f"{base}.{kind}" for kind in ("qweight", "qzeros", "scales")]
    if missing := next((name for name in names if name not in stored), None):
        raise ModelError(f"{names[0]} has no {missing}: fetch the model again")
    return (*names, f"{base}.g_idx") if f"{base}.g_idx" in stored else tuple(names)


def _codes(layout: _Layout, parts: tuple[str, ...], read: Read) -> GroupedCodes:
    """Return the weight, whose groups have consecutive inputs. Raises ModelError if they have others."""
    order = f"{layout.base}.g_idx"
    if order in parts and layout.groups > 1:
        given = _order(layout, read)
        if not torch.equal(given, torch.arange(layout.size) * layout.groups // layout.size):
            raise ModelError(
                f"{order} orders inputs by activation, and config.json says that desc_act is false: set it to true"
            )
    return _numbers(layout, read)


def _mixed(layout: _Layout, _: tuple[str, ...], read: Read) -> GroupedCodes:
    """Return the weight with its inputs in the order of their groups, which must be of one size."""
    name = f"{layout.base}.g_idx"
    return by_groups(name, read(name), _numbers(layout, read))


def _numbers(layout: _Layout, read: Read) -> GroupedCodes:
    """Return the codes in the order of inputs."""
    name = f"{layout.base}.scales"
    q = unpack_int32(read(f"{layout.base}.qweight").T.contiguous(), layout.bits)
    scales = check_scales(name, read(name)).float().T.contiguous()
    zero = (unpack_int32(read(f"{layout.base}.qzeros"), layout.bits).T.float() + layout.added).contiguous()
    if layout.bits == 8:  # kernels have signed ones
        return GroupedCodes((q.short() - 128).to(torch.int8), scales, -scales * (zero - 128))
    return GroupedCodes(q, scales, -scales * zero, UINT4)


def _order(layout: _Layout, read: Read) -> Tensor:
    order = read(f"{layout.base}.g_idx")
    if order.dtype not in (torch.int32, torch.int64):
        raise ModelError(f"{layout.base}.g_idx is of {order.dtype}: whole numbers are read")
    return order.long()
