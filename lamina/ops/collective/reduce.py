"""What every collective makes of the parts of all ranks: the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NARROW = (torch.bfloat16, torch.float16)


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of parts of one shape and dtype, one after the other; in fp32 for those of 16 bits, and not rounded."""
    total = parts[0].to(torch.float32 if parts[0].dtype in _NARROW else parts[0].dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total


def concatenate_last_dim(parts: Tensor, shape: Sequence[int]) -> Tensor:
    """What ranks have of ``shape`` [..., n], flat in the rows of ``parts`` -> [..., ranks * n]."""
    return parts.view(len(parts), *shape).movedim(0, -2).flatten(-2).contiguous()
