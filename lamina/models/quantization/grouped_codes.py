"""Codes of few bits with scales and offsets by group, as stored formats have them, and their unpacking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from lamina.models.errors import ModelError
from lamina.ops.gemm.quantized import GROUPS, INT4, QuantizedWeight, takes_int8

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


_FLOATS = torch.float32, torch.bfloat16, torch.float16  # of scales


@dataclass(frozen=True)
class GroupedCodes:
    """A weight [N, K] = scale * q + offset. ``codes``: int8 q, or uint8 below 16 that stands for ``values[code]``.
    ``scales``, ``offsets``: [N, G], of one dtype; each is for K / G numbers of k. ``order`` [K], int64: which input of
    the weight each k is, where groups have no consecutive ones. ``int8_inputs``: rows that integers multiply become
    int8.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    values: tuple[float, ...] = INT4
    order: Tensor | None = None
    int8_inputs: bool = False

    @property
    def group(self) -> int:
        """The numbers of k with one scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantized(self) -> Tensor:
        """Return the weight in fp32: one product, and one sum if there are offsets."""
        q = (
            self.codes.float()
            if self.codes.dtype == torch.int8
            else torch.tensor(self.values, dtype=torch.float32)[self.codes.long()]
        )
        w: Tensor = q.view(*self.scales.shape, -1) * self.scales.float()[..., None]
        if self.offsets is not None:
            w += self.offsets.float()[..., None]
        w = w.view(q.shape)
        return w if self.order is None else w[:, self.order.argsort()]

    def without_idle_order(self) -> GroupedCodes:
        """Return the weight without its order if that is the order of inputs."""
        is_idle = self.order is not None and torch.equal(self.order, torch.arange(len(self.order)))
        return replace(self, order=None) if is_idle else self

    def columns(self, spans: Sequence[slice]) -> GroupedCodes:
        """Return the rows of the weight in ``spans``, which are columns of a product."""

        def taken(x: Tensor) -> Tensor:
            return torch.cat([x[span] for span in spans])

        offsets = None if self.offsets is None else taken(self.offsets)
        return replace(self, codes=taken(self.codes), scales=taken(self.scales), offsets=offsets)

    def inputs(self, spans: Sequence[slice]) -> GroupedCodes | None:
        """Return the numbers of k in ``spans``, in smaller groups if an end lies in a group. None if that is impossible
        with groups that kernels know, or if groups have any inputs.
        """
        if self.order is not None:
            return None
        size = gcd(self.group, *(end for span in spans for end in (span.start, span.stop)))
        split = self if self.scales.shape[1] == 1 else self._by(size)
        if split is None:
            return None
        group = split.group if split.scales.shape[1] > 1 else 0

        def scaled(x: Tensor) -> Tensor:
            return torch.cat([x[:, s.start // group : s.stop // group] for s in spans], 1) if group else x

        codes = torch.cat([self.codes[:, span] for span in spans], 1)
        offsets = None if split.offsets is None else scaled(split.offsets)
        return replace(split, codes=codes, scales=scaled(split.scales), offsets=offsets)

    def for_kernels(self) -> QuantizedWeight | None:
        """Return the weight as linear layers take it, with smaller groups if need be; None if no kernel has such
        groups.
        """
        split = self if self.scales.shape[1] == 1 else self._by(self.group)
        if split is None:
            return None
        int8 = self.int8_inputs and takes_int8(8 if self.codes.dtype == torch.int8 else 4, self.values)
        return QuantizedWeight(split.codes, split.scales, split.offsets, split.values, int8)

    def with_idle_inputs(self) -> GroupedCodes | None:
        """Return the weight with one more group of inputs, or one input by channel, for which it is zero. None for
        offsets by channel, which no input is without.
        """
        count, by_channel = self.group, self.scales.shape[1] == 1
        if by_channel and self.offsets is not None:
            return None

        def more(x: Tensor, width: int, value: int) -> Tensor:
            return torch.cat([x, x.new_full((len(x), width), value)], 1)

        zero = 0 if self.codes.dtype == torch.int8 else self.values.index(0.0)
        codes = more(self.codes, 1 if by_channel else count, zero)
        if by_channel:
            return replace(self, codes=codes)
        offsets = None if self.offsets is None else more(self.offsets, 1, 0)
        return replace(self, codes=codes, scales=more(self.scales, 1, 0), offsets=offsets)

    def _by(self, group: int) -> GroupedCodes | None:
        """Return the same weight with the largest groups of kernels that divide ``group``."""
        fits = [n for n in GROUPS[8 if self.codes.dtype == torch.int8 else 4] if group % n == 0]
        if not fits:
            return None
        times = self.group // max(fits)
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, 1)
        return replace(self, scales=self.scales.repeat_interleave(times, 1), offsets=offsets)


def by_groups(name: str, given: Tensor, plain: GroupedCodes) -> GroupedCodes:
    """Return a weight with its inputs in the order of their groups. ``plain``: its codes in the order of inputs.
    ``given`` [K]: the group of each input, which ``name`` has; also for codes on the meta device. Raises ModelError if
    groups are not of one size.
    """
    size, groups = plain.codes.shape[1], plain.scales.shape[1]
    if given.dtype not in (torch.int32, torch.int64):
        raise ModelError(f"{name} is of {given.dtype}: whole numbers are read")
    if given.shape != (size,):
        raise ModelError(f"{name} {list(given.shape)} does not fit {size} inputs")
    counts = torch.bincount(given.long().clamp(0, groups), minlength=groups)
    if bool((given < 0).any()) or counts.tolist() != [size // groups] * groups:
        raise ModelError(f"{name} has no groups of one size: fetch the model again")
    order = given.long().argsort(stable=True)
    codes = plain.codes if plain.codes.is_meta else plain.codes[:, order].contiguous()
    return replace(plain, codes=codes, order=order)


def joined(parts: Sequence[GroupedCodes]) -> GroupedCodes | None:
    """Return the rows of several weights, one after the other; None if they have several forms, or orders."""

    def facts(x: GroupedCodes) -> tuple[object, ...]:
        order = None if x.order is None else x.order.tolist()
        return x.codes.dtype, x.group, x.scales.dtype, x.offsets is None, x.values, order

    first = parts[0]
    if any(facts(each) != facts(first) for each in parts[1:]):
        return None
    if len(parts) == 1:
        return first
    offsets = [each.offsets for each in parts if each.offsets is not None]
    codes, scales = torch.cat([each.codes for each in parts]), torch.cat([each.scales for each in parts])
    return replace(first, codes=codes, scales=scales, offsets=torch.cat(offsets) if offsets else None)


def unpack_int32(x: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the 32 / ``bits`` unsigned numbers of each element, uint8, along the last dimension. The lowest bits have
    the first one, or number ``order[0]``.
    """
    count = 32 // bits
    lanes = [0] * count
    for place, lane in enumerate(order or range(count)):
        lanes[lane] = place * bits
    return (((x[..., None] >> torch.tensor(lanes, device=x.device)) & ((1 << bits) - 1)).to(torch.uint8)).flatten(-2)


def unpack_nibbles(x: Tensor) -> Tensor:
    """Return the two numbers of 4 bits of each byte, the lower half first, along the last dimension."""
    return torch.stack((x & 15, x >> 4), -1).flatten(-2)


def powers_of_two(name: str, exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) of bytes, in bf16. Raises ModelError for 255, which is no number."""
    if not exponents.is_meta and bool((exponents == 255).any()):
        raise ModelError(f"{name} has a scale that is no number: fetch the model again")
    return torch.exp2(exponents.float() - 127).bfloat16()


def check_scales(name: str, scales: Tensor, *, zero: bool = False) -> Tensor:
    """Return ``scales``. Raises ModelError, naming them, if they are no floats of 16 or 32 bits, one is not finite, or
    is zero unless that is allowed.
    """
    if scales.dtype not in _FLOATS:
        raise ModelError(f"{name} is of {scales.dtype}: scales of fp32, bf16 and fp16 are read")
    if not scales.is_meta:
        if not bool(scales.float().isfinite().all()):
            raise ModelError(f"{name} has a scale that is no finite number: fetch the model again")
        if not zero and not bool(scales.float().all()):
            raise ModelError(f"{name} has a scale of zero: fetch the model again")
    return scales
