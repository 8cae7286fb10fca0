"""Weights of few bits that are made while a checkpoint of floats is loaded: each to the nearest code of its group.

A group's scale is its largest magnitude divided by half of the codes' range, as compressed-tensors has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.models.errors import ModelError
from lamina.ops.gemm.quantized import GROUPS

from . import QuantizedTensor, Read
from .grouped_codes import GroupedCodes

if TYPE_CHECKING:
    from lamina.models.checkpoint import StoredWeight

_ROUNDED = ("F64", "F32", "BF16", "F16")  # types of weights, by safetensors' names
_AT_ONCE = 1 << 22  # numbers; they are in fp32
# Linear layers that choose experts: their rounding would choose others.
_ROUTERS = {"gate", "router"}


@dataclass(frozen=True)
class RoundToNearest:
    """The codes of --quantization int8 and int4. ``bits``, ``group``: of linear layers. lm_head has ``head_bits``. A
    group that does not divide a weight's inputs is replaced by a smaller one, or by a channel of 8 bits.
    """

    bits: int
    group: int
    head_bits: int = 8
    head_group: int = 128

    @property
    def name(self) -> str:
        """All that the rounded weights depend on, apart from the stored ones."""
        return f"rtn {self.bits} by {self.group}, lm_head {self.head_bits} by {self.head_group}"

    def form(self, inputs: int, *, is_head: bool) -> tuple[int, int]:
        """Return the bits and the group of a weight with so many inputs; the group 0 is a channel."""
        bits, most = (self.head_bits, self.head_group) if is_head else (self.bits, self.group)
        for known in dict.fromkeys((bits, 8)):
            least, limit = (32 if known == 4 else 0), (most if known == bits else 32)
            if fits := [size for size in GROUPS[known] if least <= size <= limit and inputs % size == 0]:
                return known, max(fits)
        return 8, 0

    def weight(self, stored: StoredWeight, *, is_head: bool) -> QuantizedTensor | None:
        """Return a stored weight of a linear layer as it will be; None if it stays as it is."""
        if stored.dtype not in _ROUNDED or len(stored.shape) != 2 or not all(stored.shape):
            return None
        if not is_head and _ROUTERS & {*stored.name.split(".")}:
            return None
        packed = partial(_rounded, stored.name, *self.form(stored.shape[1], is_head=is_head))
        return QuantizedTensor(
            stored.name, stored.shape, (stored.name,), lambda read: packed(read).dequantized(), packed
        )


BY_NAME = {"int8": RoundToNearest(8, 128), "int4": RoundToNearest(4, 32)}


def _rounded(name: str, bits: int, group: int, read: Read) -> GroupedCodes:
    w = read(name)
    columns, inputs = w.shape
    groups = inputs // group if group else 1
    codes = torch.empty(w.shape, dtype=torch.int8 if bits == 8 else torch.uint8, device=w.device)
    scales = torch.empty(columns, groups, dtype=torch.bfloat16, device=w.device)
    if w.is_meta:
        return GroupedCodes(codes, scales)
    for first in range(0, columns, each := max(1, _AT_ONCE // inputs)):
        part = slice(first, first + each)
        scales[part], codes[part] = round_groups(w[part].float(), bits, groups)
        if not bool(scales[part].isfinite().all()):
            raise ModelError(f"{name} has a value that is no finite number: fetch the model again")
    return GroupedCodes(codes, scales)


def round_groups(w: Tensor, bits: int, groups: int) -> tuple[Tensor, Tensor]:
    """Return the scales [N, ``groups``] of w [N, K], which is in fp32, and its codes: of 8 bits q, of 4 bits q + 8."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    parts = w.view(len(w), groups, -1)
    scales = (parts.abs().amax(-1) / ((high - low) / 2)).bfloat16()
    divisors = torch.where(scales == 0, 1, scales.float())  # a group of zeros
    q = (parts / divisors[..., None]).round_().clamp_(low, high).flatten(1)
    return scales, (q + (8 if bits == 4 else 0)).to(torch.uint8 if bits == 4 else torch.int8)
