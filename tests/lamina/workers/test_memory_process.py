"""The life of a memory worker: its control link, its end, a compute worker that is lost and replaced."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lamina import netstack
from lamina.attention.spec import AttentionSpec
from lamina.memory.main import serve_memory
from lamina.netstack import Channel, Geometry, PeerFault
from lamina.protocol.control import (
    AskStats,
    ControlLink,
    Failed,
    LinkClosedError,
    MemoryReady,
    StartMemory,
    Stats,
    Stop,
)
from lamina.protocol.options import KVOptions
from lamina.protocol.partition import by_head
from lamina.protocol.plan import (
    Bind,
    Key,
    Kind,
    LayerShape,
    New,
    Rows,
    StepPlan,
    decode_bound,
    encode,
)

ROOT = Path(__file__).resolve().parents[3]
KEY = b"k" * 32
WAIT_S = 30.0
SERVE = "lamina.memory.main:serve_memory"
GEOMETRY = Geometry(slots=4, slot_bytes=1 << 16)
SHAPE = LayerShape(2, 1, 16, 16, AttentionSpec(scale=0.25).encode())


def bind() -> Bind:
    return Bind(
        worker=0,
        partition=by_head([1], [1.0]),
        layers=[SHAPE],
        dtype="float32",
        kv=KVOptions(block_size=16, attention="reference"),
        kv_bytes=1 << 20,
        max_rows=8,
        max_model_len=64,
    )


def send(channel: Channel, key: Key, data: bytes) -> None:
    slot = channel.reserve(len(data), timeout_s=WAIT_S)
    slot.data[:] = data
    channel.put_signal(slot, key.pack())


def receive(channel: Channel, kind: Kind) -> bytes:
    arrival = channel.wait_signal(timeout_s=WAIT_S)
    assert Key.unpack(arrival.tag).kind == kind
    data = bytes(arrival.data)
    channel.release(arrival)
    return data


def bound(fabric: netstack.Fabric, url: str, epoch: int = 0) -> Channel:
    channel = fabric.connect(url, outbound=GEOMETRY, inbound=GEOMETRY, epoch=epoch, timeout_s=WAIT_S)
    send(channel, Key(Kind.BIND), encode(bind()))
    assert decode_bound(receive(channel, Kind.BOUND)).windows == [0]
    return channel


def step(channel: Channel, number: int) -> bytes:
    """One token of one new sequence."""
    send(channel, Key(Kind.PLAN, number), encode(StepPlan(step=number, ops=[New(number)], rows=[Rows(number, 0, 1)])))
    send(channel, Key(Kind.Q, number, layer=0), bytes(2 * 16 * 4))
    send(channel, Key(Kind.KV, number, layer=0), bytes(2 * 16 * 4))
    return receive(channel, Kind.O)


class Driver:
    """The driver's end of the control link."""

    def __init__(self, sock: socket.socket, scheme: str, *, address: str = "", key: bytes = KEY) -> None:
        self.link = ControlLink(sock, MemoryReady | Stats | Failed)
        self.link.send(StartMemory(scheme=scheme, address=address, key=key, threads=1))

    def ready(self) -> str:
        message = self.link.recv(WAIT_S)
        assert isinstance(message, MemoryReady)
        return message.url

    def stats(self) -> dict[str, float]:
        self.link.send(AskStats())
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
        channel = bound(fabric, driver.ready())
        step(channel, 0)
        send(channel, Key(Kind.PLAN, 1), encode(StepPlan(step=1, ops=[New(1)], rows=[Rows(1, 0, 1)])))
        deadline = time.monotonic() + WAIT_S
        while driver.stats()["steps"] < 2:  # it now waits for Q
            assert time.monotonic() < deadline
        assert driver.stats()["rows"] == 2


@pytest.mark.parametrize("how", ["stop", "the link ends"])
@pytest.mark.parametrize("state", ["idle", "bound", "in a step"])
def test_it_ends_when_the_driver_says_so_or_is_gone(how: str, state: str) -> None:
    with threaded() as (driver, fabric, thread):
        url = driver.ready()
        if state != "idle":
            channel = bound(fabric, url)
        if state == "in a step":
            send(channel, Key(Kind.PLAN, 1), encode(StepPlan(step=1, ops=[New(1)], rows=[Rows(1, 0, 1)])))
        start = time.monotonic()
        if how == "stop":
            driver.link.send(Stop())
        else:
            driver.link.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert time.monotonic() - start < 5
        if state != "idle":
            with pytest.raises(PeerFault):
                channel.wait_signal(timeout_s=WAIT_S)
        if how == "stop":
            with pytest.raises(LinkClosedError):
                driver.link.recv(WAIT_S)


def test_a_lost_compute_worker_can_be_replaced() -> None:
    with threaded() as (driver, fabric, _):
        url = driver.ready()
        for epoch in range(3):
            channel = bound(fabric, url, epoch)
            step(channel, 0)
            send(channel, Key(Kind.PLAN, 1), encode(StepPlan(step=1, ops=[New(1)], rows=[Rows(1, 0, 1)])))
            channel.close()  # in the middle of a step; sequence 0 is new again on the next channel
        assert driver.stats()["steps"] >= 3


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


def test_a_process_serves_over_shared_memory_and_stops() -> None:
    with process() as (driver, fabric, child):
        channel = bound(fabric, driver.ready())
        os.kill(child.pid, signal.SIGINT)  # Ctrl-C is for the driver
        assert step(channel, 0) == bytes(2 * 16 * 4)
        assert driver.stats()["bytes_received"] > 0
        driver.link.send(Stop())
        assert child.wait(WAIT_S) == 0


def test_a_process_goes_with_its_driver() -> None:
    with process() as (driver, fabric, child):
        bound(fabric, driver.ready())
        start = time.monotonic()
        driver.link.close()
        child.wait(WAIT_S)
        assert time.monotonic() - start < 5
