"""The reference backend: batched matrix products in torch, on any device.

Sizes: S sequences with c rows each, P (sequence, chunk) pairs, H KV heads, G query heads per KV head, C = CHUNK_TOKENS.

Every (pair, KV head) is one item of a batched product of a fixed shape, [c G, D] x [D, C]. The rounding of a
product may depend on its shape. On CPUs it does not depend on the number of items, if there are several. Nor does it
depend on the item, if all begin at a multiple of 64 bytes: so D and Dv are padded with zeros to a multiple of LANES.
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, RowTable
from lamina.kv.stored_format import StoredRows, dequantise

from . import AttentionBackend, Operator
from .merge import CHUNK_TOKENS, Fold, Merge, Partial, merge, root
from .reference_tiles import PreparedStep, Tile

LANES = 16  # fp32 numbers in 64 bytes
NEW_ROWS = 256  # rows of a prompt whose causal attention is computed at once; results depend on it

_LOWEST = torch.finfo(torch.float32).min


def open_backend(device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype) -> ReferenceAttention:
    """Open the backend on ``device``, for stores of any dtype."""
    return ReferenceAttention(device)


class ReferenceAttention(AttentionBackend):
    """The ``AttentionBackend`` in plain torch, with which others are compared."""

    def __init__(self, device: torch.device, merge: Merge = merge) -> None:
        """``merge``: the arithmetic of another backend, which computes other rows."""
        self._device = device
        self._merge = merge
        self._buffers: dict[torch.dtype, Tensor] = {}

    def prepare(self, rows: RowTable) -> PreparedStep:
        return PreparedStep(rows, self._device)

    def attend_stored(self, op: Operator, prepared: PreparedStep, store: LayerCache, q: Tensor) -> Partial:
        out: Partial | None = None
        for equal, tiles in zip(prepared.equal, prepared.tiles(op), strict=True):
            folds: dict[int, Fold] = {}
            q_equal = _by_kv_head(q if equal.rows is None else q[equal.rows], equal.count, op)
            for tile in tiles:
                part = self._attend_tile(op, tile, store, q_equal, equal.count)
                if equal.rows is None and tile.node is None and tile.select is None:
                    return _by_row(part)
                out = out or self._empty(op, q.shape[0])
                if tile.node is None:
                    _put(out, prepared.rows_of(tile.numbers, equal.count), part)
                else:
                    folds.setdefault(tile.member, Fold(self._merge)).push(tile.node, part)
            for member, fold in folds.items():
                out = out or self._empty(op, q.shape[0])
                _put(out, prepared.rows_of(equal.members[[member]], equal.count), root(fold.nodes, self._merge))
        return out or self._empty(op, q.shape[0])

    def attend_new(self, op: Operator, prepared: PreparedStep, q: Tensor, kv: StoredRows) -> Partial:
        scales = kv.scales or (None, None)
        k, v = dequantise(kv.k, scales[0]), dequantise(kv.v, scales[1])
        if prepared.equal[0].count == 1 and len(prepared.equal) == 1:
            return attend_self(op, q, k, v)
        out = self._empty(op, q.shape[0])
        for equal in prepared.equal:
            if equal.count == 1:
                rows = equal.rows
                out.o[rows], out.lse[rows] = attend_self(op, q[rows], k[rows], v[rows])
                continue
            for start in prepared.table.row[equal.members].tolist():
                of = slice(start, start + equal.count)
                _attend_causal(op, q[of], k[of], v[of], Partial(out.o[of], out.lse[of]))
        return out

    def _attend_tile(self, op: Operator, tile: Tile, store: LayerCache, q: Tensor, count: int) -> Partial:
        """Return the roots of the tile's sequences, or its node: o [S, H, c, G, Dv], lse [S, H, c, G]. q [S, H, c G,
        D].
        """
        q = q if tile.select is None else q.index_select(0, tile.select)
        scales = store.scales or (None, None)
        k = self._gather(store.k, scales[0], tile)
        score = _bmm(q.index_select(0, tile.sequence).flatten(0, 1), k.transpose(1, 2))
        by_pair = score.view(tile.num_pairs, op.kv_heads, count, -1, CHUNK_TOKENS)
        _modify(op, by_pair, tile.distance if op.slopes is not None else None)
        by_pair[tile.masked_from :].masked_fill_(tile.mask, float("-inf"))
        v = self._gather(store.v, scales[1], tile)  # overwrites k
        v.flatten(0, 1).index_fill_(0, tile.stale, 0.0)  # a weight of 0 does not remove a NaN
        flat = _softmax(score, v)
        o, lse = flat.o.view(*by_pair.shape[:-1], -1)[..., : op.v_dim], flat.lse.view(by_pair.shape[:-1])
        for left, right in tile.merges:
            o[left], lse[left] = self._merge(Partial(o[left], lse[left]), Partial(o[right], lse[right]))
        return Partial(o.index_select(0, tile.roots), lse.index_select(0, tile.roots))

    def _gather(self, stored: Tensor, scale: Tensor | None, tile: Tile) -> Tensor:
        """Return the tile's chunks, [P H, C, D padded] fp32. Overwrites the result of the last call."""
        blocks = stored.view(-1, stored.shape[2] * stored.shape[3])
        shape = (len(tile.blocks), blocks.shape[1])
        chunks = torch.index_select(blocks, 0, tile.blocks, out=self._buffer(shape, stored.dtype))
        if stored.dtype != torch.float32:
            chunks = self._buffer(shape, torch.float32).copy_(chunks)
        chunks = chunks.view(-1, CHUNK_TOKENS, stored.shape[3])
        if scale is not None:
            by_block = scale.view(-1, scale.shape[2]).index_select(0, tile.blocks)
            chunks.mul_(by_block.view(-1, CHUNK_TOKENS, 1))
        return _pad(chunks)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return scratch memory, kept for each dtype: new pages cost more than the work on them."""
        numel, buffer = prod(shape), self._buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[dtype] = torch.empty(numel, dtype=dtype, device=self._device)
        return buffer[:numel].view(shape)

    def _empty(self, op: Operator, rows: int) -> Partial:
        o = torch.zeros(rows, op.q_heads, op.v_dim, device=self._device)
        return Partial(o, torch.full((rows, op.q_heads), float("-inf"), device=self._device))


def attend_self(op: Operator, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attend every row over itself alone, k and v in fp32: o is v, lse is the score."""
    rows, group = q.shape[0], op.q_heads // op.kv_heads
    q = q.reshape(rows, op.kv_heads, group, -1).to(torch.float32) * op.spec.scale
    score = (q * k.unsqueeze(2)).sum(-1)
    _modify(op, score, None)
    o = v.repeat_interleave(group, 1)
    return Partial(o, score.view(rows, op.q_heads))


def _attend_causal(op: Operator, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
    """Attend one sequence's rows over each other, k and v in fp32, into ``out``, some rows at a time."""
    window, heads = op.spec.window, op.kv_heads
    k_heads, v_heads = (_pad(F.pad(x.transpose(0, 1), (0, 0, 0, LANES)).contiguous()) for x in (k, v))
    for start in range(0, q.shape[0], NEW_ROWS):
        stop = min(start + NEW_ROWS, q.shape[0])
        low = max(0, start - window + 1) if window else 0
        high = low + -(-(stop - low) // LANES) * LANES
        score = _bmm(_by_kv_head(q[start:stop], stop - start, op)[0], k_heads[:, low:high].transpose(1, 2))
        by_row = score.view(heads, stop - start, -1, high - low)
        distance = torch.arange(low, high, device=q.device) - torch.arange(start, stop, device=q.device)[:, None]
        _modify(op, by_row.unsqueeze(0), distance[None, None, :, None].to(torch.float32))
        hidden = (distance > 0) | (distance <= -window) if window else distance > 0
        by_row.masked_fill_(hidden[:, None], float("-inf"))
        flat = _softmax(score, v_heads[:, low:high])
        o, lse = flat.o.view(1, *by_row.shape[:-1], -1)[..., : op.v_dim], flat.lse.view(1, *by_row.shape[:-1])
        out.o[start:stop], out.lse[start:stop] = _by_row(Partial(o, lse))


def _modify(op: Operator, score: Tensor, distance: Tensor | None) -> None:
    """Apply softcap and ALiBi to score [., H, ., G, C], in place. ``distance``: None if it is 0 everywhere; the shape
    is free.
    """
    if op.spec.softcap:
        score.div_(op.spec.softcap).tanh_().mul_(op.spec.softcap)
    if op.slopes is not None and distance is not None:
        score += op.slopes.view(op.kv_heads, 1, -1, 1) * distance


def _softmax(score: Tensor, v: Tensor) -> Partial:
    """Return o [B, X, Dv], lse [B, X] of score [B, X, C] (overwritten) and v [B, C, Dv]; a row of -inf is empty."""
    high = score.amax(-1)
    score.sub_(high.clamp_min(_LOWEST).unsqueeze(-1)).exp_()
    total = score.sum(-1).clamp_min_(1.0)  # the highest one counts 1, so this changes only empty rows
    o = _bmm(score, v).div_(total.unsqueeze(-1))
    return Partial(o, total.log_().add_(high))


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Multiply batches so that no item depends on their number: torch would compute a single item differently."""
    if a.shape[0] > 1:
        return torch.bmm(a, b)
    return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]


def _pad(x: Tensor) -> Tensor:
    """Pad the last dimension with zeros to a multiple of LANES."""
    return F.pad(x, (0, -x.shape[-1] % LANES)) if x.shape[-1] % LANES else x


def _by_kv_head(q: Tensor, count: int, op: Operator) -> Tensor:
    """Return [S c, Hq, D] as [S, H, c G, D padded] fp32, scaled."""
    split = q.reshape(-1, count, op.kv_heads, op.q_heads // op.kv_heads, op.qk_dim)
    return _pad((split.to(torch.float32) * op.spec.scale).transpose(1, 2).flatten(2, 3))


def _by_row(part: Partial) -> Partial:
    """Return [S, H, c, G, ...] as [S c, Hq, ...]."""
    o, lse = part.o.transpose(1, 2), part.lse.transpose(1, 2)
    return Partial(o.flatten(2, 3).flatten(0, 1), lse.flatten(2, 3).flatten(0, 1))


def _put(out: Partial, rows: Tensor, part: Partial) -> None:
    out.o[rows], out.lse[rows] = _by_row(part)
