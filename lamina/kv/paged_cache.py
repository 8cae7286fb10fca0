"""The KV tensors of a memory worker: K and V of each layer, written by position and read through block tables."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import RowRange

from .arena import HugePageArena, Shape, huge_page_zeros, prefault
from .stored_format import INTEGERS, Scales, StoredRows, bounds_dtype, dequantise, head_bytes, is_scaled

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LayerCache:
    """The KV blocks of one layer: k [N + 1, Hkv, block_size, D], v [N + 1, Hkv, block_size, Dv], contiguous. They have
    the store's dtype; with 8 bits they have ``scales``. Blocks 0 .. N - 1 hold tokens. Block N is the null block: it is
    always zero, and stands in for tokens that no query sees.
    """

    k: Tensor
    v: Tensor
    scales: Scales | None = None
    bounds: Tensor | None = None  # [2, N + 1, Hkv, D] least and largest K of whole blocks, if queries select blocks

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors K and V, and their scales if they have some."""
        return [self.k, self.v, *(self.scales or ())]

    @property
    def null_block(self) -> int:
        return self.k.shape[0] - 1

    @cached_property
    def token_bytes(self) -> int:
        """The bytes of a token's K and V in all heads."""
        return self.k.shape[1] * head_bytes(self.k.shape[3], self.v.shape[3], self.k.dtype)

    def copy_and_wipe(self, copies: Sequence[tuple[int, int]], freed: Sequence[int]) -> None:
        """Copy blocks with their bounds, and zero the ``freed`` blocks. Sources are read before anything is written, so
        a freed block may be a source or a target.
        """
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        for tensor in self.tensors if self.bounds is None else [*self.tensors, self.bounds.transpose(0, 1)]:
            blocks: Any = _bits(tensor) if tensor.device.type == "cpu" else tensor  # by numpy, as in ``write``
            stored = blocks[sources]
            blocks[freed] = 0
            blocks[targets] = stored

    def write(self, slot_mapping: SlotMapping, rows: StoredRows) -> None:
        """Write row r at its position, over what is there. ``rows`` have the store's dtype. A block's bounds are
        updated when its last token, which comes after all others, is written.
        """
        both = [(self.k, rows.k), (self.v, rows.v)]
        if self.scales is not None and rows.scales is not None:
            both += zip(self.scales, rows.scales, strict=True)
        for stored, new in both:
            if stored.device.type == "cpu":
                # numpy, since torch gives even a few rows to its threads, and waits for one that gets no core.
                _bits(stored)[slot_mapping.blocks.numpy(), :, slot_mapping.offsets.numpy()] = _bits(new)
            else:
                stored[slot_mapping.blocks, :, slot_mapping.offsets] = new
        if self.bounds is not None:
            self.update_bounds(slot_mapping.blocks[slot_mapping.offsets == self.k.shape[2] - 1])

    def update_bounds(self, blocks: Tensor) -> None:
        """Compute the bounds of ``blocks`` [n] int64 from the K that they hold, if queries select blocks."""
        if self.bounds is not None and len(blocks):
            keys = dequantise(self.k[blocks], self.scales.k[blocks] if self.scales else None)
            self.bounds[:, blocks] = torch.stack(torch.aminmax(keys, dim=2)).to(self.bounds.dtype)


def _bits(x: Tensor) -> NDArray[np.generic]:
    """Return a tensor as numpy's integers."""
    array: NDArray[np.generic] = x.view(INTEGERS[x.itemsize]).numpy()
    return array


@dataclass(frozen=True)
class SlotMapping:
    """The positions at which the rows of a step are stored, for one layer group: both [R] int64, on the store's
    device.
    """

    blocks: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class RowTable:
    """The rows of one step and their sequences' stored tokens, for one layer group: host arrays, built once a step.

    Sequence i of the step has rows ``row[i] .. row[i] + count[i]``, at positions from ``first[i]``. Column j of its
    block table holds the tokens from ``origin[i] + j * block_size``; columns that no query sees hold the null block. In
    a sequence that has lost blocks (DropBlocks), only the kept tokens are counted, so positions have no gaps.
    """

    window: int
    block_size: int
    null_block: int
    row: Ints  # [S]
    first: Ints  # [S]
    count: Ints  # [S]
    seen: Ints  # [S] the first stored token that any row sees; ``stop`` if none
    stop: Ints  # [S] the end of the stored tokens to attend, at most ``first``
    origin: Ints  # [S] ``seen`` rounded down to a multiple of ``align``
    table: Ints  # [S, W], W * block_size a multiple of ``align``

    @property
    def num_rows(self) -> int:
        return int(self.count.sum())

    def select_sequences(self, which: NDArray[np.bool_]) -> RowTable:
        """Return the table of some of the sequences [S], with rows numbered anew."""
        count = self.count[which]
        return replace(
            self,
            row=np.cumsum(count) - count,
            first=self.first[which],
            count=count,
            seen=self.seen[which],
            stop=self.stop[which],
            origin=self.origin[which],
            table=self.table[which],
        )


def row_table(
    tables: BlockTables,
    group: int,
    rows: Sequence[RowRange],
    *,
    align: int,
    ranges: Sequence[tuple[int, int]] | None = None,
) -> RowTable:
    """Return the row table of ``rows``, whose plan ``tables`` has applied. ``align``: tokens, a multiple of the block
    size. ``ranges[i]``: the stored tokens to attend of the sequence of ``rows[i]``; None for all before its first row.
    """
    size, window, null = tables.block_size, tables.windows[group], tables.num_blocks[group]
    columns, table = list[tuple[int, ...]](), array("q")
    for i, r in enumerate(rows):
        gone = len(tables.dropped_blocks(group, r.sequence)) * size
        low, stop = ranges[i] if ranges else (0, r.first)
        first, low, stop = r.first - gone, max(low - gone, 0), stop - gone
        seen = min(max(first - window + 1 if window else low, low), stop)
        columns.append((first, r.count, seen, stop, seen // align * align, gone))
    width = max((-(-(stop - origin) // align) * (align // size) for *_, stop, origin, _ in columns), default=0)
    for r, (_, _, seen, stop, origin, gone) in zip(rows, columns, strict=True):
        stored = tables.block_ids(group, r.sequence, seen // size, -(-(stop + gone) // size)) if seen < stop else ()
        before = (seen - origin) // size
        table.extend([null] * before)
        table.extend(stored)
        table.extend([null] * (width - before - len(stored)))
    of = np.array(list(zip(*columns, strict=True)), np.int64).reshape(6, -1)
    blocks = np.frombuffer(table, np.int64).reshape(len(rows), width)
    return RowTable(window, size, null, np.cumsum(of[1]) - of[1], of[0], of[1], of[2], of[3], of[4], blocks)


def slot_mapping(tables: BlockTables, group: int, rows: Sequence[RowRange], device: torch.device) -> SlotMapping:
    """Return the positions of ``rows``, whose plan ``tables`` has applied."""
    size, blocks, offsets = tables.block_size, array("q"), array("q")
    for r in rows:
        stop, at = r.first + r.count, r.first
        for block in tables.block_ids(group, r.sequence, r.first // size, -(-stop // size)):
            until = min(stop, at // size * size + size)
            blocks.extend([block] * (until - at))
            offsets.extend(range(at % size, at % size + until - at))
            at = until
    return SlotMapping(*(torch.frombuffer(x, dtype=torch.int64).to(device) for x in (blocks, offsets)))


def cache_shapes(
    num_blocks: int, kv_heads: int, block_size: int, qk_dim: int, v_dim: int, dtype: torch.dtype
) -> list[Shape]:
    """Return the shapes of one layer's tensors, null block included: K, V, and their scales if they have some."""
    shape = (num_blocks + 1, kv_heads, block_size)
    scales: list[Shape] = [(shape, torch.float32)] * 2 if is_scaled(dtype) else []
    return [((*shape, qk_dim), dtype), ((*shape, v_dim), dtype), *scales]


def allocate_layer(
    num_blocks: int,
    kv_heads: int,
    block_size: int,
    qk_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    slabs: HugePageArena | None = None,
    selects: bool = False,
) -> LayerCache:
    """Allocate the tensors of one layer, with a null block. ``slabs``: memory to use, with any contents. Without it,
    new memory is mapped now and all is zero. ``selects``: with bounds. Raises MemoryError, naming the size.
    """
    shapes = cache_shapes(num_blocks, kv_heads, block_size, qk_dim, v_dim, dtype)
    try:
        if device.type != "cpu":
            k, v, *scales = (torch.zeros(shape, dtype=kind, device=device) for shape, kind in shapes)
        elif slabs is None:
            k, v, *scales = (huge_page_zeros(shape, kind) for shape, kind in shapes)
            prefault([k, v, *scales])
        else:
            k, v, *scales = (slabs.allocate(shape, kind) for shape, kind in shapes)
            for each in (k, v, *scales):
                each[num_blocks] = 0
    except (RuntimeError, OSError, OverflowError) as e:
        nbytes = sum(prod(shape) * kind.itemsize for shape, kind in shapes)
        raise MemoryError(
            f"cannot allocate {nbytes} bytes for the KV blocks of a layer: lower --kv-cache-memory-bytes"
        ) from e
    bounds = torch.zeros((2, num_blocks + 1, kv_heads, qk_dim), dtype=bounds_dtype(dtype)) if selects else None
    return LayerCache(k, v, Scales(*scales) if scales else None, bounds)
