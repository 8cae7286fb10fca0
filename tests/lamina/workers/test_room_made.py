"""Memory that is made ready for a change that may come: for the last one that was asked for, and no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from memory_peer import bind, shape

from lamina.memory.main import MemoryServer
from lamina.protocol.recut import MakeRoom, RoomMade

BIND = bind([shape()], (1.0,), 0, "head")


def server() -> tuple[MemoryServer, list[Callable[[], None]], list[Any], list[RoomMade]]:
    """It, what it is about to do beside its work, what it has made ready, and what it has said."""
    due, made, said = list[Callable[[], None]](), list[Any](), list[RoomMade]()
    one = MemoryServer.__new__(MemoryServer)
    one._around = SimpleNamespace(beside=lambda work, name: due.append(work))  # type: ignore[assignment]
    one._loaded = lambda: SimpleNamespace(prepare=lambda bind, tier: made.append(bind))  # type: ignore[method-assign,return-value,assignment]
    one._service = SimpleNamespace(link=SimpleNamespace(send=said.append))  # type: ignore[assignment]
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
