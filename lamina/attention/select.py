"""Which blocks of its sequence a query attends: those that may hold the keys that it scores highest.

A block's bounds are the least and the largest K of its tokens, by number; no token of it scores higher than the sum of
the larger of both products (arXiv 2406.10774 section 3.2). Query heads that read one KV head attend the same blocks:
each counts bounds from its own best block on, and a block counts as much as the head says to which it is nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.attention import Operator

INFINITE = float("inf")


def best_blocks(op: Operator, bounds: Tensor, blocks: Tensor, q: Tensor, count: int) -> Tensor:
    """``count`` of ``blocks`` [B] int64 for one row, by KV head: numbers into ``blocks``, ascending, [Hkv, count].

    ``bounds`` [2, N + 1, Hkv, D] of a store, q [Hq, D]. Sums are of fp64; of blocks alike the later ones. What a head
    gets depends on its own queries and bounds alone.
    """
    least, most = bounds[:, blocks].to(torch.float64).transpose(1, 2).unsqueeze(2)  # [Hkv, 1, B, D]
    queries = q.to(torch.float64).view(op.kv_heads, -1, 1, op.qk_dim)
    high = torch.maximum(queries * least, queries * most).sum(-1) * op.spec.scale  # [Hkv, G, B]
    high = torch.where(high.isnan(), INFINITE, high)  # who has a NaN is to see it
    near = high - high.amax(-1, keepdim=True)
    near = torch.where(near.isnan(), INFINITE, near).amax(1)
    order = near.flip(-1).sort(descending=True, stable=True).indices[:, :count]
    return (len(blocks) - 1 - order).sort().values
