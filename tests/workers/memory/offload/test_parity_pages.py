"""The parity worker loads the exclusive or of what the others have loaded, whatever their storage has by then.

Covers: lamina/executor/kv_parity.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from memory_peer import bind, shape

from lamina import netstack
from lamina.executor.kv_parity import parity_peers
from lamina.kv.pages import PAGE, Page, PageFragment, Provenance
from lamina.kv.storage import STORES_NOTHING, StorageBackend, StorageConfig, StorageError, open_storage
from lamina.netstack import ListenTerms
from lamina.protocol.control import Address
from lamina.protocol.offload_messages import LoadReady, TransferDone
from lamina.protocol.step_plan import Free, LoadKv, New, RowRange, SaveKv, SequenceOp, StepPlan
from lamina.workers.compute.kv_parity import parity_bind
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer.block_parts import integers
from lamina.workers.memory.kv_transfer.peer_links import PeerLinks
from lamina.workers.memory.kv_transfer.transfer_link import MAX_REQUESTS
from lamina.workers.memory.offload import kv_load
from lamina.workers.memory.offload.page_fragments import StoreFragments
from lamina.workers.memory.offload.page_transfers import PageTransfers
from lamina.workers.memory.offload.parity_pages import ParityPages, ParityReplies
from lamina.workers.memory.worker_counters import Counters

CPU, VIEW, WAIT_S, BLOCK = torch.device("cpu"), 3, 30.0, 32
LAYERS = [shape(8, 4, 16, 8), shape(8, 4, 8, 24)]
KEYS = [bytes([number]) * 32 for number in range(3)]
COUNT = 2 * PAGE + 40  # tokens of the load: the last page and its last block are partial


class Held:
    """Storage whose reads wait for ``may_read``, or for one of ``turns``."""

    def __init__(self, inner: StorageBackend) -> None:
        self.inner, self.may_read, self.turns = inner, threading.Event(), threading.Semaphore(0)
        self.may_read.set()

    def read(self, key: bytes, into: dict[PageFragment, memoryview]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.may_read.is_set() and not self.turns.acquire(timeout=0.005):
            if time.monotonic() > deadline:
                raise StorageError("no turn has come")
        self.inner.read(key, into)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Worker:
    """A memory worker in one epoch: its pool, its storage and its link for the parity."""

    def __init__(self, store: KvStore, links: PeerLinks, *, keeps: bool, ignores: bool = False) -> None:
        self.store, self.links = store, links
        self.medium: Any = Held(open_storage(STORES_NOTHING if keeps else "host", StorageConfig(1 << 24)))
        self.lost, self.meter = list[str](), Counters()
        self.may_report = True
        parity = ParityPages(links, self.report_loss) if keeps else ParityReplies(links)
        self.said: SimpleQueue[TransferDone | LoadReady] = SimpleQueue()
        used = None if ignores else parity
        saves = not keeps or ignores
        self.transfers = PageTransfers(
            self.medium, store, self.said.put, self.meter, epoch=VIEW, parity=used, keeps=saves
        )
        self.step = 0

    def report_loss(self, error: str) -> bool:
        self.lost.append(error)
        return self.may_report

    def do(self, *parts: SequenceOp | RowRange) -> None:
        rows = [p for p in parts if isinstance(p, RowRange)]
        self.step += 1
        self.transfers.collect()
        ops = [p for p in parts if not isinstance(p, RowRange)]
        self.transfers.begin_plan(StepPlan(step=self.step, ops=ops, rows=rows))

    def report(self) -> TransferDone:
        said = self.said.get(timeout=WAIT_S)
        assert isinstance(said, TransferDone)
        return said

    def keep_pages(self, seed: int, keys: list[bytes] = KEYS) -> None:
        """Write pages of random bits to storage, over those that were there."""
        at = StoreFragments(self.store)
        generator = np.random.default_rng(seed)
        for number, key in enumerate(keys):
            tokens = min(PAGE, COUNT - number * PAGE)
            data = {
                fragment: generator.bytes(tokens * 4 * (LAYERS[fragment.layer].qk_dim + LAYERS[fragment.layer].v_dim))
                for fragment in sorted(at.whole_page_fragments)
            }
            page = Page(key, number, tokens, b"t" * 16, Provenance("prompt"))
            self.medium.delete([key])
            self.medium.write(page, data)

    def bits(self, sequence: int, count: int = COUNT) -> list[bytes]:
        """K and V of all tokens, layers and heads in order, as integers."""
        found = list[bytes]()
        for layer in range(len(LAYERS)):
            for tensor in integers(self.store, layer, 0):
                ids = self.store.tables.block_table(0, sequence)[1]
                rows = np.concatenate([tensor.numpy()[block] for block in ids], axis=1)[:, :count]
                found.append(np.ascontiguousarray(rows).tobytes())
        return found


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    """Two workers, and the last one, which keeps their parity; by the parameter it takes no notice of their loads."""
    fabric = netstack.open("loopback", key=b"k" * 32)
    binds = [bind(LAYERS, [1.0, 1.0], w, "head", block_size=BLOCK, max_rows=512) for w in (0, 1)]
    stores = [KvStore(each, CPU) for each in binds]
    stores.append(KvStore(parity_bind(binds[0], "reference", stores[0].bind_reply.kv_bytes), CPU))
    doors = [EpochListener(fabric.listen("", ListenTerms(name=f"memory-{i}"))) for i in range(3)]
    addresses = [Address(door.url, f"memory-{i}") for i, door in enumerate(doors)]
    views = [EpochFabric(VIEW, fabric) for _ in doors]
    made = [
        Worker(store, PeerLinks(view, parity_peers(addresses, own)), keeps=own == addresses[-1], ignores=ignores)
        for store, view, own in zip(stores, views, addresses, strict=True)
        for ignores in [getattr(request, "param", False) and own == addresses[-1]]
    ]
    for worker, view, door in zip(made, views, doors, strict=True):
        while worker.links.num_missing:
            assert worker.links.accept(view.accept(door, WAIT_S))
    yield made
    for worker, view in zip(made, views, strict=True):
        worker.transfers.end()
        worker.links.stop()
        view.close()
    fabric.close()
    for thread in threading.enumerate():
        if thread.name in ("lamina-receive", "lamina-send", "lamina-meet"):
            thread.join(WAIT_S)
            assert not thread.is_alive()


def load(sequence: int = 1, number: int = 1) -> LoadKv:
    return LoadKv(sequence, number, 0, COUNT, KEYS)


def xor(one: list[bytes], other: list[bytes]) -> list[bytes]:
    return [
        (np.frombuffer(a, np.uint8) ^ np.frombuffer(b, np.uint8)).tobytes() for a, b in zip(one, other, strict=True)
    ]


def load_all(workers: list[Worker], *order: int) -> None:
    for place in order:
        workers[place].do(New(1), load())
    for worker in workers:
        assert worker.report().num_pages == len(KEYS)
        worker.transfers.collect()
        assert worker.store.committed.tokens_of(1) == COUNT


@pytest.mark.parametrize(
    ("workers", "is_parity"), [(False, True), (True, False)], indirect=["workers"], ids=["right", "ignores loads"]
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["last", "first"])
def test_the_parity_is_that_of_the_loaded_bits(workers: list[Worker], order: tuple[int, ...], is_parity: bool) -> None:
    """It may get the plan before the others. The control: a parity worker that loads from its own storage."""
    for seed, worker in enumerate(workers[:-1]):
        worker.keep_pages(seed)
    load_all(workers, *order)
    one, other, parity = (worker.bits(1) for worker in workers)
    assert one != other
    assert (parity == xor(one, other)) == is_parity


def test_pages_that_are_saved_anew_meanwhile_change_nothing(workers: list[Worker]) -> None:
    """Storage of a worker has other bits by the time at which the parity worker loads."""
    for seed, worker in enumerate(workers[:-1]):
        worker.keep_pages(seed)
    for worker in workers[:-1]:
        worker.do(New(1), load())
        assert worker.report().num_pages == len(KEYS)
    before = [worker.bits(1) for worker in workers[:-1]]
    workers[0].keep_pages(7)
    workers[2].do(New(1), load())
    assert workers[2].report().num_pages == len(KEYS)
    assert workers[2].bits(1) == xor(*before)


def test_tokens_behind_the_loaded_ones_stay_as_they_are(workers: list[Worker]) -> None:
    """They are in the same block, and may be written before the load ends."""
    for seed, worker in enumerate(workers):
        if seed < 2:
            worker.keep_pages(seed)
        for layer in range(len(LAYERS)):
            for tensor in integers(worker.store, layer, 0):
                tensor.fill_(seed + 1)
    load_all(workers, 0, 1, 2)
    assert workers[2].bits(1) == xor(workers[0].bits(1), workers[1].bits(1))
    heads, more = LAYERS[0].kv_heads // 2, 5
    for data in workers[2].bits(1, COUNT + more):
        assert (np.frombuffer(data, np.int32).reshape(heads, COUNT + more, -1)[:, COUNT:] == 3).all()


def test_a_page_that_one_lacks_has_no_parity(workers: list[Worker]) -> None:
    """If that worker is lost before its report, nothing rebuilds what its blocks contain."""
    workers[0].keep_pages(0)
    workers[1].keep_pages(1, KEYS[:1])
    for worker in workers:
        worker.do(New(1), load())
    assert [worker.report().num_pages for worker in workers] == [3, 1, 1]


def until(true: Callable[[], bool], what: str) -> None:
    deadline, pause = time.monotonic() + WAIT_S, threading.Event()
    while not true():
        assert time.monotonic() < deadline, what
        pause.wait(0.005)


def test_each_page_has_its_parity_as_soon_as_it_is_loaded(workers: list[Worker]) -> None:
    """However long the whole load takes: here the next page is read only once the parity of the last one is there."""
    for seed, worker in enumerate(workers[:-1]):
        worker.keep_pages(seed)
    slow, parity = workers[1], workers[2]
    slow.medium.may_read.clear()
    for worker in workers:
        worker.do(New(1), load())
    for page in range(len(KEYS)):
        before = parity.meter.snapshot().get("kv_loaded_bytes", 0.0)
        slow.medium.turns.release()
        until(lambda seen=before: parity.meter.snapshot().get("kv_loaded_bytes", 0.0) > seen, f"{page} pages only")
    assert [worker.report().num_pages for worker in workers] == [len(KEYS)] * 3
    assert parity.bits(1) == xor(workers[0].bits(1), slow.bits(1))


def test_one_that_lacks_many_pages_costs_no_link_to_a_slow_one(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses at once, and no requests pile up at the other one, which takes MAX_REQUESTS."""
    monkeypatch.setattr(kv_load, "LATE_LOAD_S", 0.05)
    lacks, slow, parity = workers
    slow.keep_pages(1)
    slow.medium.may_read.clear()
    loads = MAX_REQUESTS // len(KEYS) + 1
    for number in range(1, loads + 1):
        for worker in workers:
            worker.do(New(number), load(number, number))
        assert [worker.report().num_pages for worker in workers] == [0, 0, 0]
    monkeypatch.setattr(kv_load, "LATE_LOAD_S", WAIT_S)
    slow.medium.may_read.set()
    lacks.keep_pages(0)
    for worker in workers:
        worker.do(*map(Free, range(1, loads + 1)), New(loads + 1), load(loads + 1, loads + 1))
    assert [worker.report().num_pages for worker in workers] == [len(KEYS)] * 3
    assert parity.lost == []


def test_a_lost_link_is_reported_once_and_a_refusal_is_no_loss(workers: list[Worker]) -> None:
    lacks, _, parity = workers
    for seed, worker in enumerate(workers[:-1]):
        worker.keep_pages(seed, KEYS[: seed + 2])
    for worker in workers:
        worker.do(New(1), load())
    assert [worker.report().num_pages for worker in workers] == [2, 3, 2]
    assert parity.lost == []
    for link in lacks.links.by_number.values():
        link.give_up("the cable is cut")
    for number in (2, 3):
        for worker in workers:
            worker.do(New(number), load(number, number))
        assert [worker.report().num_pages for worker in workers] == [2, 3, 0]
    assert len(parity.lost) == 1
    assert parity.lost[0].startswith("memory-0: ")
    assert "the cable is cut" in parity.lost[0]


def test_a_lost_link_is_reported_until_the_report_was_sent(workers: list[Worker]) -> None:
    """A worker asks for another epoch only now and then, and until it does all loads fail."""
    lacks, _, parity = workers
    parity.may_report = False
    for link in lacks.links.by_number.values():
        link.give_up("the cable is cut")
    attempts = [0]
    for number in range(1, 5):
        parity.may_report = number >= 3
        for worker in workers:
            worker.do(New(number), load(number, number))
            worker.report()
        attempts.append(len(parity.lost))
    assert attempts[0] < attempts[1] < attempts[2], "each load tries again"
    assert attempts[2] + 1 == attempts[3] == attempts[4], "once it was sent, none does"


def test_a_load_without_progress_is_no_parity(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages count as not loaded at once, and the next load works."""
    monkeypatch.setattr(kv_load, "LATE_LOAD_S", 0.05)
    for seed, worker in enumerate(workers[:-1]):
        worker.keep_pages(seed)
    workers[1].medium.may_read.clear()
    workers[0].do(New(1), load())
    assert workers[0].report().num_pages == len(KEYS)
    for worker in workers[1:]:
        worker.do(New(1), load())
    for failed in (workers[1].report(), workers[2].report()):
        assert failed.num_pages == 0
        assert "was not there after" in failed.error or "was not loaded here" in failed.error
    monkeypatch.setattr(kv_load, "LATE_LOAD_S", WAIT_S)
    workers[1].medium.may_read.set()
    for worker in workers:
        worker.do(Free(1), New(2), load(2, 2))
        assert worker.report().num_pages == len(KEYS)
    assert workers[2].bits(2) == xor(workers[0].bits(2), workers[1].bits(2))


def test_a_load_that_its_epoch_has_ended_is_no_parity(workers: list[Worker]) -> None:
    """The blocks hold anything."""
    for seed, worker in enumerate(workers[:-1]):
        worker.keep_pages(seed)
    workers[1].medium.may_read.clear()
    for worker in workers[:-1]:
        worker.do(New(1), load())
    workers[1].transfers.loader.stop()
    workers[1].medium.may_read.set()
    workers[2].do(New(1), load())
    failed = workers[2].report()
    assert failed.num_pages == 0
    assert "was not loaded here" in failed.error


def test_the_parity_worker_saves_nothing_and_delays_no_save(workers: list[Worker]) -> None:
    for worker in workers:
        worker.do(New(1), RowRange(1, 0, PAGE))
        worker.store.committed.commit([RowRange(1, 0, PAGE)])
        worker.do(SaveKv(1, 1, 0, PAGE, KEYS[:1], b"t" * 16))
    assert [worker.report().num_pages for worker in workers] == [1, 1, 1]
    assert [worker.transfers.saves == [] for worker in workers] == [False, False, True]
    assert [worker.medium.lookup(KEYS[0]) is None for worker in workers] == [False, False, True]
