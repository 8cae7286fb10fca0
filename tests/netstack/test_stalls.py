"""Peers that stop, wake up too late, or read too slowly."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from peer import SIZE
from wiring import GEOMETRY, SOON_S, START_S, connect, open_or_skip, peer_process, send

from lamina import netstack
from lamina.netstack import Channel, Fabric, Geometry
from lamina.netstack.contract.channel_terms import EPOCH_SHIFT


@pytest.fixture(params=["shm", "tcp", "verbs"])
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    fabric = open_or_skip(request.param)
    yield fabric
    fabric.close()


def inboxes() -> set[str]:
    """The shared memory that is mapped here, by inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:lamina" in line}


def stop(process_id: int) -> None:
    os.kill(process_id, signal.SIGSTOP)
    os.waitid(os.P_PID, process_id, os.WSTOPPED | os.WNOWAIT)


def receive_all_of(channel: Channel, fill: int, count: int) -> None:
    for _ in range(count):
        arrival = channel.wait_signal(timeout_s=SOON_S)
        assert arrival.seqno >> EPOCH_SHIFT == channel.epoch
        assert bytes(arrival.data) == bytes([fill]) * SIZE
        channel.release(arrival)


def test_a_writer_that_wakes_in_an_old_epoch_hits_nothing(fabric: Fabric) -> None:
    """It is stopped at any moment, often inside a copy. The link is reset; then it goes on where it was."""
    listener = fabric.listen()
    with peer_process("fill", listener.url, PEER_FILL="1", PEER_EPOCH="4") as old:
        late = listener.accept(timeout_s=START_S)
        receive_all_of(late, 1, 5)
        stop(old.pid)
        before = inboxes()
        late.abort("it does not answer")
        with peer_process("fill", listener.url, PEER_FILL="2", PEER_EPOCH="5"):
            fresh = listener.accept(timeout_s=START_S)
            assert fresh.epoch == 5
            if fabric.scheme == "shm":
                assert len(inboxes() - before) == 1  # fresh memory, not the old one again
            receive_all_of(fresh, 2, 5)
            old.send_signal(signal.SIGCONT)
            receive_all_of(fresh, 2, 40)
            assert old.wait(SOON_S) != 0  # it noticed that its channel is over, and by no signal of ours
        with pytest.raises(netstack.ChannelAborted):
            late.wait_signal(timeout_s=0)


def test_a_slow_reader_costs_its_slots_and_no_more(fabric: Fabric) -> None:
    """The sender gets an error at once; nothing is queued anywhere, whatever it tries.

    Each release is worth one message.
    """
    a, b = connect(fabric, geometry=Geometry(slots=3, slot_bytes=1000))
    for n in range(3):
        send(a, bytes([n]) * 1000)
    for _ in range(100):
        with pytest.raises(netstack.NoResource):
            a.reserve(1)
    for n in range(3, 30):
        arrival = b.wait_signal(timeout_s=SOON_S)
        assert bytes(arrival.data) == bytes([n - 3]) * 1000
        b.release(arrival)
        send(a, bytes([n]) * 1000)
        with pytest.raises(netstack.NoResource):
            a.reserve(1)


def test_a_reader_that_reads_nothing_keeps_a_sender_waiting_no_longer_than_it_asked(fabric: Fabric) -> None:
    listener = fabric.listen()
    with peer_process("wait", listener.url) as reader:
        channel = listener.accept(timeout_s=START_S)
        channel.wait_signal(timeout_s=SOON_S)
        stop(reader.pid)
        for _ in range(GEOMETRY.slots):
            send(channel, b"x")
        start = time.monotonic()
        with pytest.raises(netstack.NoResource):
            channel.reserve(1, timeout_s=0.3)
        assert 0.3 <= time.monotonic() - start < SOON_S
        reader.send_signal(signal.SIGCONT)
