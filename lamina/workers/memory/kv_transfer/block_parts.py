"""Whole KV blocks of a store as parts of transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import prod

import numpy as np
from torch import Tensor

from lamina.kv.stored_format import INTEGERS, head_bytes
from lamina.protocol.blocks.extents import PlanError
from lamina.utils.tensor_buffers import tensor_over
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.staging import Staging

from .transfer import TransferPart
from .transfer_link import PART_BYTES

# Copies between blocks of a tensor [N + 1, H, ...] of a store, whose indices are given, and a message [B, H, ...].
CopyBlocks = Callable[[Tensor, Sequence[int], Tensor, Staging], object]


def gather(stored: Tensor, ids: Sequence[int], message: Tensor, staging: Staging) -> None:
    """Copy blocks to a message."""
    if staging.is_separate:
        message.copy_(staging.to_host(stored[list(ids)])[0])
    elif stored.is_contiguous():
        np.take(stored.numpy(), ids, 0, message.numpy(), "clip")  # torch would wake its threads
    else:
        message.numpy()[:] = stored.numpy()[list(ids)]


def scatter(stored: Tensor, ids: Sequence[int], message: Tensor, staging: Staging) -> None:
    """Copy a message to blocks."""
    if staging.is_separate:
        stored[list(ids)] = staging.to_device(message)
    else:
        stored.numpy()[list(ids)] = message.numpy()  # ten times as fast as torch, which copies number by number


def block_parts(
    store: KvStore,
    layer: int,
    piece: int,
    ids: Sequence[int],
    copy: CopyBlocks,
    heads: tuple[int, int] | None = None,
) -> Iterator[TransferPart]:
    """Yield the parts that have blocks of one piece of a layer: K, V and their scales, if there are any. ``heads``: the
    first head, and the one after the last, counted from the piece's first one; None: all.
    """
    tensors = integers(store, layer, piece, heads)
    block_bytes = sum(prod(x.shape[1:]) * x.itemsize for x in tensors)
    step = max(1, PART_BYTES // block_bytes)
    for low in range(0, len(ids), step):
        some = ids[low : low + step]
        yield TransferPart(len(some) * block_bytes, partial(_copy_all, tensors, some, copy), layer)


def layer_parts(store: KvStore, ids: Sequence[Sequence[int]], copy: CopyBlocks) -> Iterator[TransferPart]:
    """Yield the parts that have blocks of all layers, one layer after another. ``ids``: by layer group."""
    for layer, pieces in enumerate(store.layers):
        for number, piece in enumerate(pieces):
            yield from block_parts(store, layer, number, ids[piece.group], copy)


def integers(store: KvStore, layer: int, piece: int, heads: tuple[int, int] | None = None) -> list[Tensor]:
    """Return a piece's tensors as integers, [N + 1, H, block_size, D] and so on, as numpy lacks some of their dtypes.
    ``heads``: as of block_parts.
    """
    start, stop = heads or (0, store.pieces[layer][piece].kv_heads)
    kv = store.layers[layer][piece].kv
    return [x.view(INTEGERS[x.itemsize]).narrow(1, start, stop - start) for x in kv.tensors]


def whole_blocks(store: KvStore, sequence: int, first: int, count: int) -> list[Sequence[int]] | None:
    """Return, by group, the blocks of tokens ``first .. first + count``; None if some are missing, or the first one is
    not whole. Rows that follow write the rest of the last one.
    """
    tables = store.tables
    low, high = first // tables.block_size, -(-(first + count) // tables.block_size)
    if first < 0 or count <= 0 or first % tables.block_size or any(tables.windows):
        return None
    with suppress(PlanError):
        if tables.length(sequence) >= first + count:
            return [tables.block_ids(group, sequence, low, high) for group in range(len(tables.windows))]
    return None


def max_block_bytes(store: KvStore) -> int:
    """Return the most bytes of a block of one layer, with all heads."""
    bind = store.bind_request
    return max(bind.kv.block_size * x.kv_heads * head_bytes(x.qk_dim, x.v_dim, store.kv_dtype) for x in bind.layers)


def _copy_all(
    tensors: Sequence[Tensor], ids: Sequence[int], copy: CopyBlocks, message: memoryview, staging: Staging
) -> None:
    at = 0
    for stored in tensors:
        shape = (len(ids), *stored.shape[1:])
        nbytes = prod(shape) * stored.itemsize
        copy(stored, ids, tensor_over(message[at : at + nbytes], stored.dtype).view(shape), staging)
        at += nbytes
