"""The combination of all ranks' parts, with the same bits in every collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NARROW = (torch.bfloat16, torch.float16)


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of parts of one shape and dtype, in order; for 16 bits in fp32, and not rounded."""
    total = parts[0].to(torch.float32 if parts[0].dtype in _NARROW else parts[0].dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total


def concatenate_last_dim(parts: Tensor, shape: Sequence[int]) -> Tensor:
    """Concatenate ranks' tensors of ``shape`` [..., n], flat in the rows of ``parts``, to [..., ranks * n]."""
    return parts.view(len(parts), *shape).movedim(0, -2).flatten(-2).contiguous()
