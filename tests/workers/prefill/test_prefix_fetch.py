"""Beginnings of prompts between prefill workers: the same bits, of whole blocks, or a fault that is reported."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from secrets import token_bytes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_peer import WAIT_S, bind, shape

from lamina import netstack
from lamina.config.engine_config import Deadlines
from lamina.netstack import Channel, Geometry, PeerFault, Terms
from lamina.protocol.control import Address
from lamina.protocol.prefix_fetch import ConnectPrefillPeers
from lamina.protocol.step_plan import (
    FetchPrefix,
    Fork,
    New,
    PrefillGrant,
    ProtocolError,
    RowRange,
    SequenceOp,
    StepPlan,
)
from lamina.workers.compute.attention_client import MissingKvError
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer import block_parts, transfer_link
from lamina.workers.memory.kv_transfer.transfer_link import MessageType, pack_header
from lamina.workers.prefill import prefix_fetch
from lamina.workers.prefill.prefill_worker import LocalAttention
from lamina.workers.prefill.prefix_fetch import (
    PrefixFetch,
    cached_prefixes,
    prefix_listener_name,
    prefix_listener_terms,
)
from lamina.workers.runtime import Runtime

CPU = torch.device("cpu")
DEADLINES = Deadlines(start_timeout_s=WAIT_S, step_timeout_s=WAIT_S)
LAYERS = [shape(), shape(dim=32), shape(kv_heads=2)]
STORED = 48  # tokens of sequence 1, which the first worker has


class Prefiller:
    """A store that is filled, and its end of an epoch."""

    def __init__(self, number: int, count: int, scheme: str = "loopback", **fields: object) -> None:
        torch.manual_seed(number)
        self.store = KvStore(bind(LAYERS, max_rows=256, **fields), CPU)
        for x in (x for layer in self.store.layers for piece in layer for x in piece.kv.tensors):
            x.copy_(torch.randint(-100, 100, x.shape))
        self.fabric = netstack.open(scheme, key=b"k" * 32)
        self.view = EpochFabric(1, self.fabric)
        self.door = EpochListener(self.fabric.listen("", prefix_listener_terms(f"p{number}", count)))
        self.lenders: list[threading.Thread] = []
        self.step = 0

    def meet(self, order: ConnectPrefillPeers) -> None:
        source = cached_prefixes(self.store, order)
        self.own = PrefixFetch(self.store, source, self.view, DEADLINES, Runtime(start=self._start))
        self.own.connect(self.door)

    def _start(self, work: Callable[[], None], name: str) -> None:
        lender = threading.Thread(target=work, name=name, daemon=True)
        lender.start()
        self.lenders.append(lender)  # only now: it may be joined at once

    def begin(self, ops: list[SequenceOp], rows: list[RowRange]) -> StepPlan:
        self.step += 1
        plan = StepPlan(step=self.step, ops=ops, rows=rows)
        self.own.request(plan)
        self.store.apply_plan(plan)
        self.own.begin_step(plan)
        return plan

    def fetch(self, op: FetchPrefix, before: list[SequenceOp] | None = None) -> int:
        """The bytes that have come."""
        self.begin([*(before or [New(op.sequence)]), op], [RowRange(op.sequence, op.first + op.count, 3)])
        return sum(self.own.receive_layer(layer) for layer in range(len(LAYERS)))

    def bits(self, sequence: int, layer: int, low: int, high: int) -> list[torch.Tensor]:
        (piece,), tables = self.store.layers[layer], self.store.tables
        ids = list(tables.block_ids(piece.group, sequence, low // 16, high // 16))
        return [x[ids].view(torch.uint8) for x in piece.kv.tensors]


@contextmanager
def met(count: int, **fields: Any) -> Iterator[list[Prefiller]]:
    """So many, who have met; the first has sequence 1."""
    workers = [Prefiller(n, count, **fields) for n in range(count)]
    peers = [Address(w.door.url, f"p{n}") for n, w in enumerate(workers)]
    failed = list[BaseException]()

    def meet(number: int) -> Callable[[], None]:
        def work() -> None:
            try:
                workers[number].meet(ConnectPrefillPeers(peers=peers, own_index=number))
            except BaseException as e:  # noqa: BLE001 - for the thread that waits
                failed.append(e)

        return work

    threads = [threading.Thread(target=meet(n)) for n in reversed(range(count))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failed
    workers[0].begin([New(1)], [RowRange(1, 0, STORED + 5)])
    try:
        yield workers
    finally:
        for worker in workers:
            worker.own.stop()
            worker.view.close()
            worker.fabric.close()


def same(worker: Prefiller, sequence: int, of: Prefiller, low: int, high: int) -> bool:
    return all(
        torch.equal(a, b)
        for layer in range(len(LAYERS))
        for a, b in zip(worker.bits(sequence, layer, low, high), of.bits(1, layer, low, high), strict=True)
    )


@pytest.mark.no_retry
@pytest.mark.parametrize("part", [1 << 20, 5000])
@pytest.mark.parametrize("fields", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_what_comes_has_the_same_bits(part: int, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix comes to all workers from each that has it, in one part of a layer and in several."""
    monkeypatch.setattr(block_parts, "PART_BYTES", part)
    with met(3, **fields) as workers:
        whole = workers[2].fetch(FetchPrefix(5, 0, STORED, 0, 1))
        assert same(workers[2], 5, workers[0], 0, STORED)
        most = workers[1].fetch(FetchPrefix(6, 0, 32, 2, 5))
        assert same(workers[1], 6, workers[0], 0, 32)
        rest = workers[1].fetch(FetchPrefix(7, 32, 16, 0, 1), [Fork(7, 6, 32)])
        assert same(workers[1], 7, workers[0], 0, STORED)
        assert whole == most + rest > 0


def test_what_has_come_counts_under_all_views_and_for_no_slice() -> None:
    with met(2) as workers:
        pool: Any = SimpleNamespace(send_s=0.0, begin_step=lambda plan: None)
        own = LocalAttention(workers[1].store, pool)
        own.add_prefix_fetch(workers[1].own)
        plan = StepPlan(step=1, ops=[New(5), FetchPrefix(5, 0, STORED, 0, 1)], rows=[RowRange(5, STORED, 3)])
        own.send_plan(plan)
        own.begin_step(plan)
        for layer, each in enumerate(LAYERS):
            own.q(layer, torch.zeros(3, each.q_heads, 1, each.qk_dim))
        counted = own.fetched_bytes, own.fetch_s
        assert min(counted) > 0
        assert own.send_s >= own.fetch_s + own.attend_s
        own.connect(pool)
        assert (own.fetched_bytes, own.fetch_s) == counted


@pytest.mark.parametrize(("sequence", "count"), [(2, 16), (1, STORED + 16)])
def test_what_is_not_there_is_told_by_whoever_is_asked(sequence: int, count: int) -> None:
    """A directory would name KV that is gone: no worker goes on with other K and V."""
    with met(2) as workers, pytest.raises(MissingKvError, match="p0/prompts: there are no such tokens"):
        workers[1].fetch(FetchPrefix(5, 0, count, 0, sequence))


def test_a_fetch_begins_with_a_block() -> None:
    with met(2) as workers, pytest.raises(ProtocolError, match="does not begin with a block"):
        workers[1].fetch(FetchPrefix(5, 10, 16, 0, 1), [New(5), PrefillGrant(5, 0, 10, 0, 1)])


def test_nobody_is_fetched_from_who_is_not_there() -> None:
    with met(2) as workers:
        for worker in (1, 2, -2):
            with pytest.raises(ProtocolError, match="there is no channel for it"):
                workers[1].own.request(StepPlan(step=9, ops=[FetchPrefix(5, 0, 16, worker, 1)], rows=[]))


def test_a_damaged_part_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(message: int, index: int, number: int, right: bytes) -> bytes:
        return pack_header(message, index, number, token_bytes(16) if message == MessageType.PART else right)

    monkeypatch.setattr(transfer_link, "pack_header", wrong)
    with met(2) as workers, pytest.raises(PeerFault, match="is damaged"):
        workers[1].fetch(FetchPrefix(5, 0, STORED, 0, 1))


def test_who_ends_in_the_middle_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch of the one that sends ends after its first layer, whose K and V are one part."""
    closed, copied = threading.Event(), itertools.count(1)

    def gather(*args: Any) -> None:
        if next(copied) > 2:
            assert closed.wait(WAIT_S)
        block_parts.gather(*args)

    monkeypatch.setattr(prefix_fetch, "gather", gather)
    with met(2) as workers:
        workers[1].begin([New(5), FetchPrefix(5, 0, STORED, 0, 1)], [RowRange(5, STORED, 1)])
        workers[1].own.receive_layer(0)
        workers[0].view.close()
        closed.set()
        with pytest.raises(PeerFault):
            _ = [workers[1].own.receive_layer(layer) for layer in (1, 2)]


@pytest.mark.parametrize("scheme", ["loopback", "shm", "tcp"])
def test_a_view_ends_while_a_part_is_filled(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot's memory stays until it is filled: the thread that fills it ends then, by itself."""
    filling, closed = threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        filling.set()
        assert closed.wait(WAIT_S)
        block_parts.gather(*args)
        filled.append(args)

    filled = list[Any]()
    monkeypatch.setattr(prefix_fetch, "gather", slow)
    with met(2, scheme=scheme) as workers:
        workers[1].begin([New(5), FetchPrefix(5, 0, STORED, 0, 1)], [RowRange(5, STORED, 1)])
        assert filling.wait(WAIT_S)
        for worker in workers:
            worker.view.close()
        closed.set()
        for lender in workers[0].lenders:
            lender.join(WAIT_S)
            assert not lender.is_alive()
        assert len(filled) == 2, "K and V of one part"


def test_a_stranger_is_not_taken_for_a_prefill_worker() -> None:
    one = Prefiller(0, 2)
    other = Prefiller(1, 2)
    order = ConnectPrefillPeers(peers=[Address(one.door.url, "p0"), Address(other.door.url, "somebody")], own_index=1)
    stranger = threading.Thread(target=_knock, args=(other, order, one))
    stranger.start()
    expected = ConnectPrefillPeers(peers=[order.peers[0], Address(other.door.url, "p1")], own_index=0)
    with pytest.raises(PeerFault, match="'somebody/prompts' has connected"):
        one.meet(expected)
    stranger.join(WAIT_S)
    for each in (one, other):
        each.fabric.close()


def _knock(worker: Prefiller, order: ConnectPrefillPeers, at: Prefiller) -> Channel:
    size = Geometry(slots=4, slot_bytes=1 << 20)
    terms = Terms(outbound=size, inbound=size, name=prefix_listener_name("somebody"), peer=prefix_listener_name("p0"))
    return worker.view.connect(at.door.url, terms, timeout_s=WAIT_S)
