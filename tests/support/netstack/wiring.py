"""Helpers of the network tests: a pair of ends in this process, and a peer in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from lamina import netstack
from lamina.netstack import Channel, Fabric, Geometry, Listener, Terms
from lamina.netstack.auto import AutoFabric, listener_name
from lamina.netstack.bench.job import Payloads
from lamina.netstack.bootstrap.listener import StreamListener

KEY = b"k" * 32
SOON_S = 20.0  # on a busy machine
START_S = 60.0  # for a process of peer.py to come: in an emulated guest its imports take long
GEOMETRY = Geometry(slots=4, slot_bytes=1 << 20)
ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # of a process of peer.py


def open_or_skip(scheme: str) -> Fabric:
    try:
        return netstack.open(scheme, key=KEY)
    except ImportError as error:
        pytest.skip(str(error))


def connect(
    fabric: Fabric,
    listener: Listener | None = None,
    geometry: Geometry = GEOMETRY,
    epoch: int = 0,
    kernels: bool = False,
) -> tuple[Channel, Channel]:
    """(the connected end, the accepted end) of a new channel."""
    place = listener or fabric.listen()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(place.accept, timeout_s=SOON_S)
        terms = Terms(outbound=geometry, inbound=geometry, epoch=epoch, kernels=kernels)
        connected = fabric.connect(place.url, terms, timeout_s=SOON_S)
        return connected, accepted.result(SOON_S)


def beyond_memory(fabric: AutoFabric) -> StreamListener:
    """A listener of ``fabric`` as one on another host is seen: its local name is squatted on."""
    squatter = netstack.open("shm", key=b"another key, of a stranger")
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # no other program gets this port, and one that names it may still listen there (socket(7))
        kept.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{kept.getsockname()[1]}"
        with closing(squatter.listen(listener_name(place))):
            return fabric.listen(place)


def spoil_payloads(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """Have the "client" or the "server" of the bench, who is on this thread, change a byte of its third payload."""
    real, server = Payloads.__init__, threading.current_thread()

    def spoiled(self: Payloads, nbytes: int) -> None:
        real(self, nbytes)
        if (threading.current_thread() is server) == (side == "server"):
            self.each[2] = self.each[2][:-1] + bytes([self.each[2][-1] ^ 1])

    monkeypatch.setattr(Payloads, "__init__", spoiled)


def send(channel: Channel, payload: bytes, tag: bytes = b"") -> int:
    slot = channel.reserve(len(payload), timeout_s=SOON_S)
    slot.data[:] = payload
    return channel.put_signal(slot, tag)


@contextmanager
def peer_process(role: str, url: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that connects to ``url`` and plays ``role`` of peer.py. It is killed at the end."""
    environment = os.environ | {"PEER_URL": url, "PEER_KEY": KEY.hex(), "PYTHONPATH": PATH} | more
    process = subprocess.Popen([sys.executable, str(HERE / "peer.py"), role], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait(SOON_S)
