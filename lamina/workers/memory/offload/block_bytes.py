"""Whole blocks of a store as the bytes of messages, layer by layer, for another store of its shape."""

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
    """Of each piece of a layer K, V and their scales, behind each other."""

    def __init__(self, store: KvStore, part_bytes: int) -> None:
        """``part_bytes``: of a message, unless a block has more."""
        self._store, self._part_bytes = store, part_bytes

    @property
    def num_layers(self) -> int:
        return len(self._store.layers)

    @property
    def max_block_bytes(self) -> int:
        """Of a block in a layer."""
        return max(self._block_bytes(layer) for layer in range(self.num_layers))

    def runs(self, layer: int, blocks: int) -> Iterator[range]:
        """So many blocks, in parts."""
        step = max(1, self._part_bytes // self._block_bytes(layer))
        return (range(low, min(low + step, blocks)) for low in range(0, blocks, step))

    def nbytes(self, layer: int, run: range) -> int:
        """Of a part."""
        return len(run) * self._block_bytes(layer)

    def ids(self, sequence: int, first: int, count: int) -> list[Sequence[int]] | None:
        """By group, the blocks of tokens ``first .. first + count``; None where some are not there, or not whole."""
        tables = self._store.tables
        low, high = first // tables.block_size, (first + count) // tables.block_size
        if first < 0 or count <= 0 or first % tables.block_size or count % tables.block_size or any(tables.windows):
            return None
        with suppress(PlanError):
            if tables.length(sequence) >= first + count:
                return [tables.block_ids(group, sequence, low, high) for group in range(len(tables.windows))]
        return None

    def gather(self, layer: int, ids: Sequence[Sequence[int]], data: memoryview, staging: Staging) -> None:
        """Fill ``data`` with blocks. ``staging``: of the thread that calls."""
        for stored, blocks, room in self._parts(layer, ids, data):
            if staging.is_separate:
                room.copy_(staging.to_host(stored[blocks])[0])
            else:
                np.take(stored.numpy(), blocks.numpy(), 0, room.numpy(), "clip")  # torch would wake its threads

    def scatter(self, layer: int, ids: Sequence[Sequence[int]], data: memoryview, staging: Staging) -> None:
        """Fill blocks with ``data``."""
        for stored, blocks, came in self._parts(layer, ids, data):
            if staging.is_separate:
                stored[blocks] = staging.to_device(came)
            else:
                stored.numpy()[blocks.numpy()] = came.numpy()

    def _parts(
        self, layer: int, ids: Sequence[Sequence[int]], data: memoryview
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Each tensor of the layer, as integers, the blocks that are meant, and what they have of ``data``."""
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
