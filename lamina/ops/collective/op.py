"""The operators by which ranks of one model combine results: ``torch.ops.lamina.all_reduce`` and ``all_gather``.

They are captured with the model and stay in its slices, where ``lamina.ops.collective.bind`` gives them a collective.
Until then they compute as if every rank had this one's data, so that one rank alone can try a slice.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("lamina::all_reduce", mutates_args=())
def all_reduce(x: Tensor) -> Tensor:
    """Return the sum of all ranks' ``x``, on every rank."""
    return x.clone()


@all_reduce.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lamina::all_gather", mutates_args=())
def all_gather(x: Tensor, size: int) -> Tensor:
    """Return the ``x`` [..., n] of all ``size`` ranks concatenated, [..., size * n], on every rank."""
    return torch.cat([x] * size, dim=-1)


@all_gather.register_fake
def _(x: Tensor, size: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] * size)


ALL_REDUCE_OP = torch.ops.lamina.all_reduce.default
ALL_GATHER_OP = torch.ops.lamina.all_gather.default
