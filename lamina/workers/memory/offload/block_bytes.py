"""Whole blocks of a store as bytes of messages, layer by layer, for another store of the same shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod

import numpy as np
import torch
from torch import Tensor

from lamina.kv.stored_format import INTEGERS
from lamina.protocol.blocks.extents import PlanError
from lamina.utils.tensor_buffers import tensor_over
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.staging import Staging


class BlockBytes:
    """The bytes of blocks: K, V and their scales of each piece of a layer, one after another."""

    def __init__(self, store: KvStore, part_bytes: int) -> None:
        """``part_bytes``: the size of a message, unless a block is larger."""
        self._store, self._part_bytes = store, part_bytes

    @property
    def num_layers(self) -> int:
        return len(self._store.layers)

    @property
    def max_block_bytes(self) -> int:
        """The most bytes of a block in one layer."""
        return max(self._block_bytes(layer) for layer in range(self.num_layers))

    def runs(self, layer: int, blocks: int) -> Iterator[range]:
        """Split ``blocks`` blocks into runs, one for each message."""
        step = max(1, self._part_bytes // self._block_bytes(layer))
        return (range(low, min(low + step, blocks)) for low in range(0, blocks, step))

    def nbytes(self, layer: int, run: range) -> int:
        """Return the bytes of a run in one layer."""
        return len(run) * self._block_bytes(layer)

    def ids(self, sequence: int, first: int, count: int) -> list[Sequence[int]] | None:
        """Return, by group, the blocks of tokens ``first .. first + count``; None if some are missing, or not whole."""
        tables = self._store.tables
        low, high = first // tables.block_size, (first + count) // tables.block_size
        if first < 0 or count <= 0 or first % tables.block_size or count % tables.block_size or any(tables.windows):
            return None
        with suppress(PlanError):
            if tables.length(sequence) >= first + count:
                return [tables.block_ids(group, sequence, low, high) for group in range(len(tables.windows))]
        return None

    def gather(self, layer: int, ids: Sequence[Sequence[int]], data: memoryview, staging: Staging) -> None:
        """Copy blocks of a layer to ``data``. ``staging``: of the calling thread."""
        for stored, blocks, room in self._parts(layer, ids, data):
            if staging.is_separate:
                room.copy_(staging.to_host(stored[blocks])[0])
            else:
                np.take(stored.numpy(), blocks.numpy(), 0, room.numpy(), "clip")  # torch would wake its threads

    def scatter(self, layer: int, ids: Sequence[Sequence[int]], data: memoryview, staging: Staging) -> None:
        """Copy ``data`` to blocks of a layer. ``staging``: of the calling thread."""
        for stored, blocks, came in self._parts(layer, ids, data):
            if staging.is_separate:
                stored[blocks] = staging.to_device(came)
            else:
                stored.numpy()[blocks.numpy()] = came.numpy()

    def _parts(
        self, layer: int, ids: Sequence[Sequence[int]], data: memoryview
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each tensor of the layer as integers, the indices of its blocks, and its part of ``data``."""
        at = 0
        for group, stored in self._tensors(layer):
            shape = (len(ids[group]), *stored.shape[1:])
            nbytes = prod(shape) * stored.itemsize
            blocks = torch.tensor(ids[group], dtype=torch.int64, device=stored.device)
            yield stored, blocks, tensor_over(data[at : at + nbytes], stored.dtype).view(shape)
            at += nbytes

    def _tensors(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        for piece in self._store.layers[layer]:
            for x in piece.kv.tensors:
                yield piece.group, x.view(INTEGERS[x.itemsize])

    def _block_bytes(self, layer: int) -> int:
        return sum(prod(x.shape[1:]) * x.itemsize for _, x in self._tensors(layer))
