"""Linear layers by torch, with whatever its build and the device offer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from . import row_blocks
from .expert_rows import by_expert
from .packed_memory import PackedMemory
from .quantized import PackedForm, PackedWeight, QuantizedWeight, int8_rows


class TorchLinear:
    """Calls torch.nn.functional.linear."""

    has_own_threads = False
    engine = None

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}  # by whether rows become int8

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Return x [..., K] times w [N, K] plus b [N], [..., N], as torch computes it."""
        return row_blocks.linear(x, w, b)

    def packed_bytes(self, dtype: torch.dtype, cols: int, k_size: int) -> int:
        """Return 0: weights stay as they are."""
        return 0

    def pack(self, w: Tensor, memory: PackedMemory) -> Tensor:
        """Raise ValueError: torch packs no weights."""
        raise ValueError("torch packs no weights")

    def pack_quantized(self, w: QuantizedWeight) -> PackedWeight:
        """Return codes, scales and offsets of w, one after the other."""
        parts = [w.codes, w.scales, *([] if w.offsets is None else [w.offsets])]
        data = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
        return PackedWeight(data[None], PackedForm.of("torch", w).encode())

    def linear_quantized(self, x: Tensor, data: Tensor, b: Tensor | None, form: str) -> Tensor:
        """Return x [..., K] times the packed weight plus b [N], [..., N]. Its values last for a call; fp32 computes."""
        known = PackedForm.decode(form)
        known.check(x, b)
        self._products[known.int8_inputs] += 1
        w = _unpacked(data, known).dequantized(torch.float32)
        if not known.int8_inputs:
            return F.linear(x.float(), w, None if b is None else b.float()).to(x.dtype)
        q, scales = int8_rows(x)
        y = F.linear(q.float(), w) * scales
        return (y if b is None else y + b.float()).to(x.dtype)

    def pack_quantized_experts(self, weights: Iterable[QuantizedWeight], count: int) -> PackedWeight:
        """Return the parts of each of ``count`` weights: data [count, bytes]. Raises ValueError for several forms."""
        packed = [self.pack_quantized(w) for w in weights]
        if len({each.form for each in packed}) != 1 or len(packed) != count:
            raise ValueError("experts of several forms cannot be packed together")
        return PackedWeight(torch.cat([each.data for each in packed]), packed[0].form)

    def linear_quantized_experts(self, x: Tensor, data: Tensor, ids: Tensor, b: Tensor | None, form: str) -> Tensor:
        """Return each row of x [rows, K] times the packed weight number ids[row] plus b[ids[row]]: [rows, N]."""
        return by_expert(self.linear_quantized, x, data, ids, b, form)

    def quantized_products(self) -> tuple[int, int]:
        """Return the number of products by packed quantized weights so far, and of those by rows of int8."""
        return sum(self._products.values()), self._products[True]

    def quantized_rows(self, ids: Tensor, data: Tensor, form: str) -> Tensor:
        """Return rows ``ids`` [...] of the packed weight: [..., K], in fp32."""
        known = PackedForm.decode(form)
        w, rows = _unpacked(data, known), ids.reshape(-1)
        if bool(((rows < 0) | (rows >= known.cols)).any()):
            raise IndexError(f"there are {known.cols} rows, and not {int(rows.min())} to {int(rows.max())}")
        offsets = None if w.offsets is None else w.offsets[rows]
        own = replace(w, codes=w.codes[rows], scales=w.scales[rows], offsets=offsets)
        return own.dequantized(torch.float32).view(*ids.shape, known.k_size)


def _unpacked(data: Tensor, form: PackedForm) -> QuantizedWeight:
    """Return the weight whose parts ``pack_quantized`` has joined."""
    groups = form.k_size // form.group if form.group else 1
    size = form.cols * groups * form.scales.itemsize
    parts = [form.cols * form.k_size, size, size if form.has_offsets else 0]
    codes, scales, offsets = torch.split(data[0], parts)

    def scaled(part: Tensor) -> Tensor:
        aligned = part if part.storage_offset() % form.scales.itemsize == 0 else part.clone()
        return aligned.view(form.scales).view(form.cols, groups)

    codes = codes.view(torch.int8 if form.bits == 8 else torch.uint8).view(form.cols, form.k_size)
    return QuantizedWeight(codes, scaled(scales), scaled(offsets) if form.has_offsets else None, form.values)


def open_backend(threads: int) -> TorchLinear:
    """Open the backend; ``threads`` is torch's own setting."""
    return TorchLinear()
