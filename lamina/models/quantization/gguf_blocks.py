"""Blocks of GGUF files as codes with scales and offsets by group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lamina.ops.gemm.quantized import UINT4

from .grouped_codes import GroupedCodes, check_scales

_HALF = 2  # bytes of a scale


def grouped_codes(kind: str, name: str, rows: Tensor) -> GroupedCodes:
    """Return a weight [N, K] of the blocks in ``rows`` [N, bytes]. ``kind``: gguf's name of the blocks, one of PACKED.
    ``name``: of the tensor. Raises ModelError for a scale that is no finite number.
    """
    size, unpack = _KINDS[kind]
    weight = unpack(rows.view(len(rows), -1, size))
    check_scales(name, weight.scales, zero=True)
    if weight.offsets is not None:
        check_scales(name, weight.offsets, zero=True)
    return weight


def _float(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + _HALF].contiguous().view(torch.float16)[..., 0]


def _pieces(x: Tensor, *sizes: int) -> Tensor:
    """Return x with its last dimension as several."""
    return x.reshape(*x.shape[:-1], *sizes)


def _halves(packed: Tensor) -> Tensor:
    """Return the lower halves of all bytes, then the upper ones, along the last dimension."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return the bits of 4 bytes, 16 for a set one."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).flatten(-2) << 4


def _q8_0(blocks: Tensor) -> GroupedCodes:
    return GroupedCodes(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _float(blocks, 0))


def _q4_0(blocks: Tensor) -> GroupedCodes:
    return GroupedCodes(_halves(blocks[..., 2:]).flatten(1), _float(blocks, 0))


def _q4_1(blocks: Tensor) -> GroupedCodes:
    return GroupedCodes(_halves(blocks[..., 4:]).flatten(1), _float(blocks, 0), _float(blocks, 2), UINT4)


def _q5_0(blocks: Tensor) -> GroupedCodes:
    codes = _halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return GroupedCodes((codes.to(torch.int8) - 16).flatten(1), _float(blocks, 0))


def _q5_1(blocks: Tensor) -> GroupedCodes:
    codes = _halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return GroupedCodes(codes.to(torch.int8).flatten(1), _float(blocks, 0), _float(blocks, 2))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets [N, groups] of blocks that begin with two halves and 12 bytes of 6-bit numbers."""
    low, high, both = (blocks[..., 4 + at : 8 + at] for at in (0, 4, 8))
    scales = torch.cat((low & 63, (both & 15) | ((low >> 6) << 4)), -1).float()
    least = torch.cat((high & 63, (both >> 4) | ((high >> 6) << 4)), -1).float()
    return (
        (_float(blocks, 0).float()[..., None] * scales).flatten(1),
        (-_float(blocks, 2).float()[..., None] * least).flatten(1),
    )


def _q4_k(blocks: Tensor) -> GroupedCodes:
    scales, offsets = _k_scales(blocks)
    return GroupedCodes(_halves(_pieces(blocks[..., 16:], 4, 32)).flatten(1), scales, offsets, UINT4)


def _q5_k(blocks: Tensor) -> GroupedCodes:
    scales, offsets = _k_scales(blocks)
    low = _pieces(_halves(_pieces(blocks[..., 48:], 4, 32)), 2, 32).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    codes = low | (((blocks[..., None, 16:48] >> shifts) & 1) << 4)
    return GroupedCodes(codes.to(torch.int8).flatten(1), scales, offsets)


def _q6_k(blocks: Tensor) -> GroupedCodes:
    low = _halves(_pieces(blocks[..., :128], 2, 64))  # [..., 2, 128]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((_pieces(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3).flatten(-2)
    codes = ((low | (high << 4)).to(torch.int8) - 32).flatten(1)
    scales = _float(blocks, 208).float()[..., None] * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return GroupedCodes(codes, scales.flatten(1))


# kind -> bytes of a block, and its unpacking
_KINDS: dict[str, tuple[int, Callable[[Tensor], GroupedCodes]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "Q8_0": (34, _q8_0),
}
PACKED = frozenset(_KINDS)
