"""Weights of linear layers that are stored with few bits: w = scale * q + offset."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

INT4 = tuple(float(q) for q in range(-8, 8))
UINT4 = tuple(float(q) for q in range(16))
GROUPS = {4: (16, 32, 64, 128), 8: (16, 32, 128)}  # numbers of k with one scale, by bits
SCALES = (torch.float32, torch.bfloat16, torch.float16)
MOST_INT8 = 2**17 - 1  # products of two int8 of which int32 holds the sum, whatever they are


def takes_int8(bits: int, values: tuple[float, ...]) -> bool:
    """Return whether codes stand for integers, so that they can be multiplied by rows of int8."""
    return bits == 8 or values in (INT4, UINT4)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [N, K] as checkpoints have it, before a backend packs it.

    ``codes`` [N, K] are int8 for 8 bits, and uint8 below 16 for 4 bits: code c stands for ``values[c]``. ``scales`` and
    ``offsets`` are [N, K / group], or [N, 1] by channel, of one dtype: fp32, bf16 or fp16. A zero point z of integers
    is the offset -scale * z, which is exact in fp32. ``int8_inputs``: rows that are multiplied become int8, too. Raises
    ValueError if tensors do not fit together.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    values: tuple[float, ...] = INT4
    int8_inputs: bool = False

    def __post_init__(self) -> None:
        if self.codes.dtype not in (torch.int8, torch.uint8) or self.codes.dim() != 2:
            raise ValueError(f"codes must be int8 or uint8 [N, K], not {self.codes.dtype} {tuple(self.codes.shape)}")
        for name, x in (("scales", self.scales), ("offsets", self.offsets)):
            if x is not None and (x.dtype not in SCALES or x.dtype != self.scales.dtype):
                raise ValueError(f"{name} must be fp32, bf16 or fp16, and of one dtype, not {x.dtype}")
            if x is not None and (x.shape != self.scales.shape or x.dim() != 2 or len(x) != len(self.codes)):
                raise ValueError(f"{name} {tuple(x.shape)} do not fit codes {tuple(self.codes.shape)}")
        if not self.by_channel and (self.group not in GROUPS[self.bits] or self.codes.shape[1] % self.group):
            groups = ", ".join(map(str, GROUPS[self.bits]))
            shapes = f"{tuple(self.scales.shape)} scales of {tuple(self.codes.shape)} codes"
            raise ValueError(f"{self.bits} bits go by channel or by groups of {groups}, not as {shapes}")
        rounded = torch.tensor(self.values, dtype=torch.float32).bfloat16()
        if len(self.values) != 16 or rounded.tolist() != list(self.values):
            raise ValueError(f"a code of 4 bits stands for one of 16 numbers that bf16 can hold, not {self.values}")
        if self.int8_inputs and not takes_int8(self.bits, self.values):
            raise ValueError(f"codes of floats are not multiplied by rows of int8: {self.values}")
        if self.int8_inputs and self.by_channel and self.codes.shape[1] > MOST_INT8:
            raise ValueError(f"rows of int8 have up to {MOST_INT8} inputs by channel, not {self.codes.shape[1]}")

    @cached_property
    def bits(self) -> int:
        """The bits of a code: 4 or 8."""
        return 8 if self.codes.dtype == torch.int8 else 4

    @cached_property
    def by_channel(self) -> bool:
        """True if a row of w has one scale."""
        return self.scales.shape[1] == 1

    @cached_property
    def group(self) -> int:
        """The numbers of k that have one scale."""
        return self.codes.shape[1] // max(1, self.scales.shape[1])

    def q(self) -> Tensor:
        """Return q [N, K], in fp32, where it is exact."""
        return (
            self.codes.float() if self.bits == 8 else torch.tensor(self.values, dtype=torch.float32)[self.codes.long()]
        )

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return w [N, K], computed in ``dtype``."""

        def spread(x: Tensor) -> Tensor:
            return x.to(dtype).repeat_interleave(self.group, 1)

        w = spread(self.scales) * self.q().to(dtype)
        return w if self.offsets is None else w + spread(self.offsets)


class PackedForm(NamedTuple):
    """The facts about a packed weight [``cols``, ``k_size``] that its bytes do not say. ``order``: the backend that has
    packed it. ``group``: the numbers of k with one scale, 0 by channel. ``scales``: dtype of scales and offsets.
    ``int8_inputs``: rows of x become int8.
    """

    order: str
    cols: int
    k_size: int
    bits: int
    group: int
    scales: torch.dtype
    has_offsets: bool
    int8_inputs: bool
    values: tuple[float, ...]

    @classmethod
    def of(cls, order: str, w: QuantizedWeight) -> PackedForm:
        """Return the form of w, packed by the backend ``order``."""
        group = 0 if w.by_channel else w.group
        cols, k_size = w.codes.shape
        return cls(order, cols, k_size, w.bits, group, w.scales.dtype, w.offsets is not None, w.int8_inputs, w.values)

    def encode(self) -> str:
        """Return the form as text, which operators of torch can take."""
        scales = str(self.scales).removeprefix("torch.")
        numbers = self.cols, self.k_size, self.bits, self.group
        flags = int(self.has_offsets), int(self.int8_inputs)
        return " ".join(map(str, (self.order, *numbers, scales, *flags, *self.values)))

    @staticmethod
    @lru_cache(maxsize=4096)
    def decode(text: str) -> PackedForm:
        """Return the form that ``encode`` has written."""
        order, cols, k_size, bits, group, scales, has_offsets, int8_inputs, *values = text.split()
        numbers = int(cols), int(k_size), int(bits), int(group)
        given = tuple(map(float, values))
        return PackedForm(order, *numbers, getattr(torch, scales), has_offsets == "1", int8_inputs == "1", given)

    def check(self, x: Tensor, b: Tensor | None) -> None:
        """Raise ValueError unless x [..., K] and b [N] fit a packed weight of this form."""
        if x.dtype not in SCALES or not x.is_cpu or x.shape[-1:] != (self.k_size,):
            raise ValueError(f"x must be [..., {self.k_size}] of fp32, bf16 or fp16, not {x.dtype} {tuple(x.shape)}")
        if b is not None and (b.dtype != x.dtype or b.shape != (self.cols,)):
            raise ValueError(f"b must be [{self.cols}] of {x.dtype}, not {b.dtype} {tuple(b.shape)}")


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows x [rows, K] as int8, and the scale of each in fp32: [rows, K], [rows, 1]. See csrc/gemm/quantized.h:
    the largest magnitude is 127.5 scales, and a row with an infinity or NaN has the scale NaN.
    """
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / 127.5
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    q = (x / torch.where(scales == 0, 1, scales)).round_().clamp_(-128, 127).nan_to_num_(0)
    return q.to(torch.int8), scales


class PackedWeight(NamedTuple):
    """A quantized weight in a backend's own order. ``data`` [1, bytes], since the weight of a product is a matrix
    elsewhere. ``form``: a PackedForm as text.
    """

    data: Tensor
    form: str
