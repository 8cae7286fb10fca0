"""Linear layers by torch: whatever its build and the device offer."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


class Torch:
    """torch.nn.functional.linear under the name of the seam."""

    own_threads = False
    inline = None

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """See LinearBackend."""
        return F.linear(x, w, b)


def open_backend(threads: int) -> Torch:
    """``threads`` is torch's own setting."""
    return Torch()
