"""Linear layers by csrc/gemm: weights are read where they lie, or packed, by as many threads as the compute worker has.

Decoding has few rows, so a layer takes the time in which its weights are read. torch takes several times that for fp32,
and for bf16 on a CPU without bf16 instructions; with them (AVX512-BF16, AMX) twice that, unless it may keep a copy of
the weights in an order of its own. What native computes of a row depends on that row alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from . import Inline
from ._native import Engine, usable

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Rows of bf16 up to which native is at least as fast as torch, by variant, where torch has a product of its own for it
# (perf/README.md). The last two are for CPUs without bf16 instructions: others have a variant before them.
MOST_ROWS = {"amx": 128, "avx512_bf16": 64, "avx512": 32, "avx2": 32}
MOST_JOINED = 8  # weights that one call takes
SOURCE = Path(__file__).resolve().parents[1] / "csrc" / "gemm" / "linear_on.h"
NO_LIMIT = (1 << 63) - 1


class NativePacking:
    """See Packing."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self.name = name
        self._kept: list[tuple[Tensor, Tensor]] = []  # no other weights may come to lie where some of these were

    def nbytes(self, w: Tensor) -> int:
        """See Packing."""
        kind = TYPES.get(w.dtype)
        if kind is None or w.device.type not in ("cpu", "meta") or w.dim() != 2 or w.stride(1) != 1 or not w.numel():
            return 0
        cols, k_size = w.shape
        return self._engine.packed_bytes(kind, cols, k_size)

    def write(self, w: Tensor, copy: Tensor) -> None:
        """See Packing."""
        cols, k_size = w.shape
        self._engine.pack(w.data_ptr(), copy.data_ptr(), TYPES[w.dtype], cols, k_size, w.stride(0))

    def use(self, w: Tensor, copy: Tensor) -> None:
        """See Packing."""
        self._kept.append((w, copy))
        cols, k_size = w.shape
        self._engine.use(w.data_ptr(), copy.data_ptr(), TYPES[w.dtype], cols, k_size, w.stride(0))


class Native:
    """See LinearBackend."""

    own_threads = True

    def __init__(self, threads: int, variant: str = "") -> None:
        """Raises ValueError where the CPU lacks ``variant``, or AVX2."""
        engine = Engine(threads, variant)
        self._run = engine.linear
        self.most_rows: dict[torch.dtype, int] = {}  # by dtype, where there is a limit
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self.most_rows[torch.bfloat16] = MOST_ROWS[variant or usable()[0]]
        self.packing = NativePacking(engine, variant or usable()[0])
        facts = [*engine.addresses(), self.most_rows.get(torch.bfloat16, NO_LIMIT)]
        self.inline = Inline(SOURCE.read_text(), torch.tensor(facts))

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """See LinearBackend."""
        return self.linears(x, ((w, b),))[0]

    def linears(self, x: Tensor, weights: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """See LinearBackend."""
        if len(weights) > MOST_JOINED or not all(_fits(x, w, b) for w, b in weights):
            # F.linear says what is wrong, if anything is
            return [self.linear(x, *each) for each in weights] if len(weights) > 1 else [F.linear(x, *weights[0])]
        k_size = x.shape[-1]
        rows = x.numel() // k_size
        if rows > self.most_rows.get(x.dtype, rows):
            return [F.linear(x, w, b) for w, b in weights]
        x = x.contiguous()
        found, given = list[Tensor](), list[int]()
        for w, b in weights:
            y = torch.empty(*x.shape[:-1], w.shape[0], dtype=x.dtype)
            found.append(y)
            given += (w.data_ptr(), 0 if b is None else b.data_ptr(), y.data_ptr(), w.shape[0], w.stride(0))
        self._run(x.data_ptr(), TYPES[x.dtype], rows, k_size, *given)
        return found


def _fits(x: Tensor, w: Tensor, b: Tensor | None) -> bool:
    if x.dtype not in TYPES or not x.is_cpu or w.dtype != x.dtype:
        return False
    if w.stride(1) != 1 or w.shape[1] != x.shape[-1] or not w.numel():
        return False
    return b is None or (b.dtype == x.dtype and b.shape == w.shape[:1] and b.is_contiguous())


def open_backend(threads: int) -> Native:
    """On ``threads`` threads, at least one."""
    return Native(max(1, threads))
