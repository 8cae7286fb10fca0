"""Selection of the blocks that a query attends: those that may hold the keys with the highest scores.

A block's bounds are the least and the largest K of its tokens, element by element. No token of it scores higher than
the sum of the larger of both products (arXiv 2406.10774 section 3.2). Query heads that read one KV head attend the same
blocks. Each head measures blocks by the distance to its own best one; for a block the nearest head counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lamina.kv.paged_cache import Ints, LayerCache

if TYPE_CHECKING:
    from . import Operator

INFINITE = float("inf")


class BlockChoices(NamedTuple):
    """Rows that attend some blocks. By row, [., 6] numbers: the row in q, the range ``low .. high`` of its sequence's
    blocks that need not stay, and the number of its blocks. Then how many of that range stay, and where the row's
    blocks begin in ``blocks``.
    """

    numbers: Ints
    blocks: Ints  # ids


def select_blocks(op: Operator, store: LayerCache, choices: BlockChoices, q: Tensor, table: Tensor) -> None:
    """Write the selected blocks into ``table`` [choices, Hkv, W] int64, as ids in a store whose blocks have one head
    each. Later entries of a row are left as they are. q [R, Hq, D].
    """
    heads = torch.arange(op.kv_heads)[:, None]
    assert store.bounds is not None
    for number, (row, low, high, total, best, at) in enumerate(choices.numbers.tolist()):
        blocks = torch.from_numpy(choices.blocks[at : at + total])
        chosen = low + best_blocks(op, store.bounds, blocks[low:high], q[row], best)
        before, after = (torch.arange(*x).expand(op.kv_heads, -1) for x in ((0, low), (high, total)))
        kept = torch.cat([before, chosen, after], 1)
        table[number, :, : kept.shape[1]] = blocks[kept] * op.kv_heads + heads


def best_blocks(op: Operator, bounds: Tensor, blocks: Tensor, q: Tensor, count: int) -> Tensor:
    """Return the best ``count`` of ``blocks`` [B] int64 for one row, by KV head: indices into ``blocks``, ascending.
    ``bounds`` [2, N + 1, Hkv, D] of a store, q [Hq, D] -> [Hkv, count]. Sums are fp64; of equal blocks the later ones
    are taken. A head's result depends on its own queries and bounds alone.
    """
    least, most = bounds[:, blocks].to(torch.float64).transpose(1, 2).unsqueeze(2)  # [Hkv, 1, B, D]
    queries = q.to(torch.float64).view(op.kv_heads, -1, 1, op.qk_dim)
    high = torch.maximum(queries * least, queries * most).sum(-1) * op.spec.scale  # [Hkv, G, B]
    high = torch.where(high.isnan(), INFINITE, high)  # a query with a NaN must see it
    near = high - high.amax(-1, keepdim=True)
    near = torch.where(near.isnan(), INFINITE, near).amax(1)
    order = near.flip(-1).sort(descending=True, stable=True).indices[:, :count]
    return (len(blocks) - 1 - order).sort().values
