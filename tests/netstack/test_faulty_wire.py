"""TCP through a proxy that tears, drops, repeats, reorders and flips: what arrives is what was sent, or a fault."""

from __future__ import annotations

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from frames import HEADER_BYTES, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from wiring import KEY, SOON_S, send

from lamina.netstack import Geometry, PeerFault, Terms
from lamina.netstack.bootstrap.handshake import CHALLENGE, HELLO, PROOF_BYTES
from lamina.netstack.host.tcp import TcpFabric

MESSAGES = 6
GEOMETRY = Geometry(slots=MESSAGES, slot_bytes=9000)  # as many slots as messages: no credit has to come back


def flip(stream: bytes, at: int, length: int) -> bytes:
    return stream[:at] + bytes([stream[at] ^ (1 << length % 8)]) + stream[at + 1 :]


def drop(stream: bytes, at: int, length: int) -> bytes:
    return stream[:at] + stream[at + length :]


def repeat(stream: bytes, at: int, length: int) -> bytes:
    return stream[: at + length] + stream[at : at + length] + stream[at + length :]


def reorder(stream: bytes, at: int, length: int) -> bytes:
    a, b = stream[at : at + length], stream[at + length : at + 2 * length]
    return stream[:at] + b + a + stream[at + 2 * length :]


def tear(stream: bytes, at: int, _: int) -> bytes:
    return stream[:at]


def carry(listening: socket.socket, target: tuple[str, int], nbytes: int, fault: tuple[object, int, int]) -> bytes:
    """The proxy: the handshake as it is, then ``nbytes`` of the connector's stream with the fault; what it let by."""
    spoil, at, length = fault
    source, _ = listening.accept()
    with source, socket.create_connection(target) as sink:
        for frame, (there, back) in zip(
            (HELLO.size, CHALLENGE.size, PROOF_BYTES, PROOF_BYTES), [(source, sink), (sink, source)] * 2, strict=True
        ):
            back.sendall(there.recv(frame, socket.MSG_WAITALL))
        stream = source.recv(nbytes, socket.MSG_WAITALL)
        spoilt = spoil(stream, at, length)  # type: ignore[operator]
        sink.settimeout(SOON_S)
        with suppress(OSError):  # the receiver may have seen enough
            sink.sendall(spoilt)
            sink.shutdown(socket.SHUT_WR)
            while sink.recv(1 << 16):
                pass
        return bytes(spoilt)


def through_proxy(seal: bool, payloads: list[bytes], fault: tuple[object, int, int]) -> tuple[list[bytes], bytes]:
    """(the payloads received before the fault or the end, the stream that the proxy let by)."""
    sender, receiver = TcpFabric(KEY, seal=seal), TcpFabric(KEY, seal=seal)
    listener = receiver.listen()
    host, _, port = listener.url.partition("://")[2].rpartition(":")
    nbytes = sum(HEADER_BYTES + len(payload) for payload in payloads)
    try:
        with socket.create_server(("127.0.0.1", 0)) as proxy, ThreadPoolExecutor(2) as pool:
            carried = pool.submit(carry, proxy, (host, int(port)), nbytes, fault)
            accepted = pool.submit(listener.accept, timeout_s=SOON_S)
            url = f"tcp://127.0.0.1:{proxy.getsockname()[1]}"
            out = sender.connect(url, Terms(outbound=GEOMETRY, inbound=GEOMETRY))
            into = accepted.result(SOON_S)
            for n, payload in enumerate(payloads):
                send(out, payload, b"%d" % n)
            received = []
            try:
                while True:
                    arrival = into.wait_signal(timeout_s=SOON_S)
                    assert arrival.tag.rstrip(b"\0") == b"%d" % len(received)
                    received.append(bytes(arrival.data))
            except PeerFault:
                into.close()
            return received, carried.result(SOON_S)
    finally:
        sender.close()
        receiver.close()


def random_payloads(seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.choice([0, 1, 100, 4096, 4500, 9000])) for _ in range(MESSAGES)]


@pytest.mark.parametrize("seal", [False, True], ids=["checksum", "code"])
def test_the_proxy_can_be_honest(seal: bool) -> None:
    payloads = random_payloads(1)
    assert through_proxy(seal, payloads, (drop, 0, 0))[0] == payloads


@pytest.mark.no_retry
@pytest.mark.parametrize("seal", [False, True], ids=["checksum", "code"])
@pytest.mark.parametrize("spoil", [flip, drop, repeat, reorder, tear])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30), where=st.floats(0, 1, exclude_max=True), length=st.integers(1, 5000))
def test_spoilt_bytes_never_reach_the_receiver(spoil: object, seal: bool, seed: int, where: float, length: int) -> None:
    payloads = random_payloads(seed)
    nbytes = sum(HEADER_BYTES + len(payload) for payload in payloads)
    at = int(where * nbytes)
    received, _ = through_proxy(seal, payloads, (spoil, at, length))
    assert received == payloads[: len(received)]
    ends, end = [], 0
    for payload in payloads:
        end += HEADER_BYTES + len(payload)
        ends.append(end)
    whole = sum(end <= at for end in ends)  # messages before the first byte that is spoilt, if it is
    assert len(received) >= whole
    if spoil in (flip, tear) or (spoil is drop and at + length < nbytes):
        assert len(received) == whole


@pytest.mark.no_retry
@pytest.mark.parametrize("seal", [False, True], ids=["checksum", "code"])
@pytest.mark.parametrize("spoil", [drop, repeat, reorder])
def test_whole_frames_are_not_dropped_repeated_or_reordered(spoil: object, seal: bool) -> None:
    """Each is well formed on its own; the count in its check is what tells."""
    payloads = [bytes([n]) * 100 for n in range(MESSAGES)]
    frame = HEADER_BYTES + 100
    received, _ = through_proxy(seal, payloads, (spoil, 2 * frame, frame))
    assert received == (payloads[:3] if spoil is repeat else payloads[:2])


@pytest.mark.parametrize("seal", [False, True], ids=["checksum", "code"])
def test_only_the_code_stops_somebody_who_computes_checks_anew(seal: bool) -> None:
    """The checksum is against accidents, within one host; the code is against strangers. The first shows the second."""
    forged = pack(None, 0, b"evil", seqno=1, tag=b"0")

    def forge(stream: bytes, _: int, __: int) -> bytes:
        return forged + stream[len(forged) :]

    received, _ = through_proxy(seal, [b"good"], (forge, 0, 0))
    assert received == ([] if seal else [b"evil"])
