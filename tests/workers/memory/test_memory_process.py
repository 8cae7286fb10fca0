"""The life of a memory worker: its control link, its end, a compute worker that is lost and replaced."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from lamina import netstack
from lamina.config.engine_config import KVOptions
from lamina.config.partition import by_head
from lamina.netstack import Channel, Geometry, PeerFault, Terms
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.control import (
    Connect,
    ControlLink,
    Failed,
    LinkClosedError,
    MemoryReady,
    Quiesced,
    StartMemory,
    Stats,
    StatsRequest,
    Stop,
)
from lamina.protocol.step_plan import (
    BindRequest,
    JoinRequest,
    LayerShape,
    MessageKey,
    MessageKind,
    New,
    RowRange,
    StepPlan,
    decode_bind_reply,
    encode,
)
from lamina.workers.memory.main import serve_memory

ROOT = Path(__file__).resolve().parents[3]
KEY = b"k" * 32
WAIT_S = 60.0  # a fresh process imports torch, on a busy machine
SOON_S = 15.0
SERVE = "lamina.workers.memory.main:serve_memory"
GEOMETRY = Geometry(slots=4, slot_bytes=1 << 16)
SHAPE = LayerShape(2, 1, 16, 16, AttentionSpec(scale=0.25).encode())


def bind(view: int = 0) -> BindRequest:
    return BindRequest(
        epoch=view,
        worker=0,
        partition=by_head([1], [1.0]),
        layers=[SHAPE],
        dtype="float32",
        kv=KVOptions(block_size=16, attention="reference"),
        kv_bytes=1 << 20,
        max_rows=8,
        max_model_len=64,
    )


def send(channel: Channel, key: MessageKey, data: bytes) -> None:
    slot = channel.reserve(len(data), timeout_s=WAIT_S)
    slot.data[:] = data
    channel.put_signal(slot, key.pack())


def receive(channel: Channel, kind: MessageKind) -> bytes:
    arrival = channel.wait_signal(timeout_s=WAIT_S)
    assert MessageKey.unpack(arrival.tag).kind == kind
    data = bytes(arrival.data)
    channel.release(arrival)
    return data


def ask(channel: Channel, view: int, *, join: bool = False) -> tuple[MessageKind, bytes]:
    """Bind or join under ``epoch``, and what the answer is."""
    key, data = (
        (MessageKind.JOIN, JoinRequest(epoch=view, peer_number=1, layers=[SHAPE]))
        if join
        else (MessageKind.BIND, bind(view))
    )
    send(channel, MessageKey(key), encode(data))
    arrival = channel.wait_signal(timeout_s=WAIT_S)
    answer = MessageKind(MessageKey.unpack(arrival.tag).kind), bytes(arrival.data)
    channel.release(arrival)
    return answer


def knock(fabric: netstack.Fabric, url: str, view: int) -> Channel:
    return fabric.connect(url, Terms(outbound=GEOMETRY, inbound=GEOMETRY, epoch=view), timeout_s=WAIT_S)


def bound(driver: Driver, fabric: netstack.Fabric, url: str, view: int = 1) -> Channel:
    """A channel of a new epoch."""
    driver.link.send(Connect(epoch=view))
    channel = knock(fabric, url, view)
    answer, data = ask(channel, view)
    assert answer == MessageKind.BOUND
    assert decode_bind_reply(data).windows == [0]
    return channel


def token(position: int) -> bytes:
    """Makes a token of every query head, or of K and of V."""
    return struct.pack("16f", *(float((position + i) % 7) for i in range(16)))


def step(channel: Channel, number: int, *, view: int = 1, sequence: int | None = None, first: int = 0) -> bytes:
    """One token of a sequence, of one that is new where none is named."""
    named = number if sequence is None else sequence
    plan = StepPlan(
        epoch=view, step=number, ops=[New(named)] if sequence is None else [], rows=[RowRange(named, first, 1)]
    )
    send(channel, MessageKey(MessageKind.PLAN, number, epoch=view), encode(plan))
    for kind in (MessageKind.Q, MessageKind.KV):
        send(channel, MessageKey(kind, number, epoch=view, layer=0), 2 * token(first))
    return receive(channel, MessageKind.O)


class Driver:
    """The driver's end of the control link."""

    def __init__(self, sock: socket.socket, scheme: str, *, address: str = "", key: bytes = KEY) -> None:
        self.link = ControlLink(sock, MemoryReady | Stats | Failed | Quiesced)
        self.link.send(StartMemory(scheme=scheme, address=address, key=key, threads=1))

    def ready(self) -> str:
        message = self.link.recv(WAIT_S)
        assert isinstance(message, MemoryReady)
        return message.url

    def stats(self) -> dict[str, float]:
        self.link.send(StatsRequest())
        message = self.link.recv(WAIT_S)
        assert isinstance(message, Stats)
        return message.values


@contextmanager
def threaded(**options: object) -> Iterator[tuple[Driver, netstack.Fabric, threading.Thread]]:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve_memory, args=(theirs,), daemon=True)
    thread.start()
    fabric = netstack.open("loopback", key=KEY)
    driver = Driver(ours, "loopback", **options)  # type: ignore[arg-type]
    try:
        yield driver, fabric, thread
    finally:
        driver.link.close()
        fabric.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_stats_are_answered_while_a_step_is_on_its_way() -> None:
    with threaded() as (driver, fabric, _):
        channel = bound(driver, fabric, driver.ready())
        step(channel, 0)
        begin(channel)
        deadline = time.monotonic() + WAIT_S
        while driver.stats()["steps"] < 2:  # it now waits for Q
            assert time.monotonic() < deadline
        assert driver.stats()["rows"] == 2


@pytest.mark.no_retry
@pytest.mark.parametrize("how", ["stop", "the link ends"])
@pytest.mark.parametrize("state", ["idle", "bound", "in a step"])
def test_it_ends_when_the_driver_says_so_or_is_gone(how: str, state: str) -> None:
    with threaded() as (driver, fabric, thread):
        url = driver.ready()
        if state != "idle":
            channel = bound(driver, fabric, url)
        if state == "in a step":
            begin(channel)
        start = time.monotonic()
        if how == "stop":
            driver.link.send(Stop())
        else:
            driver.link.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert time.monotonic() - start < SOON_S
        if state != "idle":
            with pytest.raises(PeerFault):
                channel.wait_signal(timeout_s=WAIT_S)
        if how == "stop":
            with pytest.raises(LinkClosedError):
                driver.link.recv(WAIT_S)


def begin(channel: Channel, view: int = 1) -> None:
    """A step whose Q is to come."""
    plan = StepPlan(epoch=view, step=100, ops=[New(100 + view)], rows=[RowRange(100 + view, 0, 1)])
    send(channel, MessageKey(MessageKind.PLAN, 100, epoch=view), encode(plan))


def test_a_lost_compute_worker_is_replaced_and_its_sequences_go_on() -> None:
    """Each epoch ends in the middle of a step; the O of every step is that of a worker that was never lost."""
    length = 6
    with threaded() as (driver, fabric, _):
        channel = bound(driver, fabric, driver.ready())
        whole = [step(channel, 0), *(step(channel, n, sequence=0, first=n) for n in range(1, length))]
        assert len(set(whole)) == length, "attention sees what was stored"
    with threaded() as (driver, fabric, _):
        url, found = driver.ready(), list[bytes]()
        for n in range(length):
            view = 3 * n + 1  # numbers may be left out
            channel = bound(driver, fabric, url, view)
            found.append(step(channel, n, view=view, sequence=0 if n else None, first=n))
            begin(channel, view)
            channel.close()
        assert found == whole
        stats = driver.stats()
        assert (stats["stores"], stats["connects"]) == (1, length)


def test_a_newer_view_begins_while_peers_of_the_older_one_stay() -> None:
    with threaded() as (driver, fabric, _):
        url = driver.ready()
        old = bound(driver, fabric, url)
        step(old, 0)
        begin(old)
        new = bound(driver, fabric, url, 2)
        with pytest.raises(PeerFault, match="epoch 1 is over: epoch 2 begins"):
            old.wait_signal(timeout_s=WAIT_S)
        step(new, 1, view=2, sequence=0, first=1)
        assert driver.stats()["stores"] == 1


def test_a_view_for_which_nobody_comes_is_given_up_for_the_next() -> None:
    with threaded() as (driver, fabric, _):
        url = driver.ready()
        driver.link.send(Connect(epoch=1))
        step(bound(driver, fabric, url, 2), 0, view=2)


def test_who_comes_under_an_older_view_is_told_so_in_one_line() -> None:
    """Its channel's epoch shows it before the first message; its Bind or Join shows it where only that is older."""
    with threaded() as (driver, fabric, _):
        url = driver.ready()
        step(bound(driver, fabric, url), 0)
        driver.link.send(Connect(epoch=2))
        late = knock(fabric, url, 1)
        with pytest.raises(PeerFault, match="epoch 1 is over: this worker is in epoch 2") as told:
            late.wait_signal(timeout_s=WAIT_S)
        assert "\n" not in str(told.value)
        channel = knock(fabric, url, 2)
        answer, text = ask(channel, 1)
        assert (answer, text.decode()) == (MessageKind.REFUSED, "bind is of epoch 1, this worker is in epoch 2")
        assert ask(channel, 2)[0] == MessageKind.BOUND
        step(channel, 1, view=2, sequence=0, first=1)


def test_a_join_of_an_older_view_is_refused_and_the_right_one_is_awaited() -> None:
    with threaded() as (driver, fabric, _):
        url = driver.ready()
        driver.link.send(Connect(epoch=2))
        first = knock(fabric, url, 2)
        send(first, MessageKey(MessageKind.BIND), encode(structs.replace(bind(2), replicas=2)))
        receive(first, MessageKind.BOUND)
        answer, text = ask(knock(fabric, url, 2), 1, join=True)
        assert (answer, text.decode()) == (MessageKind.REFUSED, "join is of epoch 1, this worker is in epoch 2")
        assert ask(knock(fabric, url, 2), 2, join=True)[0] == MessageKind.BOUND
        step(first, 0, view=2)


def test_messages_of_an_older_view_are_dropped() -> None:
    """A plan and a layer are dropped: the step of this epoch goes on as if they had not come."""
    with threaded() as (driver, fabric, _):
        channel = bound(driver, fabric, driver.ready(), 2)
        old = StepPlan(epoch=1, step=0, ops=[New(0)], rows=[RowRange(0, 0, 1)])
        send(channel, MessageKey(MessageKind.PLAN, 0, epoch=1), encode(old))
        send(channel, MessageKey(MessageKind.Q, 0, epoch=1, layer=0), bytes(128))
        step(channel, 0, view=2)
        begin(channel, 2)
        send(channel, MessageKey(MessageKind.Q, 100, epoch=1, layer=0), bytes(128))
        for kind in (MessageKind.Q, MessageKind.KV):
            send(channel, MessageKey(kind, 100, epoch=2, layer=0), bytes(128))
        receive(channel, MessageKind.O)
        assert driver.stats()["dropped"] == 3


def test_a_model_of_another_shape_takes_the_place_of_the_old_one() -> None:
    with threaded() as (driver, fabric, _):
        url = driver.ready()
        step(bound(driver, fabric, url), 0)
        driver.link.send(Connect(epoch=2))
        channel = knock(fabric, url, 2)
        send(channel, MessageKey(MessageKind.BIND), encode(structs.replace(bind(2), dtype="int8")))
        assert b"--dtype" in receive(channel, MessageKind.REFUSED)
        assert driver.stats()["stores"] == 1
        send(channel, MessageKey(MessageKind.BIND), encode(structs.replace(bind(2), max_model_len=48)))
        receive(channel, MessageKind.BOUND)
        assert driver.stats()["stores"] == 2
        step(channel, 0, view=2)  # its sequence is new again


@pytest.mark.parametrize(
    ("options", "reason"), [({"key": b"short"}, "key needs"), ({"address": "taken"}, "name is in use")]
)
def test_it_says_why_it_cannot_start(options: dict[str, object], reason: str) -> None:
    other = netstack.open("loopback", key=KEY)
    listener = other.listen("taken")
    try:
        with threaded(**options) as (driver, _, _):
            message = driver.link.recv(WAIT_S)
            assert isinstance(message, Failed)
            assert message.user_error
            assert reason in message.text
    finally:
        listener.close()


@contextmanager
def process() -> Iterator[tuple[Driver, netstack.Fabric, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", "lamina.workers", SERVE, "--control-fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
        )
    fabric = netstack.open("shm", key=KEY)
    driver = Driver(ours, "shm")
    try:
        yield driver, fabric, child
    finally:
        driver.link.close()
        fabric.close()
        try:
            child.wait(WAIT_S)
        finally:
            child.kill()


@pytest.mark.long
def test_a_process_serves_over_shared_memory_and_stops() -> None:
    with process() as (driver, fabric, child):
        channel = bound(driver, fabric, driver.ready())
        os.kill(child.pid, signal.SIGINT)  # Ctrl-C is for the driver
        assert step(channel, 0) == 2 * token(0)
        assert driver.stats()["bytes_received"] > 0
        driver.link.send(Stop())
        assert child.wait(WAIT_S) == 0


@pytest.mark.no_retry
@pytest.mark.long
def test_a_process_goes_with_its_driver() -> None:
    with process() as (driver, fabric, child):
        bound(driver, fabric, driver.ready())
        start = time.monotonic()
        driver.link.close()
        child.wait(WAIT_S)
        assert time.monotonic() - start < SOON_S
