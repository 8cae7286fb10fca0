"""The reference backend: batched matrix products in torch, any device, fp32 arithmetic.

Shapes: S sequences of one tile, c rows of each, P (sequence, chunk) pairs, H KV heads, G query heads per KV head, C =
CHUNK_TOKENS. Every pair is one item of a batched product of a fixed shape, [c G, D] x [D, C], because the result of a
product may depend on its shape; on CPUs it does not depend on the number of items, as long as that is not one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lamina.attention import Operator
from lamina.attention.merge import CHUNK_TOKENS, Fold, Node, Partial, merge, root
from lamina.kv.pool import Ints, LayerStore, RowTable

TILE_BYTES = 16 << 20  # scratch of one tile, about; results do not depend on it
NEW_ROWS = 256  # rows of a prompt whose causal square is computed at once; results do depend on it

_LOWEST = torch.finfo(torch.float32).min


def open_backend(device: torch.device) -> Reference:
    """The backend on ``device``."""
    return Reference(device)


@dataclass(frozen=True)
class _Equal:
    """The sequences of a step that have ``count`` rows each."""

    count: int
    members: Ints  # [S] numbers of the sequences in the row table
    rows: Tensor | None  # [S count] int64; None = all rows of the step, in order


class _Prepared:
    """A step's sequences by their number of rows, and the tiles of their stored tokens."""

    def __init__(self, table: RowTable, device: torch.device) -> None:
        self.table = table
        self.device = device
        self.equal: list[_Equal] = []
        for count in np.unique(table.count):
            members = np.flatnonzero(table.count == count)
            rows = (table.row[members, None] + np.arange(count)).reshape(-1)
            whole = len(rows) == table.num_rows
            self.equal.append(_Equal(int(count), members, None if whole else torch.from_numpy(rows).to(device)))
        self._tiles: dict[tuple[int, ...], list[list[_Tile]]] = {}

    def tiles(self, op: Operator) -> list[list[_Tile]]:
        """The tiles of every entry of ``equal``, for the shape of ``op``."""
        shape = (op.q_heads, op.kv_heads, op.qk_dim, op.v_dim)
        if shape not in self._tiles:
            self._tiles[shape] = [list(self._cut(equal, op)) for equal in self.equal]
        return self._tiles[shape]

    def _cut(self, equal: _Equal, op: Operator) -> Iterator[_Tile]:
        """Whole sequences while they fit; a longer one in aligned runs of chunks, one run a tile."""
        table, count = self.table, equal.count
        pair_bytes = 4 * (CHUNK_TOKENS * op.kv_heads * (op.qk_dim + op.v_dim) + count * op.q_heads * 2 * CHUNK_TOKENS)
        most = max(1, TILE_BYTES // pair_bytes)
        chunks = -(-(table.first - table.origin)[equal.members] // CHUNK_TOKENS)
        fits: list[int] = []
        for i, n in enumerate(chunks):
            if n == 0:
                continue
            if fits and int(chunks[fits].sum()) + n > most:
                yield _Tile(self, equal, op, fits, None)
                fits = []
            if n <= most:
                fits.append(i)
                continue
            level = most.bit_length() - 1
            base = int(table.origin[equal.members[i]]) // CHUNK_TOKENS
            for index in range(base >> level, ((base + int(n) - 1) >> level) + 1):
                yield _Tile(self, equal, op, [i], Node(level, index))
        if fits:
            yield _Tile(self, equal, op, fits, None)


class _Tile:
    """Some pairs that are computed together: whole sequences (``node`` None), or a node of the only one."""

    def __init__(self, step: _Prepared, equal: _Equal, op: Operator, members: list[int], node: Node | None) -> None:
        table, device = step.table, step.device
        self.node = node
        self.members = members
        self.whole = node is None and len(members) == len(equal.members)  # all sequences of ``equal``
        numbers = equal.members[members]
        base = table.origin[numbers] // CHUNK_TOKENS
        count = -(-table.first[numbers] // CHUNK_TOKENS) - base
        pair = np.repeat(np.arange(len(members)), count)
        index = np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count) + base[pair]
        if node is not None:
            inside = index >> node.level == node.number
            pair, index = pair[inside], index[inside]
        seen = _visible(table, numbers[pair], index, equal.count)
        order = np.argsort(~seen.all((1, 2)), kind="stable")  # pairs with nothing to mask first
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        self.merges = [tuple(torch.from_numpy(place[x]).to(device) for x in level) for level in _levels(pair, index)]
        self.roots = torch.from_numpy(place[np.flatnonzero(np.diff(pair, prepend=-1))]).to(device)
        pair, index, seen = pair[order], index[order], seen[order]
        self.pairs = len(pair)
        self.sequence = torch.from_numpy(pair).to(device)
        self.masked_from = int(seen.all((1, 2)).sum())
        self.mask = torch.from_numpy(~seen[self.masked_from :, None, :, None]).to(device)  # [., 1, c, 1, C]
        per_chunk = CHUNK_TOKENS // table.block_size
        blocks = table.table.reshape(len(table.row), -1, per_chunk)[numbers[pair], index - base[pair]]
        heads = np.arange(op.kv_heads)
        self.blocks = torch.from_numpy((blocks[:, None] * op.kv_heads + heads[:, None]).reshape(-1)).to(device)
        stale = ~seen.any(1) & np.repeat(blocks != table.null_block, table.block_size, 1)
        at, token = np.nonzero(stale)
        self.stale = torch.from_numpy(((at[:, None] * op.kv_heads + heads) * CHUNK_TOKENS + token[:, None]).reshape(-1))
        self.stale = self.stale.to(device)
        self._position = index[:, None] * CHUNK_TOKENS + np.arange(CHUNK_TOKENS)
        self._query = table.first[numbers[pair], None] + np.arange(equal.count)
        self._device = device

    @cached_property
    def distance(self) -> Tensor:
        """Key position less query position, [P, 1, c, 1, C] fp32."""
        distance = (self._position[:, None] - self._query[:, :, None]).astype(np.float32)
        return torch.from_numpy(distance[:, None, :, None]).to(self._device)


def _visible(
    table: RowTable, numbers: Ints, index: Ints, count: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which stored tokens of a chunk a row sees: [P, c, C] for chunk ``index[p]`` of sequence ``numbers[p]``."""
    position = (index[:, None] * CHUNK_TOKENS + np.arange(CHUNK_TOKENS))[:, None]
    first = table.first[numbers, None, None]
    seen = np.broadcast_to(position < first, (len(index), count, CHUNK_TOKENS))
    if table.window:
        seen = seen & (position > first + np.arange(count)[:, None] - table.window)
    return seen


def _levels(run: Ints, index: Ints) -> list[tuple[Ints, Ints]]:
    """The merges of the aligned tree, level by level: (left, right) entries; the result stands in for left.

    Entries are sorted by (run, index). When all is done, the first entry of every run holds its root.
    """
    levels, entry = [], np.arange(len(run))
    while len(np.unique(run)) < len(run):
        siblings = (run[1:] == run[:-1]) & (index[1:] >> 1 == index[:-1] >> 1)
        if siblings.any():
            levels.append((entry[:-1][siblings], entry[1:][siblings]))
        keep = np.concatenate([[True], ~siblings])
        entry, run, index = entry[keep], run[keep], index[keep] >> 1
    return levels


class Reference:
    """See ``AttentionBackend`` for the contract."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def prepare(self, rows: RowTable) -> _Prepared:
        return _Prepared(rows, self._device)

    def attend_stored(self, op: Operator, prepared: _Prepared, store: LayerStore, q: Tensor) -> Partial:
        out: Partial | None = None
        for equal, tiles in zip(prepared.equal, prepared.tiles(op), strict=True):
            folds: dict[int, Fold] = {}
            q_heads = _by_kv_head(q if equal.rows is None else q[equal.rows], equal.count, op.kv_heads)
            q_heads = q_heads.to(torch.float32) * op.spec.scale
            for tile in tiles:
                part = self._attend_tile(op, tile, store, q_heads, equal.count)
                if equal.rows is None and tile.whole:
                    return _by_row(part, equal.count)
                if tile.node is not None:
                    folds.setdefault(tile.members[0], Fold()).push(tile.node, part)
                    continue
                out = out or self._empty(op, q.shape[0])
                _put(out, prepared.table, equal, tile.members, part)
            for member, fold in folds.items():
                out = out or self._empty(op, q.shape[0])
                _put(out, prepared.table, equal, [member], root(fold.nodes))
        return out or self._empty(op, q.shape[0])

    def attend_new(self, op: Operator, prepared: _Prepared, q: Tensor, k: Tensor, v: Tensor) -> Partial:
        out: Partial | None = None
        for equal in prepared.equal:
            if equal.count == 1:
                rows = equal.rows
                part = _attend_self(op, *((q, k, v) if rows is None else (q[rows], k[rows], v[rows])))
                if rows is None:
                    return part
                out = out or self._empty(op, q.shape[0])
                out.o[rows], out.lse[rows] = part
                continue
            out = out or self._empty(op, q.shape[0])
            for start in prepared.table.row[equal.members]:
                rows_of = slice(int(start), int(start) + equal.count)
                self._attend_square(op, q[rows_of], k[rows_of], v[rows_of], Partial(out.o[rows_of], out.lse[rows_of]))
        return out or self._empty(op, q.shape[0])

    def _attend_tile(self, op: Operator, tile: _Tile, store: LayerStore, q_heads: Tensor, count: int) -> Partial:
        """The roots of the tile's sequences, or its node: o [S, H, c, G, Dv], lse [S, H, c, G]."""
        heads, groups = op.kv_heads, op.q_heads // op.kv_heads
        if len(tile.members) != q_heads.shape[0]:
            q_heads = q_heads[torch.tensor(tile.members, device=q_heads.device)]
        q_pairs = q_heads.index_select(0, tile.sequence)
        k = self._gather("k", store.k, tile).view(tile.pairs * heads, CHUNK_TOKENS, op.qk_dim)
        v = self._gather("v", store.v, tile).view(tile.pairs * heads, CHUNK_TOKENS, op.v_dim)
        v.view(-1, op.v_dim).index_fill_(0, tile.stale, 0.0)
        score = _bmm(q_pairs.flatten(0, 1), k.transpose(1, 2))
        by_pair = score.view(tile.pairs, heads, count, groups, CHUNK_TOKENS)
        if op.spec.softcap:
            score.div_(op.spec.softcap).tanh_().mul_(op.spec.softcap)
        if op.slopes is not None:
            by_pair += op.slopes.view(1, heads, 1, groups, 1) * tile.distance
        by_pair[tile.masked_from :].masked_fill_(tile.mask, float("-inf"))
        o, lse = _softmax(score, v)
        o, lse = o.view(*by_pair.shape[:-1], op.v_dim), lse.view(by_pair.shape[:-1])
        for left, right in tile.merges:
            o[left], lse[left] = merge(Partial(o[left], lse[left]), Partial(o[right], lse[right]))
        return Partial(o.index_select(0, tile.roots), lse.index_select(0, tile.roots))

    def _attend_square(self, op: Operator, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
        """Causal attention of one sequence's rows over each other, some rows at a time."""
        heads, groups, window = op.kv_heads, op.q_heads // op.kv_heads, op.spec.window
        k_heads, v_heads = k.float().transpose(0, 1), v.float().transpose(0, 1)
        for start in range(0, q.shape[0], NEW_ROWS):
            stop = min(start + NEW_ROWS, q.shape[0])
            low = max(0, start - window + 1) if window else 0
            q_part = _by_kv_head(q[start:stop], stop - start, heads)[0].to(torch.float32) * op.spec.scale
            score = _bmm(q_part, k_heads[:, low:stop].transpose(1, 2))
            by_row = score.view(heads, stop - start, groups, stop - low)
            distance = torch.arange(low, stop, device=q.device) - torch.arange(start, stop, device=q.device)[:, None]
            if op.spec.softcap:
                score.div_(op.spec.softcap).tanh_().mul_(op.spec.softcap)
            if op.slopes is not None:
                by_row += op.slopes.view(heads, 1, groups, 1) * distance[:, None].float()
            hidden = (distance > 0) | (distance <= -window) if window else distance > 0
            by_row.masked_fill_(hidden[:, None], float("-inf"))
            o, lse = _softmax(score, v_heads[:, low:stop])
            shape = (heads, stop - start, groups)
            out.o[start:stop].view(shape[1], heads, groups, -1).copy_(o.view(*shape, -1).transpose(0, 1))
            out.lse[start:stop].view(shape[1], heads, groups).copy_(lse.view(shape).transpose(0, 1))

    def _gather(self, name: str, stored: Tensor, tile: _Tile) -> Tensor:
        """The tile's chunks of a store, every head's tokens together, in fp32."""
        flat = stored.view(-1, stored.shape[2] * stored.shape[3])
        shape = (tile.blocks.numel(), flat.shape[1])
        raw = self._buffer(name + "_raw", shape, stored.dtype)
        torch.index_select(flat, 0, tile.blocks, out=raw)
        return raw if stored.dtype == torch.float32 else self._buffer(name, shape, torch.float32).copy_(raw)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Scratch that is kept, because fresh pages cost more than what is done with them."""
        numel = int(np.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel or buffer.dtype != dtype:
            buffer = self._buffers[name] = torch.empty(numel, dtype=dtype, device=self._device)
        return buffer[:numel].view(shape)

    def _empty(self, op: Operator, rows: int) -> Partial:
        o = torch.zeros(rows, op.q_heads, op.v_dim, device=self._device)
        return Partial(o, torch.full((rows, op.q_heads), float("-inf"), device=self._device))


def _by_kv_head(x: Tensor, count: int, kv_heads: int) -> Tensor:
    """[S c, Hq, D] -> [S, Hkv, c G, D]."""
    split = x.view(-1, count, kv_heads, x.shape[1] // kv_heads, x.shape[2])
    return split.transpose(1, 2).flatten(2, 3)


def _by_row(part: Partial, count: int) -> Partial:
    """[S, H, c, G, ...] -> [S c, Hq, ...]."""
    o, lse = part.o.transpose(1, 2), part.lse.transpose(1, 2)
    return Partial(o.flatten(2, 3).flatten(0, 1), lse.flatten(2, 3).flatten(0, 1))


def _put(out: Partial, table: RowTable, equal: _Equal, members: list[int], part: Partial) -> None:
    rows = (table.row[equal.members[members], None] + np.arange(equal.count)).reshape(-1)
    at = torch.from_numpy(rows).to(out.o.device)
    out.o[at], out.lse[at] = _by_row(part, equal.count)


def _attend_self(op: Operator, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Every row over itself alone: o is v, lse is the score."""
    rows, heads, groups = q.shape[0], op.kv_heads, op.q_heads // op.kv_heads
    q_split = q.view(rows, heads, groups, -1).to(torch.float32) * op.spec.scale
    score = (q_split * k.to(torch.float32).unsqueeze(2)).sum(-1)
    if op.spec.softcap:
        score.div_(op.spec.softcap).tanh_().mul_(op.spec.softcap)
    o = v.to(torch.float32).unsqueeze(2).expand(rows, heads, groups, -1)
    return Partial(o.reshape(rows, op.q_heads, -1), score.view(rows, op.q_heads))


def _softmax(score: Tensor, v: Tensor) -> Partial:
    """score [B, X, C] (overwritten), v [B, C, Dv] -> o [B, X, Dv], lse [B, X]; rows of -inf are empty."""
    high = score.amax(-1)
    score.sub_(high.clamp_min(_LOWEST).unsqueeze(-1)).exp_()
    total = score.sum(-1).clamp_min_(1.0)  # the highest one counts 1, so this touches nothing but empty rows
    o = _bmm(score, v).div_(total.unsqueeze(-1))
    return Partial(o, total.log_().add_(high))


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product whose items do not depend on their number: a single one would take another path."""
    if a.shape[0] > 1:
        return torch.bmm(a, b)
    return torch.bmm(torch.cat([a, a]), torch.cat([b, b]))[:1]
