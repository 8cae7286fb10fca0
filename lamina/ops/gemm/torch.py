"""Linear layers by torch, with whatever its build and the device offer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import row_blocks
from .packed_memory import PackedMemory, PrivateMemory
from .quantized import QuantizedWeight


class TorchLinear:
    """Calls torch.nn.functional.linear."""

    has_own_threads = False
    packs_weights = False
    packed_memory: PackedMemory = PrivateMemory()  # stays empty
    engine = None

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Return x [..., K] times w [N, K] plus b [N], [..., N], as torch computes it."""
        return row_blocks.linear(x, w, b)

    def packed_bytes(self, dtype: torch.dtype, cols: int, k_size: int) -> int:
        """Return 0: weights stay as they are."""
        return 0

    def pack(self, w: Tensor) -> Tensor:
        """Raise ValueError: torch packs no weights."""
        raise ValueError("torch packs no weights")

    def quantized(self, w: QuantizedWeight) -> TorchQuantized:
        """Return the linear layer of w, whose fp32 values last for a call."""
        return TorchQuantized(w)

    def max_engine_rows(self, dtype: torch.dtype) -> int:
        """Return 0: there is no engine."""
        return 0


class TorchQuantized:
    """A QuantizedLinear that dequantizes its weight for each call."""

    def __init__(self, w: QuantizedWeight) -> None:
        offsets = None if w.offsets is None else w.offsets.clone()
        self._w = QuantizedWeight(w.codes.clone(), w.scales.clone(), offsets, w.values)

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales and offsets."""
        w = self._w
        return w.codes.nbytes + w.scales.nbytes + (0 if w.offsets is None else w.offsets.nbytes)

    def linear(self, x: Tensor, b: Tensor | None = None) -> Tensor:
        """Return x [..., K] times w [N, K] plus b [N], [..., N], computed in fp32."""
        return F.linear(x.float(), self._w.dequantized(torch.float32), None if b is None else b.float()).to(x.dtype)


def open_backend(threads: int) -> TorchLinear:
    """Open the backend; ``threads`` is torch's own setting."""
    return TorchLinear()
