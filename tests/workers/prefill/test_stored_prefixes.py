"""Stored beginnings of prompts, from memory workers to a prefill worker: the same bits under each partition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from memory_peer import WAIT_S, bind, shape
from msgspec.structs import replace

from lamina import netstack
from lamina.config.engine_config import Deadlines
from lamina.config.partition import PARTITIONS, by_head
from lamina.netstack import ListenTerms
from lamina.protocol.control import Address, TransferPeer
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.prefix_fetch import ConnectPrefillPeers
from lamina.protocol.step_plan import (
    MEMORY_WORKERS,
    FetchPrefix,
    New,
    PrefillGrant,
    RowRange,
    SequenceOp,
    StepPlan,
)
from lamina.workers.compute.attention_client import MissingKvError
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer.peer_links import PeerLinks
from lamina.workers.memory.kv_transfer.prefix_send import PrefixSender
from lamina.workers.memory.kv_transfer.transfer import TransferError
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.prefill.prefix_fetch import PrefixFetch
from lamina.workers.prefill.stored_prefixes import stored_prefixes

CPU = torch.device("cpu")
DEADLINES = Deadlines(start_timeout_s=WAIT_S, step_timeout_s=WAIT_S)
LAYERS = [shape(kv_heads=4), shape(kv_heads=2), shape(kv_heads=4)]
STORED, BLOCK = 448, 16  # tokens that memory workers have
PLACE = KvLocation(1)


class Pools:
    """Memory workers with a stored sequence, and a prefill worker that is connected to them."""

    def __init__(self, partition: str, workers: int, low: int, **fields: Any) -> None:
        """``low``: the first layer of the prefill worker, which is a stage."""
        self.fabric = netstack.open("loopback", key=b"k" * 32)
        weights, self.views, self.links = [1.0] * workers, [EpochFabric(1, self.fabric) for _ in range(workers + 1)], []
        split = PARTITIONS[partition]([x.kv_heads for x in LAYERS], weights, 4)
        self.place = PLACE if split.num_kv_shards > 1 else KvLocation()
        self.stores = [_store(LAYERS, w, split, fields) for w in range(workers)]
        self.senders, doors = list[PrefixSender](), list[EpochListener]()
        for number, store in enumerate(self.stores):
            torch.manual_seed(number)
            for x in (x for layer in store.layers for piece in layer for x in piece.kv.tensors):
                x.copy_(torch.randint(-100, 100, x.shape))
            self.links.append(PeerLinks(self.views[number], [TransferPeer("p/stored", is_awaited=True)]))
            self.senders.append(PrefixSender(store, self.links[-1], Counters()))
            doors.append(EpochListener(self.fabric.listen("", ListenTerms(name=f"m{number}"))))
        own = LAYERS[low:]
        self.store = _store(own, 0, by_head([x.kv_heads for x in own], [1.0], 0), fields)
        self.low, self.split = low, split
        order = ConnectPrefillPeers(memory=[Address(door.url, f"m{n}") for n, door in enumerate(doors)])
        source = stored_prefixes(self.store, order, split, low, "p/stored")
        self.own = PrefixFetch(self.store, source, self.views[-1], DEADLINES)
        self.own.connect()
        for number, door in enumerate(doors):
            assert self.links[number].accept(self.views[number].accept(door, WAIT_S))

    def plan(self, ops: list[SequenceOp], step: int = 0) -> None:
        for store, sender in zip(self.stores, self.senders, strict=True):
            plan = StepPlan(step=step, ops=ops, rows=[RowRange(1, 0, STORED, self.place)] if not step else [])
            store.apply_plan(plan)
            for op in ops:
                if isinstance(op, PrefillGrant) and op.num_fetched:
                    sender.send(op, 0, range(self.low, len(LAYERS)))

    def fetch(self, first: int, count: int) -> int:
        """Fetch tokens, after those before are there. Returns the bytes."""
        op = FetchPrefix(9, first, count, MEMORY_WORKERS, 1, self.place)
        plan = StepPlan(step=5, ops=[New(9), op] if not first else [op], rows=[RowRange(9, first + count, 3)])
        self.own.request(plan)
        self.store.apply_plan(plan)
        self.own.begin_step(plan)
        return sum(self.own.receive_layer(layer) for layer in range(len(self.store.layers)))

    def bits(self, layer: int, tensor: int) -> torch.Tensor:
        """Return K, V or scales of the stored tokens of a layer, put together by the rule of the partition."""
        whole = dict[tuple[int, int], torch.Tensor]()
        for worker, store in enumerate(self.stores):
            for piece, held in zip(store.layers[layer], store.pieces[layer], strict=True):
                ids = iter(store.tables.block_ids(piece.group, 1, 0, STORED // BLOCK))
                lanes = store.tables.kv_shards[piece.group]
                for block in range(STORED // BLOCK):
                    if store.placement.kv_shard_at(self.place, block * BLOCK) in lanes:
                        stored = piece.kv.tensors[tensor][next(ids)]
                        for head in range(held.kv_heads):
                            assert (block, held.head_start + head) not in whole, worker
                            whole[block, held.head_start + head] = stored[head]
        heads = LAYERS[layer].kv_heads
        return torch.stack([torch.stack([whole[b, h] for h in range(heads)]) for b in range(STORED // BLOCK)]).view(
            torch.uint8
        )

    def close(self) -> None:
        self.own.stop()
        for links in self.links:
            links.stop()
        for view in self.views:
            view.close()
        self.fabric.close()


def _store(layers: Any, worker: int, partition: Any, fields: dict[str, Any]) -> KvStore:
    asked = bind(layers, max_rows=STORED, **fields)
    return KvStore(replace(asked, worker=worker, partition=partition), CPU)


@contextmanager
def connected(partition: str, workers: int, low: int = 0, **fields: Any) -> Iterator[Pools]:
    pools = Pools(partition, workers, low, **fields)
    try:
        pools.plan([New(1)])
        yield pools
    finally:
        pools.close()


@pytest.mark.no_retry
@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("count", [STORED, STORED - 6], ids=["whole blocks", "a part of the last block"])
@pytest.mark.parametrize("low", [0, 1], ids=["all layers", "a stage"])
@pytest.mark.parametrize(("partition", "workers"), [("head", 2), ("head", 3), ("token", 2), ("request", 2)])
def test_what_memory_workers_send_has_the_same_bits(
    partition: str, workers: int, low: int, count: int, fields: dict[str, Any]
) -> None:
    with connected(partition, workers, low, **fields) as pools:
        pools.plan([PrefillGrant(1, count, 3, 0, 5, pools.place, count)], 1)
        assert pools.fetch(0, count) == sum(
            x[0].nbytes * (STORED // BLOCK) for layer in pools.store.layers for piece in layer for x in piece.kv.tensors
        )
        for own, (piece,) in enumerate(pools.store.layers):
            ids = list(pools.store.tables.block_ids(piece.group, 9, 0, STORED // BLOCK))
            for number, tensor in enumerate(piece.kv.tensors):
                assert torch.equal(tensor[ids].view(torch.uint8), pools.bits(low + own, number))


def test_tokens_that_do_not_begin_with_a_block_are_refused() -> None:
    with connected("token", 2) as pools:
        pools.plan([PrefillGrant(1, STORED, 3, 0, 5, PLACE, STORED - 6)], 1)
        with pytest.raises(MissingKvError, match="there are no such tokens"):
            pools.fetch(0, STORED)


def test_other_tokens_than_those_to_fetch_are_noticed() -> None:
    with connected("head", 2) as pools:
        pools.plan([PrefillGrant(1, STORED, 3, 0, 5, pools.place, 64)], 1)
        with pytest.raises(TransferError, match="bytes, not part 0"):
            pools.fetch(0, STORED)
