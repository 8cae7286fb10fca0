"""How attention is spread over memory workers. A partition is data: it gives every message its layout."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one memory worker does of one layer: a range of KV heads, over a range of token chunks."""

    worker: int
    head_start: int
    head_stop: int
    chunk_start: int = 0  # in chunks of attention.merge.CHUNK_TOKENS tokens
    chunk_stop: int = 0  # 0 = to the end

    @property
    def num_kv_heads(self) -> int:
        return self.head_stop - self.head_start


class Partition(msgspec.Struct, frozen=True):
    """The shares of every layer. Layers with equal shares point at one table entry."""

    id: int
    num_workers: int
    tables: list[list[Share]]
    layer_table: list[int]  # layer -> index into tables

    def shares(self, layer: int) -> list[Share]:
        """The shares of ``layer`` in the order of their heads; together they cover all heads exactly once."""
        return self.tables[self.layer_table[layer]]

    def share(self, layer: int, worker: int) -> Share:
        """The share of ``worker`` in ``layer``. Raises KeyError if it has none."""
        for share in self.shares(layer):
            if share.worker == worker:
                return share
        raise KeyError(f"memory worker {worker} has no share in layer {layer} of partition {self.id}")


def by_head(kv_heads: Sequence[int], num_workers: int, *, id: int = 0) -> Partition:
    """Split the KV heads of every layer evenly, in order, over ``num_workers`` (arXiv 2405.01814 section 5).

    ``kv_heads[i]`` is layer i's number of KV heads. Raises ValueError where it is not a multiple of ``num_workers``.
    """
    tables: dict[int, list[Share]] = {}
    for layer, heads in enumerate(kv_heads):
        if heads % num_workers:
            fits = [str(b) for b in range(1, heads + 1) if all(h % b == 0 for h in kv_heads)]
            raise ValueError(
                f"--memory-workers {num_workers} does not divide the {heads} KV heads of layer {layer}: "
                f"use one of {', '.join(fits)}"
            )
        each = heads // num_workers
        tables.setdefault(heads, [Share(w, w * each, (w + 1) * each) for w in range(num_workers)])
    order = list(tables)
    return Partition(id, num_workers, [tables[h] for h in order], [order.index(h) for h in kv_heads])
