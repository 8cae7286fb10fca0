"""Linear layers by torch: whatever its build and the device offer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .packed_memory import PackedMemory, PrivateMemory


class TorchLinear:
    """torch.nn.functional.linear under the name of the seam."""

    has_own_threads = False
    packs_weights = False
    packed_memory: PackedMemory = PrivateMemory()  # which stay empty
    engine = None

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """x [..., K], w [N, K], b [N] -> [..., N], as torch computes it."""
        return F.linear(x, w, b)

    def packed_bytes(self, dtype: torch.dtype, cols: int, k_size: int) -> int:
        """0: weights stay as they are."""
        return 0

    def pack(self, w: Tensor) -> Tensor:
        """Raises ValueError."""
        raise ValueError("torch packs no weights")

    def max_engine_rows(self, dtype: torch.dtype) -> int:
        """0: there is no engine to be given rows."""
        return 0


def open_backend(threads: int) -> TorchLinear:
    """``threads`` is torch's own setting."""
    return TorchLinear()
