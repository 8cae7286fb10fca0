"""The handshake over a socket pair: who gets in, who does not, and what a man in the middle can do (nothing)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wiring import KEY, SOON_S

from lamina.netstack import ChannelTimeout, Geometry, HandshakeError, handshake
from lamina.netstack.handshake import CHALLENGE, HELLO, PROOF_BYTES, Exchange, Session, Terms, answer, offer, run

TERMS = Terms("shm", 3, Geometry(slots=4, slot_bytes=100), Geometry(slots=7, slot_bytes=1 << 32), sealed=True)
SESSION = Session(TERMS.scheme, TERMS.epoch, TERMS.outbound, TERMS.inbound, sealed=True)
SIZES = [HELLO.size, CHALLENGE.size, PROOF_BYTES, PROOF_BYTES]  # the four frames, connector first, then in turn


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def outcome(future: Future[Session]) -> Session | HandshakeError:
    try:
        return future.result(SOON_S)
    except HandshakeError as error:
        return error


def shake(
    pool: ThreadPoolExecutor, tamper: Callable[[int, bytes], bytes] = lambda _, frame: frame, key: bytes = KEY
) -> tuple[Session | HandshakeError, Session | HandshakeError]:
    """(the connector's, the listener's) outcome, with ``tamper(number, frame)`` between them."""
    connector, left = socket.socketpair()
    right, listener = socket.socketpair()
    deadline = time.monotonic() + SOON_S

    def closing(sock: socket.socket, steps: handshake.Steps) -> Session:
        with sock:
            return run(sock, steps, "peer", deadline=deadline)

    def carry() -> None:
        with left, right:
            for number, size in enumerate(SIZES):
                source, target = (left, right) if number % 2 == 0 else (right, left)
                frame = source.recv(size, socket.MSG_WAITALL)
                if len(frame) < size:
                    return
                target.sendall(tamper(number, frame))

    futures = [pool.submit(closing, connector, offer(key, TERMS)), pool.submit(closing, listener, answer(KEY, "shm"))]
    pool.submit(carry)
    return outcome(futures[0]), outcome(futures[1])


def test_equal_keys_agree_on_the_terms(pool: ThreadPoolExecutor) -> None:
    assert shake(pool) == (SESSION, SESSION)


def test_both_sides_derive_the_same_keys_and_no_two_are_alike(pool: ThreadPoolExecutor) -> None:
    seen = set()
    for _ in range(3):
        connector, listener = shake(pool)
        assert isinstance(connector, Session)
        assert isinstance(listener, Session)
        there, back = connector.keys(listening=False)
        assert listener.keys(listening=True) == (back, there)
        seen |= {there, back}
    assert len(seen) == 6
    assert {len(key) for key in seen} == {32}
    assert connector.secret.hex() not in repr(connector)


def test_terms_without_a_seal_are_refused_where_one_is_due(pool: ThreadPoolExecutor) -> None:
    bare = Terms("shm", 3, TERMS.outbound, TERMS.inbound)
    ours, theirs = socket.socketpair()
    deadline = time.monotonic() + SOON_S
    connecting = pool.submit(run, ours, offer(KEY, bare), "peer", deadline=deadline)
    with theirs, pytest.raises(HandshakeError, match="MAC"):
        run(theirs, answer(KEY, "shm", must_seal=True), "peer", deadline=deadline)
    with ours:
        assert isinstance(outcome(connecting), HandshakeError)


def test_proofs_are_compared_in_constant_time(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that comparison says yes to everything, nothing else asks for the key on either side."""
    monkeypatch.setattr("hmac.compare_digest", lambda one, other: len(one) == len(other))
    assert shake(pool, key=b"another key, no better") == (SESSION, SESSION)


def test_different_keys_fail_on_both_sides(pool: ThreadPoolExecutor) -> None:
    for error in shake(pool, key=b"another key of 32 bytes, roughly"):
        assert isinstance(error, HandshakeError)
        assert "keys differ" in str(error)


@pytest.mark.parametrize("number", range(4))
def test_one_flipped_bit_anywhere_is_refused(pool: ThreadPoolExecutor, number: int) -> None:
    for position in range(SIZES[number]):

        def flip(n: int, frame: bytes, position: int = position) -> bytes:
            if n != number:
                return frame
            return frame[:position] + bytes([frame[position] ^ 1]) + frame[position + 1 :]

        connector, listener = shake(pool, flip)
        assert isinstance(connector, HandshakeError)
        # By the last frame the listener has its proof already; the terms are then the true ones.
        assert isinstance(listener, HandshakeError) if number < 3 else listener == SESSION


def test_a_recorded_handshake_cannot_be_replayed(pool: ThreadPoolExecutor) -> None:
    recorded: dict[int, bytes] = {}
    shake(pool, recorded.setdefault)
    to_listener = shake(pool, lambda n, frame: recorded[n] if n % 2 == 0 else frame)
    assert isinstance(to_listener[1], HandshakeError)
    steps = offer(KEY, TERMS)
    next(steps)
    steps.send(recorded[1])
    with pytest.raises(HandshakeError):
        steps.send(recorded[3])


def test_a_proof_cannot_be_reflected() -> None:
    """A listener without the key sends the connector's own proof back."""
    steps = offer(KEY, TERMS)
    hello, *_ = next(steps)
    proof, *_ = steps.send(CHALLENGE.pack(handshake.MAGIC, handshake.VERSION, bytes(32)))
    assert len(hello) == HELLO.size
    with pytest.raises(HandshakeError):
        steps.send(proof)


def test_another_version_is_named_on_both_sides(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(number: int, frame: bytes) -> bytes:
        return frame[:4] + (handshake.VERSION + 1).to_bytes(2, "big") + frame[6:] if number in (0, 1) else frame

    for error in shake(pool, older):
        assert f"version {handshake.VERSION + 1}" in str(error)


def test_another_transport_is_refused(pool: ThreadPoolExecutor) -> None:
    ours, theirs = socket.socketpair()
    deadline = time.monotonic() + SOON_S
    connecting = pool.submit(run, ours, offer(KEY, TERMS), "peer", deadline=deadline)
    with theirs, pytest.raises(HandshakeError, match="shm"):
        run(theirs, answer(KEY, "tcp"), "peer", deadline=deadline)
    with ours:
        assert isinstance(outcome(connecting), HandshakeError)


@pytest.mark.parametrize("steps", [offer(KEY, TERMS), answer(KEY, "shm")], ids=["offer", "answer"])
def test_a_silent_peer_costs_one_deadline_however_slowly_it_talks(steps: handshake.Steps) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"L")
        start = time.monotonic()
        with pytest.raises(ChannelTimeout, match="peer"):
            run(ours, steps, "peer", deadline=start + 0.2)
        assert 0.2 <= time.monotonic() - start < 2.0


def test_frames_in_single_bytes_and_nothing_beyond_is_read(pool: ThreadPoolExecutor) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        exchange = Exchange(ours, answer(KEY, "shm"))
        steps = offer(KEY, TERMS)
        unsent, wanted, _ = next(steps)
        terms = None
        while wanted:
            for k in range(len(unsent)):
                assert terms is None
                theirs.send(unsent[k : k + 1])
                terms = exchange.advance()
            if terms:
                theirs.send(b"what comes after")
            frame = theirs.recv(wanted, socket.MSG_WAITALL)
            try:
                unsent, wanted, _ = steps.send(frame)
            except StopIteration:
                break
        assert terms == SESSION
        assert ours.recv(100) == b"what comes after"


@settings(max_examples=200, deadline=None)
@given(noise=st.binary(max_size=300), start=st.booleans())
def test_garbage_is_refused_and_never_anything_else(noise: bytes, start: bool) -> None:
    hello, *_ = next(offer(b"another key" * 3, TERMS))
    ours, theirs = socket.socketpair()
    with ours:
        exchange = Exchange(ours, answer(KEY, "shm"))
        theirs.sendall(hello + noise if start else noise)
        theirs.close()
        with pytest.raises(HandshakeError):
            exchange.advance()
