"""Peers in processes of their own: they die and stall at any moment, and nothing of them remains."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import soft_nic
from cuda_stand_in import STAND_IN, scheme_of
from wiring import GEOMETRY, KEY, PATH, ROOT, SOON_S, START_S, connect, open_or_skip, peer_process, send

from lamina import netstack
from lamina.netstack import Channel, Fabric
from lamina.netstack.bootstrap import listener as meeting
from lamina.netstack.contract.fabric import DEATH_NOTICED_S

SLOW = ("nic-model-proxy", STAND_IN)
SCHEMES = [
    pytest.param(s, marks=pytest.mark.slow if s in SLOW else ())
    for s in (*netstack.SCHEMES, *soft_nic.SCHEMES, STAND_IN)
    if s != "loopback"
]
PATTERN = bytes(range(256)) * (GEOMETRY.slot_bytes // 256)


@pytest.fixture(params=SCHEMES)
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    with scheme_of(request.param) as scheme:
        fabric = open_or_skip(scheme)
        yield fabric
        fabric.close()


def fault_after(channel: Channel, call: str) -> tuple[int, float]:
    """Receive until the channel faults: (messages, seconds)."""
    start = time.monotonic()
    messages = 0
    try:
        while time.monotonic() < start + SOON_S:
            if call == "reserve":
                channel.reserve(1, timeout_s=SOON_S)
                continue
            arrival = channel.wait_signal(timeout_s=SOON_S)
            assert arrival.data == PATTERN[: arrival.data.nbytes]
            channel.release(arrival)
            messages += 1
    except netstack.PeerFault:
        return messages, time.monotonic() - start
    raise AssertionError("the death was not noticed")


def test_echo_between_processes(fabric: Fabric) -> None:
    listener = fabric.listen()
    rng = random.Random(5)
    with peer_process("echo", listener.url):
        channel = listener.accept(timeout_s=START_S)
        for n in range(200):
            payload = rng.randbytes(rng.choice([0, 1, 63, 64, 65, 4096, 100_000]))
            send(channel, payload, b"%d" % n)
            arrival = channel.wait_signal(timeout_s=SOON_S)
            assert (arrival.data, arrival.tag.rstrip(b"\0")) == (payload, b"%d" % n)
            channel.release(arrival)


@pytest.mark.long(but=["shm-wait-wait_signal", "shm-wait-reserve", "shm-put-wait_signal", "shm-put-reserve"])
@pytest.mark.parametrize("call", ["wait_signal", "reserve"])
@pytest.mark.parametrize("role", ["wait", "put", "half"])
def test_kill_of_the_peer_is_noticed(fabric: Fabric, role: str, call: str) -> None:
    listener = fabric.listen()
    with peer_process(role, listener.url) as peer:
        channel = listener.accept(timeout_s=START_S)
        channel.release(channel.wait_signal(timeout_s=SOON_S))  # now it is in its role
        peer.kill()
        _, seconds = fault_after(channel, call)
        assert seconds < 5 * DEATH_NOTICED_S, "on a busy machine"
        fault_after(channel, "wait_signal")  # what was complete
        for again in (lambda: channel.reserve(1), lambda: channel.wait_signal(timeout_s=0)):
            with pytest.raises(netstack.PeerFault):
                again()


@pytest.mark.no_retry
@pytest.mark.long(but=["shm"])
def test_a_kill_at_any_moment_leaves_only_whole_messages(fabric: Fabric) -> None:
    listener = fabric.listen()
    rng = random.Random(6)
    for _ in range(4):
        with peer_process("put", listener.url) as peer:
            channel = listener.accept(timeout_s=START_S)
            for _ in range(rng.randint(1, 30)):
                channel.release(channel.wait_signal(timeout_s=SOON_S))
            peer.kill()
            messages, _ = fault_after(channel, "wait_signal")  # checks every payload
            assert messages <= GEOMETRY.slots


@pytest.mark.no_retry
def test_half_a_message_is_never_seen(fabric: Fabric) -> None:
    listener = fabric.listen()
    with peer_process("half", listener.url) as peer:
        channel = listener.accept(timeout_s=START_S)
        assert channel.wait_signal(timeout_s=SOON_S).tag.startswith(b"whole")
        with pytest.raises(netstack.ChannelTimeout):  # half a message is none
            channel.wait_signal(timeout_s=0.2)
        peer.kill()
        with pytest.raises(netstack.PeerFault):
            channel.wait_signal(timeout_s=SOON_S)


def test_a_stopped_peer_is_a_timeout_at_the_deadline_and_no_fault(fabric: Fabric) -> None:
    listener = fabric.listen()
    with peer_process("echo", listener.url) as peer:
        channel = listener.accept(timeout_s=START_S)
        peer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, peer.pid, os.WSTOPPED | os.WNOWAIT)
        for n in range(GEOMETRY.slots):
            send(channel, b"%d" % n)
        start = time.monotonic()
        with pytest.raises(netstack.ChannelTimeout):
            channel.wait_signal(timeout_s=0.5)
        with pytest.raises(netstack.NoResource):
            channel.reserve(1, timeout_s=0.5)
        assert 1.0 <= time.monotonic() - start < SOON_S
        peer.send_signal(signal.SIGCONT)
        for n in range(GEOMETRY.slots):
            arrival = channel.wait_signal(timeout_s=SOON_S)
            assert arrival.data == b"%d" % n
            channel.release(arrival)


def footprint(url: str = "") -> dict[str, list[str]]:
    """Returns what this process holds, and what this host holds for ``url``, that a channel could have left."""
    gc.collect()  # channels of earlier tests, which would go at some time in between
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(fd.readlink().name.split(":")[0].split(" ")[0])
        except OSError:
            continue  # the listing's own descriptor
    name = url.partition("://")[2] or "no such name"
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if name in line]
    files = [name for name in os.listdir("/dev/shm") if "lamina" in name]
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:lamina" in line]
    return {"fds": sorted(links), "files": files, "sockets": sockets, "maps": maps}


@pytest.mark.no_retry
@pytest.mark.long(but=["shm-False"])
@pytest.mark.parametrize("kill", [False, True])
def test_nothing_is_left_behind(fabric: Fabric, kill: bool) -> None:
    before = footprint()
    listener = fabric.listen()
    with peer_process("echo", listener.url) as peer:
        channel = listener.accept(timeout_s=START_S)
        send(channel, b"x")
        arrival = channel.wait_signal(timeout_s=SOON_S)
        assert footprint(listener.url) != before  # the look can fail
        if kill:
            peer.kill()
            peer.wait(SOON_S)
        channel.close()
        listener.close()
    del arrival, channel
    assert footprint(listener.url) == before


@pytest.mark.no_retry
@pytest.mark.long(but=["shm"])
def test_nothing_is_left_when_both_sides_are_killed(fabric: Fabric) -> None:
    before = footprint()
    environment = os.environ | {"PEER_URL": f"{fabric.scheme}://", "PEER_KEY": KEY.hex(), "PYTHONPATH": PATH}
    command = [sys.executable, str(Path(__file__).resolve().parents[1] / "support" / "netstack" / "peer.py"), "listen"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with peer_process("wait", url) as client:
            assert server.stdout.readline() == "accepted\n"
            client.kill()
            server.kill()
    assert footprint(url) == before


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"LMNA", bytes(200)])
def test_strangers_do_not_hold_up_a_peer(fabric: Fabric, noise: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "HANDSHAKE_S", 3 * SOON_S)  # a wait for one of them would be late
    listener = fabric.listen()
    name = listener.url.partition("://")[2]
    strangers = []
    for _ in range(100):
        if fabric.scheme.endswith(("shm", "cuda")):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(f"\0{name}")
        else:
            host, _, port = name.rpartition(":")
            stranger = socket.create_connection((host, int(port)))
        stranger.sendall(noise)
        strangers.append(stranger)
        if len(strangers) == 50:
            with pytest.raises(netstack.ChannelTimeout):
                listener.accept(timeout_s=0.1)
    a, b = connect(fabric, listener)
    send(a, b"friend")
    assert b.wait_signal(timeout_s=SOON_S).data == b"friend"
    for stranger in strangers:
        stranger.close()


def test_import_is_light() -> None:
    code = "import sys, lamina.netstack; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'ctypes')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 0
