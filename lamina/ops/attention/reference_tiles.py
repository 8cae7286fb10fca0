"""The cut of a step's stored tokens into the reference backend's batched products. Only index tensors, built once a
step.

Sizes: S sequences of one tile, c rows of each, P (sequence, chunk) pairs, C = CHUNK_TOKENS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.kv.paged_cache import Ints, RowTable

from . import Operator
from .merge import CHUNK_TOKENS, MergeNode

TILE_BYTES = 16 << 20  # approximate scratch memory of one tile; results do not depend on it


@dataclass(frozen=True)
class EqualRowCount:
    """The sequences of a step that have ``count`` rows each."""

    count: int
    members: Ints  # [S] their numbers in the row table
    rows: Tensor | None  # [S c] int64; None: all rows of the step, in order


class PreparedStep:
    """A step's sequences by their number of rows, and the tiles of their stored tokens."""

    def __init__(self, table: RowTable, device: torch.device) -> None:
        self.table = table
        self.device = device
        self.equal: list[EqualRowCount] = []
        self._tiles: dict[tuple[int, ...], list[list[Tile]]] = {}
        for count in np.unique(table.count):
            members = np.flatnonzero(table.count == count)
            everybody = len(members) == len(table.count)
            rows = None if everybody else self.rows_of(members, int(count))
            self.equal.append(EqualRowCount(int(count), members, rows))

    def rows_of(self, numbers: Ints, count: int) -> Tensor:
        """Return [S c]: the rows of sequences that have ``count`` rows each."""
        rows = self.table.row[numbers, None] + np.arange(count)
        return torch.from_numpy(rows.reshape(-1)).to(self.device)

    def tiles(self, op: Operator) -> list[list[Tile]]:
        """Return the tiles of every entry of ``equal``, for the shape of ``op``."""
        shape = (op.q_heads, op.kv_heads, op.qk_dim, op.v_dim)
        if shape not in self._tiles:
            self._tiles[shape] = [list(self._cut(equal, op)) for equal in self.equal]
        return self._tiles[shape]

    def _cut(self, equal: EqualRowCount, op: Operator) -> Iterator[Tile]:
        """Yield tiles of whole sequences as far as they fit, and of a longer one in aligned runs of chunks, one run a
        tile.
        """
        table = self.table
        per_token = op.kv_heads * max(op.qk_dim, op.v_dim) + 2 * equal.count * op.q_heads
        most = max(1, TILE_BYTES // (4 * CHUNK_TOKENS * per_token))
        base = table.origin[equal.members] // CHUNK_TOKENS
        stop = -(-table.stop[equal.members] // CHUNK_TOKENS)
        fits, pairs = list[int](), 0
        for i in np.flatnonzero(stop > base).tolist():
            chunks = int(stop[i] - base[i])
            if chunks > most:
                level = most.bit_length() - 1
                for number in range(int(base[i]) >> level, (int(stop[i] - 1) >> level) + 1):
                    yield Tile(self, equal, op, [i], MergeNode(level, number))
                continue
            if pairs + chunks > most:
                yield Tile(self, equal, op, fits, None)
                fits, pairs = [], 0
            fits.append(i)
            pairs += chunks
        if fits:
            yield Tile(self, equal, op, fits, None)


class Tile:
    """The pairs that are computed together: all chunks of some sequences (``node`` None), or those under a node of one.
    Pairs in which every row sees every token come first; ``mask`` is for the others.
    """

    def __init__(
        self, step: PreparedStep, equal: EqualRowCount, op: Operator, members: list[int], node: MergeNode | None
    ) -> None:
        table, self._device = step.table, step.device
        self.node = node
        self.member = members[0]
        # Indices into equal.members.
        self.select = None if len(members) == len(equal.members) else self._to(np.array(members))
        self.numbers = equal.members[members]  # [S] in the row table
        pair, chunk = _pairs(table, self.numbers, node)
        seen = _visible(table, self.numbers[pair], chunk, equal.count)
        free = seen.all((1, 2))
        order = np.argsort(~free, kind="stable")
        place = np.argsort(order)
        self.merges = [(self._to(place[a]), self._to(place[b])) for a, b in _levels(pair, chunk)]
        self.roots = self._to(place[np.flatnonzero(np.diff(pair, prepend=-1))])  # [S] where the merges end
        pair, chunk, seen = pair[order], chunk[order], seen[order]
        self.num_pairs = len(pair)
        self.sequence = self._to(pair)  # [P] -> S
        self.masked_from = int(free.sum())
        self.mask = self._to(~seen[self.masked_from :, None, :, None])  # [., 1, c, 1, C]
        origin, size = table.origin[self.numbers[pair]], table.block_size
        width = CHUNK_TOKENS // size
        column = chunk * width - origin // size
        blocks = table.table[self.numbers[pair, None], column[:, None] + np.arange(width)]  # [P, C / size]
        heads = np.arange(op.kv_heads)[:, None]
        self.blocks = self._to((blocks[:, None] * op.kv_heads + heads).reshape(-1))  # [P H C / size] -> (block, head)
        # [P, C] tokens that no row sees, but that are read.
        stale = ~seen.any(1) & np.repeat(blocks != table.null_block, size, 1)
        at, token = np.nonzero(stale)
        self.stale = self._to(((at * op.kv_heads + heads) * CHUNK_TOKENS + token).reshape(-1))  # -> [P H C]
        self._chunk, self._query = chunk, table.first[self.numbers[pair], None] + np.arange(equal.count)

    @cached_property
    def distance(self) -> Tensor:
        """The key position minus the query position, [P, 1, c, 1, C] fp32."""
        position = self._chunk[:, None] * CHUNK_TOKENS + np.arange(CHUNK_TOKENS)
        distance = position[:, None] - self._query[:, :, None]
        return self._to(distance[:, None, :, None].astype(np.float32))

    def _to(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _pairs(table: RowTable, numbers: Ints, node: MergeNode | None) -> tuple[Ints, Ints]:
    """Return (sequence, chunk) of all pairs of sequences ``numbers``, in order; only those under ``node`` if it is
    given.
    """
    base = table.origin[numbers] // CHUNK_TOKENS
    count = -(-table.stop[numbers] // CHUNK_TOKENS) - base
    pair = np.repeat(np.arange(len(numbers)), count)
    chunk = np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count) + base[pair]
    inside = chunk >> node.level == node.number if node else slice(None)
    return pair[inside], chunk[inside]


def _visible(table: RowTable, numbers: Ints, chunk: Ints, count: int) -> NDArray[np.bool_]:
    """Return [P, c, C]: if a row of sequence ``numbers[p]`` sees a stored token of chunk ``chunk[p]``."""
    position = (chunk[:, None] * CHUNK_TOKENS + np.arange(CHUNK_TOKENS))[:, None]
    first, stop = table.first[numbers, None, None], table.stop[numbers, None, None]
    seen = np.broadcast_to(position < stop, (len(chunk), count, CHUNK_TOKENS))
    if table.window:
        seen = seen & (position > first + np.arange(count)[:, None] - table.window)
    return seen


def _levels(pair: Ints, chunk: Ints) -> list[tuple[Ints, Ints]]:
    """Return the merges of the aligned tree, level by level, as (left, right) entries; the left one gets the result.
    Entries are sorted by (pair, chunk). In the end the first entry of every sequence holds its root.
    """
    levels, entry, roots = [], np.arange(len(pair)), len(np.unique(pair))
    while len(entry) > roots:
        siblings = (pair[1:] == pair[:-1]) & (chunk[1:] >> 1 == chunk[:-1] >> 1)
        if siblings.any():
            levels.append((entry[:-1][siblings], entry[1:][siblings]))
        keep = np.concatenate([[True], ~siblings])
        entry, pair, chunk = entry[keep], pair[keep], chunk[keep] >> 1
    return levels
