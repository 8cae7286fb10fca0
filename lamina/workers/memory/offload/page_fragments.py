"""Pages of a memory worker's pool as page fragments (kv.pages), read from its blocks and written back to them.

A fragment does not depend on block sizes, partitions and workers. A worker that holds its head, and its page's KV
shard, can write it into its own blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.kv.paged_cache import LayerCache
from lamina.kv.pages import PAGE, SCALE_BYTES, FragmentFormat, PageFragment
from lamina.protocol.kv_placement import KvLocation
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.staging import Staging

from .state_fragments import StateFragments, StateSlot

Numbers = NDArray[np.uint8]


class PageBlocks(NamedTuple):
    """The blocks that hold the first ``tokens`` tokens of a page."""

    blocks: tuple[tuple[int, ...] | None, ...]  # by group; None: another worker holds them
    tokens: int


class _HeadRange(NamedTuple):
    """The heads of one piece. ``first``: the number of its first head in the whole model's layer."""

    layer: int
    first: int
    group: int
    form: FragmentFormat
    parts: tuple[Tensor, ...]  # K, V and their scales, if there are any: [N + 1, heads, block_size, ...]

    @property
    def num_heads(self) -> int:
        return self.parts[0].shape[1]


class StoreFragments:
    """The page fragments of a store, and those of its ``states``. ``rank``: of the tensor-parallel ranks, each of which
    has as many heads as this one.
    """

    def __init__(self, store: KvStore, rank: int = 0) -> None:
        self._store, self.states = store, StateFragments(store.states, len(store.bind_request.layers), rank)
        self._heads = [
            _HeadRange(layer, held.head_start + rank * shape.kv_heads, held.group, _form(stored.kv), _parts(stored.kv))
            for layer, shape in enumerate(store.bind_request.layers)
            for held, stored in zip(store.pieces[layer], store.layers[layer], strict=True)
        ]

    @property
    def num_layers(self) -> int:
        """The number of the model's attention layers."""
        return len(self._store.layers)

    @property
    def whole_page_fragments(self) -> frozenset[PageFragment]:
        """The fragments of a page that lies wholly here."""
        return frozenset(fragment for heads in self._heads for fragment in _atoms(heads))

    def locate(self, sequence: int, first: int, location: KvLocation, tokens: int = PAGE) -> PageBlocks | None:
        """Return the blocks of the page of ``tokens`` tokens from position ``first`` on; None if some were freed."""
        tables, lane = self._store.tables, self._store.placement.kv_shard_at(location, first)
        low, high = first // tables.block_size, -(-(first + tokens) // tables.block_size)
        blocks = list[tuple[int, ...] | None]()
        for group, lanes in enumerate(tables.kv_shards):
            if lane not in lanes:
                blocks.append(None)
                continue
            if tables.block_table(group, sequence)[0] > low or tables.length(sequence) < first + tokens:
                return None
            blocks.append(tuple(tables.block_ids(group, sequence, low, high)))
        return PageBlocks(tuple(blocks), tokens)

    def owns_page(self, first: int, location: KvLocation) -> bool:
        """Return whether this worker holds the page, or a part of it, from position ``first`` on of a sequence at
        ``location``.
        """
        lane = self._store.placement.kv_shard_at(location, first)
        return any(lane in lanes for lanes in self._store.tables.kv_shards)

    def nbytes(self, page_blocks: PageBlocks | StateSlot) -> int:
        """Return the bytes of the page's fragments that are here."""
        if isinstance(page_blocks, StateSlot):
            return self.states.nbytes(page_blocks)
        each = ((heads, page_blocks.blocks[heads.group]) for heads in self._heads)
        return sum(heads.num_heads * heads.form.nbytes(page_blocks.tokens) for heads, ids in each if ids is not None)

    def read(
        self, page_blocks: PageBlocks | StateSlot, staging: Staging, layers: range | None = None
    ) -> dict[PageFragment, memoryview]:
        """Return a copy of the page's fragments that are here. ``staging``: of the calling thread; the device has
        finished writing the blocks. ``layers``: only of these.
        """
        if isinstance(page_blocks, StateSlot):
            return self.states.read(page_blocks)
        copies = dict[PageFragment, memoryview]()
        for heads, ids, fragments in self._room(page_blocks, layers):
            parts, numbers = heads.parts, list(ids)
            if staging.is_separate:
                parts, numbers = staging.to_host(*(part[numbers] for part in parts)), list(range(len(ids)))
            for part, room in zip(parts, _split(heads, fragments, page_blocks.tokens), strict=True):
                blocks, size = _bytes(part), part.shape[2]
                for first, number in zip(range(0, page_blocks.tokens, size), numbers, strict=True):
                    rows = room[:, first : first + size]
                    rows[:] = blocks[number][:, : rows.shape[1]]  # the only copy
            copies |= _named(heads, fragments)
        return copies

    def buffers(
        self, page_blocks: PageBlocks | StateSlot, layers: range | None = None
    ) -> dict[PageFragment, memoryview]:
        """Return buffers for the page's fragments that are here. ``layers``: only of these; states are loaded whole."""
        if isinstance(page_blocks, StateSlot):
            return self.states.buffers(page_blocks)
        rooms = self._room(page_blocks, layers)
        return {fragment: data for heads, _, fragments in rooms for fragment, data in _named(heads, fragments).items()}

    def write(
        self,
        page_blocks: PageBlocks | StateSlot,
        fragments: Mapping[PageFragment, memoryview],
        staging: Staging,
        layers: range | None = None,
    ) -> None:
        """Write ``fragments``, filled buffers of ``buffers``, to the page's blocks. ``staging``: of the calling thread,
        whose device may still be writing afterwards.
        """
        if isinstance(page_blocks, StateSlot):
            self.states.write(page_blocks, fragments)
            return
        for heads, ids, room in self._room(page_blocks, layers):
            for row, fragment in zip(room, _atoms(heads), strict=True):
                row[:] = np.frombuffer(fragments[fragment], np.uint8)
            for part, new in zip(heads.parts, _split(heads, room, page_blocks.tokens), strict=True):
                for number, block in enumerate(ids):
                    size = part.shape[2]
                    rows = new[:, number * size : (number + 1) * size]
                    if staging.is_separate:
                        here = part[block, :, : rows.shape[1]]
                        fresh = torch.from_numpy(np.ascontiguousarray(rows)).view(part.dtype)
                        here.copy_(staging.to_device(fresh.view(here.shape)))
                    else:
                        _bytes(part[block])[:, : rows.shape[1]] = rows

    def _room(
        self, page_blocks: PageBlocks, layers: range | None = None
    ) -> Iterator[tuple[_HeadRange, tuple[int, ...], Numbers]]:
        """Yield each piece that the page has here, its blocks, and memory for its fragments, [heads, bytes]."""
        for heads in self._heads:
            ids = page_blocks.blocks[heads.group]
            if ids is not None and (layers is None or heads.layer in layers):
                yield heads, ids, np.empty((heads.num_heads, heads.form.nbytes(page_blocks.tokens)), np.uint8)


def _form(kv: LayerCache) -> FragmentFormat:
    k, v = (x.shape[3] * x.itemsize for x in (kv.k, kv.v))
    return FragmentFormat(k, v, SCALE_BYTES if kv.scales is not None else 0)


def _parts(kv: LayerCache) -> tuple[Tensor, ...]:
    return (kv.k, kv.v) if kv.scales is None else (kv.k, kv.v, *(x.unsqueeze(-1) for x in kv.scales))


def _atoms(heads: _HeadRange) -> list[PageFragment]:
    return [PageFragment(heads.layer, heads.first + head) for head in range(heads.num_heads)]


def _named(heads: _HeadRange, fragments: Numbers) -> dict[PageFragment, memoryview]:
    return {fragment: memoryview(row) for fragment, row in zip(_atoms(heads), fragments, strict=True)}


def _split(heads: _HeadRange, fragments: Numbers, tokens: int) -> Iterator[Numbers]:
    """Return the bytes of each part of ``heads``: [heads, tokens, bytes of a token], without copies."""
    at = 0
    for part in heads.parts:
        each = part.shape[3] * part.itemsize
        yield fragments[:, at : at + tokens * each].reshape(len(fragments), tokens, each)
        at += tokens * each


def _bytes(blocks: Tensor) -> Numbers:
    """Return [..., block_size, bytes of a token] without a copy, by numpy, which uses no threads."""
    array: Numbers = blocks.view(torch.uint8).numpy()
    return array
