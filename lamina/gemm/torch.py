"""Linear layers by torch: whatever its build and the device offer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .pages import HugePages, Pages


class Torch:
    """torch.nn.functional.linear under the name of the seam."""

    own_threads = False
    packs = False
    pages: Pages = HugePages()  # which stay empty
    engine = None

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """x [..., K], w [N, K], b [N] -> [..., N], as torch computes it."""
        return F.linear(x, w, b)

    def packed_bytes(self, dtype: torch.dtype, cols: int, k_size: int) -> int:
        """0: weights stay as they are."""
        return 0

    def packed(self, w: Tensor) -> Tensor:
        """Raises ValueError."""
        raise ValueError("torch packs no weights")

    def rows_of(self, dtype: torch.dtype) -> int:
        """0: there is no engine to be given rows."""
        return 0


def open_backend(threads: int) -> Torch:
    """``threads`` is torch's own setting."""
    return Torch()
