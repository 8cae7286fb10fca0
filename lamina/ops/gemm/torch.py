"""Linear layers by torch, with whatever its build and the device offer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .packed_memory import PackedMemory, PrivateMemory


class TorchLinear:
    """Calls torch.nn.functional.linear."""

    has_own_threads = False
    packs_weights = False
    packed_memory: PackedMemory = PrivateMemory()  # stays empty
    engine = None

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Return x [..., K] times w [N, K] plus b [N], [..., N], as torch computes it."""
        return F.linear(x, w, b)

    def packed_bytes(self, dtype: torch.dtype, cols: int, k_size: int) -> int:
        """Return 0: weights stay as they are."""
        return 0

    def pack(self, w: Tensor) -> Tensor:
        """Raise ValueError: torch packs no weights."""
        raise ValueError("torch packs no weights")

    def max_engine_rows(self, dtype: torch.dtype) -> int:
        """Return 0: there is no engine."""
        return 0


def open_backend(threads: int) -> TorchLinear:
    """Open the backend; ``threads`` is torch's own setting."""
    return TorchLinear()
