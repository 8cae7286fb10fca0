"""Scores of how much rows attend each block of their sequence, for any store on any device.

A score is a sum of integers, one for each row and query head, so that sums do not depend on how heads and layers are
distributed. The scores of one KV head are products of one shape, however many heads the worker has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.kv.paged_cache import LayerCache
from lamina.kv.stored_format import dequantise
from lamina.protocol.step_plan import SCORE_BITS

from .merge import CHUNK_TOKENS

if TYPE_CHECKING:
    from . import Operator

WEIGHT_BITS = 30  # bits of exp(score - highest), before the sum over tokens
_LOWEST = torch.finfo(torch.float32).min


def block_scores(op: Operator, store: LayerCache, blocks: Tensor, q: Tensor, seen: Tensor) -> Tensor:
    """Return the softmax weight that each row gives the tokens of each block, summed over rows and query heads.

    q [R, Hq, D] in the dtype of messages. ``blocks`` [B] int64: of the rows' sequence, in order, those of the rows
    included. ``seen`` [R] int64: how many tokens of these blocks a row sees, itself the last. Returns [B] int64 with
    SCORE_BITS bits; each row's and head's share is cut off after the last bit. Windows and ALiBi are not supported.
    """
    rows, size, each = q.shape[0], store.k.shape[2], op.q_heads // op.kv_heads
    width = CHUNK_TOKENS // size
    chunks = -(-len(blocks) // width)
    padded = torch.full((max(2, chunks) * width,), store.null_block, dtype=torch.int64, device=blocks.device)
    padded[: len(blocks)] = blocks
    at = torch.arange(len(padded) * size, device=blocks.device)
    hidden = (at >= seen[:, None]).view(rows, 1, -1, CHUNK_TOKENS)  # [R, 1, P, C]
    total = torch.zeros(len(padded), dtype=torch.int64, device=blocks.device)
    scaled = q.to(torch.float32) * op.spec.scale
    for head in range(op.kv_heads):
        scales = store.scales.k[padded, head] if store.scales is not None else None
        keys = dequantise(store.k[padded, head], scales).view(-1, CHUNK_TOKENS, op.qk_dim)
        heads = slice(head * each, (head + 1) * each)
        queries = scaled[:, heads].reshape(1, rows * each, -1).expand(len(keys), -1, -1)
        score = torch.bmm(queries, keys.transpose(1, 2)).transpose(0, 1).reshape(rows, each, -1, CHUNK_TOKENS)
        if op.spec.softcap:
            score.div_(op.spec.softcap).tanh_().mul_(op.spec.softcap)
        score.masked_fill_(hidden, float("-inf"))
        sink = None if op.sinks is None else op.sinks[heads].expand(rows, -1)
        total += _shares(score.nan_to_num_(float("-inf"), 0.0, float("-inf")), sink, size).sum((0, 1)).flatten()
    return total[: len(blocks)]


def _shares(score: Tensor, sink: Tensor | None, size: int) -> Tensor:
    """Return each block's share, [R, G, P, C / size] int64, of score [R, G, P, C] (overwritten) and sink [R, G]."""
    high = score.amax((2, 3))
    high = (high if sink is None else torch.maximum(high, sink)).clamp_min_(_LOWEST)
    weight = score.sub_(high[:, :, None, None]).exp_().mul_(float(1 << WEIGHT_BITS)).to(torch.int64)
    by_block = weight.view(*score.shape[:3], -1, size).sum(-1)
    whole = by_block.sum((2, 3))
    if sink is not None:
        whole += (sink - high).exp_().mul_(float(1 << WEIGHT_BITS)).to(torch.int64)
    return (by_block << SCORE_BITS).floor_divide(whole.clamp_min_(1)[:, :, None, None])
