"""Memory that is made ready for a change that may come: for the last one that was asked for, and no other."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_peer import bind, shape
from msgspec.structs import replace

from lamina.kv import slabs
from lamina.memory import room
from lamina.memory.main import MemoryServer
from lamina.memory.meter import Meter
from lamina.memory.room import StoreRoom
from lamina.memory.store import Store
from lamina.protocol.plan import Bind
from lamina.protocol.recut import MakeRoom, RoomMade

BIND = bind([shape()], (1.0,), 0, "head")
MIB = 1 << 20
SIZE = 64 * MIB
POOL = bind([shape(6, 3)] * 4, (1.0, 1.0), 0, "head", kv_bytes=SIZE)  # two heads of three, and one


def server() -> tuple[MemoryServer, list[Callable[[], None]], list[Any], list[RoomMade]]:
    """It, what it is about to do beside its work, what it has made ready, and what it has said."""
    due, made, said = list[Callable[[], None]](), list[Any](), list[RoomMade]()
    one = MemoryServer.__new__(MemoryServer)
    one._around = SimpleNamespace(beside=lambda work, name: due.append(work))  # type: ignore[assignment]
    one._loaded = lambda: SimpleNamespace(prepare=lambda bind, tier, *, ahead: made.append(bind))  # type: ignore[method-assign,return-value,assignment]
    one._link = SimpleNamespace(send=said.append)  # type: ignore[assignment]
    one._room, one._rooms = None, threading.Lock()
    return one, due, made, said


def test_what_was_asked_for_last_is_there_whichever_begins_first() -> None:
    one, due, made, said = server()
    for order in (MakeRoom(BIND, number=1), MakeRoom(None), MakeRoom(BIND, number=2)):
        one._heed(order)
    for work in reversed(due):
        work()
    assert made == [BIND]
    assert said == [RoomMade("", 2)]


def test_nothing_is_made_ready_for_what_was_given_up() -> None:
    one, due, made, said = server()
    for order in (MakeRoom(BIND, number=1), MakeRoom(None)):
        one._heed(order)
    for work in reversed(due):
        work()
    assert made == [None]
    assert said == []


def test_nobody_waits_for_what_is_ready_before_there_is_a_place(caplog: pytest.LogCaptureFixture) -> None:
    one, due, _, said = server()
    asked = list[tuple[Any, bool]]()

    def prepare(bind: Bind, tier: Any, *, ahead: bool) -> None:
        asked.append((bind, ahead))
        raise ValueError("KV blocks take 9 GiB, 1 GiB are free here")

    one._loaded = lambda: SimpleNamespace(prepare=prepare)  # type: ignore[method-assign,return-value,assignment]
    with caplog.at_level(logging.WARNING):
        one._heed(MakeRoom(BIND))
        due[0]()
    assert (asked, said) == ([(BIND, True)], []), "an answer would be news of a worker that hangs"
    assert "takes its memory with a place, not before: ValueError: KV blocks take 9 GiB" in caplog.text


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def addresses(store: Store) -> set[int]:
    return {x.data_ptr() for layer in store.layers for piece in layer for x in piece.kv.tensors}


def ready(of: Bind = POOL) -> tuple[StoreRoom, Meter, set[int]]:
    """Of a spare, and where its memory is."""
    meter = Meter()
    made = StoreRoom(torch.device("cpu"), 1.0, meter)
    before = resident()
    made.prepare(of, None, None, ahead=True)
    assert resident() - before > 0.95 * of.kv_bytes, "its pages are there"
    return made, meter, {x.data_ptr() for x in made.slabs._free}


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("fields", [{}, {"view": 7, "replicas": 2, "prefill_workers": 1}], ids=["as told", "met"])
def test_the_store_of_any_place_lies_in_the_memory_of_a_spare(worker: int, fields: dict[str, Any]) -> None:
    made, meter, there = ready()
    before = resident()
    store = made.open(replace(POOL, worker=worker, **fields))
    assert addresses(store) == there
    assert resident() - before < 8 * MIB, "there is no second one"
    assert made.slabs.nbytes == 0
    assert meter.read()["stores"] == 1
    assert all((x == 0).all() for layer in store.layers for piece in layer for x in piece.kv.tensors)


def test_a_smaller_one_lies_there_too_and_the_rest_goes_back() -> None:
    made, _, there = ready()
    before = resident()
    store = made.open(replace(POOL, kv_bytes=SIZE // 4))
    assert addresses(store) <= there
    assert before - resident() > SIZE // 4, "but for what a huge page has beside it"
    assert made.slabs.nbytes == 0


@pytest.mark.parametrize(
    "other", [replace(POOL, kv_bytes=2 * SIZE), replace(POOL, dtype="bfloat16")], ids=["larger", "of another dtype"]
)
def test_what_does_not_do_goes_back_before_another_store_is_made(
    other: Bind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, meter, _ = ready()
    left, right = list[int](), slabs.fresh
    # ``allocate`` has it by name.
    monkeypatch.setattr("lamina.kv.pool.fresh", lambda *asked: (left.append(made.slabs.nbytes), right(*asked))[1])
    before = resident()
    with caplog.at_level(logging.WARNING):
        store = made.open(other)
    assert left
    assert not any(left), "both may not fit"
    assert resident() - before < store.nbytes - SIZE + 8 * MIB
    assert "memory were made ready for a store of another size: they go back" in caplog.text
    assert meter.read()["stores"] == 1


def test_who_has_a_store_takes_no_memory_ahead() -> None:
    """The place came before the thread had begun."""
    made, _, _ = ready()
    store, before = made.open(POOL), resident()
    made.prepare(POOL, None, store, ahead=True)
    made.prepare(POOL, None, None, ahead=True)
    assert made.slabs.nbytes == 0
    assert resident() - before < 8 * MIB


def test_a_store_waits_for_memory_that_is_being_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, right = threading.Event(), threading.Event(), slabs.touch

    def slowly(tensors: Any, *wanted: Any) -> None:
        begun.set()
        assert go_on.wait(30.0)
        right(tensors, *wanted)

    monkeypatch.setattr(slabs, "touch", slowly)
    made = StoreRoom(torch.device("cpu"), 1.0, Meter())
    first = threading.Thread(target=made.prepare, args=(POOL, None, None), kwargs={"ahead": True})
    first.start()
    assert begun.wait(30.0)
    stores = list[Store]()
    second = threading.Thread(target=lambda: stores.append(made.open(POOL)))
    second.start()
    second.join(0.05)
    assert not stores
    go_on.set()
    first.join(30.0)
    second.join(30.0)
    assert stores[0].nbytes > 0.95 * SIZE
    assert made.slabs.nbytes == 0


def test_a_spare_takes_no_memory_that_the_host_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_bytes", lambda device: SIZE - 1)
    made = StoreRoom(torch.device("cpu"), 1.0, Meter())
    with pytest.raises(ValueError, match=r"KV blocks take 67\.1 MB, 67\.1 MB are free here"):
        made.prepare(POOL, None, None, ahead=True)
    assert made.slabs.nbytes == 0


def test_a_spare_that_is_told_of_another_size_has_that_one_alone() -> None:
    made, _, _ = ready()
    before = resident()
    made.prepare(replace(POOL, kv_bytes=SIZE // 2), None, None, ahead=True)
    assert before - resident() > SIZE // 4
    assert 0.45 * SIZE < made.slabs.nbytes < 0.55 * SIZE
    made.prepare(None, None, None, ahead=False)
    assert made.slabs.nbytes == 0
