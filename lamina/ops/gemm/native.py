"""Linear layers by csrc/gemm, on the compute worker's own threads; weights are read in place or packed.

A layer of a few rows takes the time of reading its weights. torch takes several times as long for fp32, and for bf16 on
a CPU without bf16 instructions. With these (AVX512-BF16, AMX) it takes twice as long, unless it may keep a copy of the
weights in its own order. So may native (``pack``). By AVX512-BF16, a step of 1 or 8 rows then takes 5 to 8 % less time,
and one of 512 rows less than torch's. A layer of 8 rows of bf16 takes half the time by AVX2, and the same by AVX-512.
What native computes of a row depends on that row alone, bit for bit, packed or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ._gemm import Engine
from .expert_rows import by_expert
from .packed_memory import PackedMemory, PrivateMemory
from .quantized import PackedForm, PackedWeight, QuantizedWeight

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CHANNEL_BLOCK = 128  # numbers of k that are summed before they are scaled, by channel


class NativeLinear:
    """The LinearBackend of ``csrc/gemm``."""

    has_own_threads = True

    def __init__(self, threads: int, variant: str = "") -> None:
        """Raises ValueError if the CPU lacks ``variant``, or AVX2."""
        self.engine = Engine(threads, variant)
        self._memory = PrivateMemory()  # for quantized weights
        self._run = self.engine.linear

    def packed_bytes(self, dtype: torch.dtype, cols: int, k_size: int) -> int:
        """Return the bytes of w [cols, k_size] in the variant's own order; 0 if it has none."""
        return self.engine.packed_bytes(TYPES[dtype], cols, k_size) if dtype in TYPES else 0

    def pack(self, w: Tensor, memory: PackedMemory) -> Tensor:
        """Return a copy of w [N, K] in that order, in ``memory``. Raises ValueError if the variant has none."""
        kind, (cols, k_size) = TYPES[w.dtype], w.shape
        to, is_there = memory.allocate(w, self.packed_bytes(w.dtype, cols, k_size))
        if not is_there:
            self.engine.pack(w.data_ptr(), to.data_ptr(), kind, cols, k_size, w.stride(0))
        return to

    def pack_quantized(self, w: QuantizedWeight) -> PackedWeight:
        """Return a copy of w in panels of columns."""
        form = PackedForm.of("native", w)
        numbers = native_form(form.encode()).numbers
        size = self.engine.quantized_bytes(form.cols, form.k_size, *numbers)
        if w.codes.is_meta:
            return PackedWeight(torch.empty(1, size, dtype=torch.uint8, device="meta"), form.encode())
        data, is_there = self._memory.allocate(w.codes, size)
        if not is_there:
            self._pack_into(data, w, form)
        return PackedWeight(data[None], form.encode())

    def _pack_into(self, data: Tensor, w: QuantizedWeight, form: PackedForm) -> None:
        codes, scales = w.codes.contiguous(), w.scales.contiguous()
        offsets = torch.empty(0) if w.offsets is None else w.offsets.contiguous()
        sources = codes.data_ptr(), scales.data_ptr(), offsets.data_ptr()
        numbers = native_form(form.encode()).numbers
        self.engine.pack_quantized(*sources, data.data_ptr(), form.cols, form.k_size, *numbers)

    def pack_quantized_experts(self, weights: Iterable[QuantizedWeight], count: int) -> PackedWeight:
        """Return copies of ``count`` weights in panels of columns: data [count, bytes]. Raises ValueError for
        weights of several forms.
        """
        data, form = torch.empty(0, dtype=torch.uint8), None
        for number, w in enumerate(weights):
            own = PackedForm.of("native", w)
            if form is None:
                form = own
                size = self.engine.quantized_bytes(form.cols, form.k_size, *native_form(form.encode()).numbers)
                data = self._memory.allocate(w.codes, count * size)[0].view(count, size)
            if own != form:
                raise ValueError("experts of several forms cannot be packed together")
            self._pack_into(data[number], w, form)
        assert form is not None
        return PackedWeight(data, form.encode())

    def linear_quantized_experts(self, x: Tensor, data: Tensor, ids: Tensor, b: Tensor | None, form: str) -> Tensor:
        """Return each row of x [rows, K] times the packed weight number ids[row] plus b[ids[row]]: [rows, N]."""
        return by_expert(self.linear_quantized, x, data, ids, b, form)

    def linear_quantized(self, x: Tensor, data: Tensor, b: Tensor | None, form: str) -> Tensor:
        """Return x [..., K] times the packed weight plus b [N], [..., N]. Raises ValueError for operands that do not
        fit.
        """
        known = native_form(form)
        known.form.check(x, b)
        x, b = x.contiguous(), None if b is None else b.contiguous()
        cols, k_size = known.form.cols, known.form.k_size
        y = torch.empty(*x.shape[:-1], cols, dtype=x.dtype)
        if y.numel():
            addresses = x.data_ptr(), data.data_ptr(), 0 if b is None else b.data_ptr(), y.data_ptr()
            rows = y.numel() // cols
            self.engine.linear_quantized(*addresses, TYPES[x.dtype], rows, cols, k_size, *known.numbers)
        return y

    def quantized_products(self) -> tuple[int, int]:
        """Return the number of products by packed quantized weights so far, and of those by rows of int8."""
        return self.engine.quantized_products()

    def quantized_rows(self, ids: Tensor, data: Tensor, form: str) -> Tensor:
        """Return rows ``ids`` [...] of the packed weight: [..., K], in fp32."""
        known, ids = native_form(form), ids.contiguous()
        y = torch.empty(*ids.shape, known.form.k_size, dtype=torch.float32)  # others may change the default
        sizes = ids.numel(), known.form.cols, known.form.k_size
        self.engine.quantized_rows(ids.data_ptr(), data.data_ptr(), y.data_ptr(), *sizes, *known.numbers)
        return y

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Return x [..., K] times w [N, K] plus b [N], [..., N], all of one dtype; without native code, torch computes
        it.
        """
        cols, k_size = w.shape
        rows = x.numel() // max(k_size, 1)
        kind = TYPES.get(x.dtype)
        if kind is None or w.dtype != x.dtype or not x.is_cpu:
            return F.linear(x, w, b)
        if w.stride(1) != 1 or not w.stride(0) or (b is not None and (b.dtype != x.dtype or not b.is_contiguous())):
            return F.linear(x, w, b)
        if x.shape[-1] != k_size or not w.numel() or (b is not None and b.shape != (cols,)):
            return F.linear(x, w, b)  # raises the error, if there is one
        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], cols, dtype=x.dtype)
        bias = 0 if b is None else b.data_ptr()
        self._run(x.data_ptr(), w.data_ptr(), bias, y.data_ptr(), kind, rows, cols, k_size, w.stride(0))
        return y


class NativeForm(NamedTuple):
    """A form, and the numbers by which the engine knows it; the last one is the address of ``values``."""

    form: PackedForm
    values: Tensor
    numbers: tuple[int, ...]


@lru_cache(maxsize=4096)
def native_form(text: str) -> NativeForm:
    """Return the form that PackedForm.encode has written, as the engine takes it. Raises ValueError for the order of
    another backend.
    """
    form = PackedForm.decode(text)
    if form.order != "native":
        raise ValueError(f"a weight in the order of {form.order}, which native does not multiply")
    values = torch.tensor(form.values, dtype=torch.float32)
    scaled = form.group or CHANNEL_BLOCK, int(not form.group), TYPES[form.scales], int(form.has_offsets)
    return NativeForm(form, values, (form.bits, *scaled, int(form.int8_inputs), values.data_ptr()))


def open_backend(threads: int) -> NativeLinear:
    """Open the backend on ``threads`` threads, at least one."""
    return NativeLinear(max(1, threads))
