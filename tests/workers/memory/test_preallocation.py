"""Memory that is made ready for a change that may come: for the last one that was asked for, and no other."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from memory_peer import bind, shape
from msgspec.structs import replace

from lamina.kv import arena
from lamina.protocol.control import ControlLink, StartMemory, Stop
from lamina.protocol.reshard import PrepareStore, StorePrepared
from lamina.protocol.step_plan import BindRequest
from lamina.workers.memory import preallocation
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.main import MemoryServer
from lamina.workers.memory.memory_worker import MemoryWorker
from lamina.workers.memory.preallocation import StorePreallocation
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.runtime import RUNTIME

BIND = bind([shape()], (1.0,), 0, "head")
SOON_S = 30.0
MIB = 1 << 20
SIZE = 64 * MIB
POOL = bind([shape(6, 3)] * 4, (1.0, 1.0), 0, "head", kv_bytes=SIZE)  # two heads of three, and one


class Server:
    """A memory worker whose driver orders memory. Its work in the background waits for the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here, there = socket.socketpair()
        self.driver = ControlLink(here, StorePrepared)
        self.due: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.made: list[BindRequest | None] = []
        self.ahead: list[bool] = []
        self.error = ""
        monkeypatch.setattr(MemoryWorker, "prepare", self._prepare)
        runtime = RUNTIME._replace(start_background=lambda work, name: self.due.put(work))
        start = StartMemory(scheme="loopback", address="", key=b"k" * 32, threads=1)
        self.server = MemoryServer(ControlLink(there, PrepareStore | Stop), start, runtime)

    def _prepare(self, bind: BindRequest | None, tier: Any, *, ahead: bool) -> None:
        self.made.append(bind)
        self.ahead.append(ahead)
        if self.error:
            raise ValueError(self.error)

    def order(self, *orders: PrepareStore) -> list[Callable[[], None]]:
        """Send orders; returns what it is about to do for them."""
        for order in orders:
            self.driver.send(order)
        return [self.due.get(timeout=SOON_S) for _ in orders]

    def said_before(self, last: PrepareStore) -> list[StorePrepared]:
        """Returns all that it has sent before its answer to ``last``."""
        (work,) = self.order(last)
        work()
        said = list[StorePrepared]()
        while not said or said[-1].resize_number != last.resize_number:
            said.append(self.driver.recv(SOON_S))
        return said[:-1]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    one = Server(monkeypatch)
    yield one
    one.driver.send(Stop())
    one.driver.close()


LAST = PrepareStore(BIND, resize_number=9)


def test_what_was_asked_for_last_is_there_whichever_begins_first(server: Server) -> None:
    orders = PrepareStore(BIND, resize_number=1), PrepareStore(None), PrepareStore(BIND, resize_number=2)
    for work in reversed(server.order(*orders)):
        work()
    assert server.made == [BIND]
    assert server.said_before(LAST) == [StorePrepared("", 2)]


def test_nothing_is_made_ready_for_what_was_given_up(server: Server) -> None:
    for work in reversed(server.order(PrepareStore(BIND, resize_number=1), PrepareStore(None))):
        work()
    assert server.made == [None]
    assert server.said_before(LAST) == []


def test_nobody_waits_for_what_is_ready_before_there_is_a_place(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.error = "KV blocks take 9 GiB, 1 GiB are free here"
    with caplog.at_level(logging.WARNING):
        (work,) = server.order(PrepareStore(BIND))
        work()
    assert (server.made, server.ahead) == ([BIND], [True])
    assert "will allocate its memory only when it replaces another: ValueError: KV blocks take 9 GiB" in caplog.text
    server.error = ""
    assert server.said_before(LAST) == [], "an answer would be news of a worker that hangs"


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def addresses(store: KvStore) -> set[int]:
    return {x.data_ptr() for layer in store.layers for piece in layer for x in piece.kv.tensors}


def ready(of: BindRequest = POOL) -> tuple[StorePreallocation, Counters, set[int]]:
    """Returns the answer of a spare, with the place of its memory."""
    meter = Counters()
    made = StorePreallocation(torch.device("cpu"), 1.0, meter)
    before = resident()
    made.prepare(of, None, None, is_first_store=True)
    assert resident() - before > 0.95 * of.kv_bytes, "its pages are there"
    return made, meter, {x.data_ptr() for x in made.arena.free}


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("fields", [{}, {"epoch": 7, "replicas": 2, "prefill_workers": 1}], ids=["as told", "met"])
def test_the_store_of_any_place_lies_in_the_memory_of_a_spare(worker: int, fields: dict[str, Any]) -> None:
    made, meter, there = ready()
    before = resident()
    store = made.open_store(replace(POOL, worker=worker, **fields))
    assert addresses(store) == there
    assert resident() - before < 8 * MIB, "there is no second one"
    assert made.arena.nbytes == 0
    assert meter.snapshot()["stores"] == 1
    assert all((x == 0).all() for layer in store.layers for piece in layer for x in piece.kv.tensors)


def test_a_smaller_one_lies_there_too_and_the_rest_goes_back() -> None:
    made, _, there = ready()
    before = resident()
    store = made.open_store(replace(POOL, kv_bytes=SIZE // 4))
    assert addresses(store) <= there
    assert before - resident() > SIZE // 4, "but for what a huge page has beside it"
    assert made.arena.nbytes == 0


@pytest.mark.parametrize(
    "other", [replace(POOL, kv_bytes=2 * SIZE), replace(POOL, dtype="bfloat16")], ids=["larger", "of another dtype"]
)
def test_what_does_not_do_goes_back_before_another_store_is_made(
    other: BindRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, meter, _ = ready()
    left, right = list[int](), arena.huge_page_zeros
    # ``allocate`` has it by name.
    monkeypatch.setattr(
        "lamina.kv.paged_cache.huge_page_zeros", lambda *asked: (left.append(made.arena.nbytes), right(*asked))[1]
    )
    before = resident()
    with caplog.at_level(logging.WARNING):
        store = made.open_store(other)
    assert left
    assert not any(left), "both may not fit"
    assert resident() - before < store.nbytes - SIZE + 8 * MIB
    assert "memory were prepared for a store of another size and are freed" in caplog.text
    assert meter.snapshot()["stores"] == 1


def test_who_has_a_store_takes_no_memory_ahead() -> None:
    """The place came before the thread had begun."""
    made, _, _ = ready()
    store, before = made.open_store(POOL), resident()
    made.prepare(POOL, None, store, is_first_store=True)
    made.prepare(POOL, None, None, is_first_store=True)
    assert made.arena.nbytes == 0
    assert resident() - before < 8 * MIB


def test_a_store_waits_for_memory_that_is_being_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, right = threading.Event(), threading.Event(), arena.prefault

    def slowly(tensors: Any, *wanted: Any) -> None:
        begun.set()
        assert go_on.wait(30.0)
        right(tensors, *wanted)

    monkeypatch.setattr(arena, "prefault", slowly)
    made = StorePreallocation(torch.device("cpu"), 1.0, Counters())
    first = threading.Thread(target=made.prepare, args=(POOL, None, None), kwargs={"is_first_store": True})
    first.start()
    assert begun.wait(30.0)
    stores = list[KvStore]()
    second = threading.Thread(target=lambda: stores.append(made.open_store(POOL)))
    second.start()
    second.join(0.05)
    assert not stores
    go_on.set()
    first.join(30.0)
    second.join(30.0)
    assert stores[0].nbytes > 0.95 * SIZE
    assert made.arena.nbytes == 0


def test_a_spare_takes_no_memory_that_the_host_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preallocation, "available_bytes", lambda device: SIZE - 1)
    made = StorePreallocation(torch.device("cpu"), 1.0, Counters())
    with pytest.raises(ValueError, match=r"KV blocks take 67\.1 MB, 67\.1 MB are free here"):
        made.prepare(POOL, None, None, is_first_store=True)
    assert made.arena.nbytes == 0


def test_a_spare_that_is_told_of_another_size_has_that_one_alone() -> None:
    made, _, _ = ready()
    before = resident()
    made.prepare(replace(POOL, kv_bytes=SIZE // 2), None, None, is_first_store=True)
    assert before - resident() > SIZE // 4
    assert 0.45 * SIZE < made.arena.nbytes < 0.55 * SIZE
    made.prepare(None, None, None, is_first_store=False)
    assert made.arena.nbytes == 0
