"""The handshake over a socket pair: who gets in, who does not, and what a man in the middle can do (nothing)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wiring import KEY, SOON_S

from lamina.netstack import ChannelTimeout, Geometry, HandshakeError
from lamina.netstack.bootstrap import handshake
from lamina.netstack.bootstrap.handshake import (
    CHALLENGE,
    HELLO,
    PREFIX,
    PROOF_BYTES,
    SEAL,
    AuthenticatedTerms,
    Exchange,
    Hello,
    answer,
    offer,
    run,
)

SEVEN = Geometry(slots=7, slot_bytes=1 << 32)
TERMS = Hello(
    scheme="shm",
    epoch=3,
    outbound=Geometry(slots=4, slot_bytes=100),
    inbound=SEVEN,
    cipher=SEAL,
    name="one",
    peer="other",
)
SESSION = AuthenticatedTerms(**vars(TERMS))
SIZES = [HELLO.size, CHALLENGE.size, PROOF_BYTES, PROOF_BYTES]  # the four frames, connector first, then in turn


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def outcome(future: Future[AuthenticatedTerms]) -> AuthenticatedTerms | HandshakeError:
    try:
        return future.result(SOON_S)
    except HandshakeError as error:
        return error


def answering() -> handshake.Steps:
    return answer(KEY, "shm", name="other")


Tamper = Callable[[int, bytes], bytes]
Outcome = AuthenticatedTerms | HandshakeError


def shake(
    pool: ThreadPoolExecutor, tamper: Tamper = lambda _, frame: frame, key: bytes = KEY
) -> tuple[Outcome, Outcome]:
    """(the connector's, the listener's) outcome, with ``tamper(number, frame)`` between them."""
    return shake_with(pool, offer(key, TERMS), answering(), tamper)


def shake_with(
    pool: ThreadPoolExecutor,
    offering: handshake.Steps,
    listening: handshake.Steps,
    tamper: Tamper = lambda _, frame: frame,
) -> tuple[Outcome, Outcome]:
    connector, left = socket.socketpair()
    right, listener = socket.socketpair()
    deadline = time.monotonic() + SOON_S

    def closing(sock: socket.socket, steps: handshake.Steps) -> AuthenticatedTerms:
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

    futures = [pool.submit(closing, connector, offering), pool.submit(closing, listener, listening)]
    pool.submit(carry)
    return outcome(futures[0]), outcome(futures[1])


def test_equal_keys_agree_on_the_terms(pool: ThreadPoolExecutor) -> None:
    assert shake(pool) == (SESSION, SESSION)


def test_both_sides_derive_the_same_keys_and_no_two_are_alike(pool: ThreadPoolExecutor) -> None:
    seen = set()
    for _ in range(3):
        connector, listener = shake(pool)
        assert isinstance(connector, AuthenticatedTerms)
        assert isinstance(listener, AuthenticatedTerms)
        there, back = connector.keys(listening=False)
        assert listener.keys(listening=True) == (back, there)
        seen |= {there, back}
    assert len(seen) == 6
    assert {len(key) for key in seen} == {32}
    assert connector.secret.hex() not in repr(connector)


def test_terms_without_a_seal_are_refused_where_one_is_due(pool: ThreadPoolExecutor) -> None:
    bare = Hello(scheme="shm", epoch=3, outbound=TERMS.outbound, inbound=TERMS.inbound)
    ours, theirs = socket.socketpair()
    deadline = time.monotonic() + SOON_S
    connecting = pool.submit(run, ours, offer(KEY, bare), "peer", deadline=deadline)
    with theirs, pytest.raises(HandshakeError, match="not encrypted"):
        run(theirs, answer(KEY, "shm", must_seal=["shm"]), "peer", deadline=deadline)
    with ours:
        assert isinstance(outcome(connecting), HandshakeError)


def test_proofs_are_compared_in_constant_time(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that accepts everything would let anyone in: nothing else asks for the key on either side."""
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
    challenged(steps, recorded[1])
    with pytest.raises(HandshakeError):
        steps.send(recorded[3])


def challenged(steps: handshake.Steps, challenge: bytes) -> bytes:
    """The proof of a connector to which ``challenge`` comes."""
    steps.send(challenge[: PREFIX.size])
    proof, *_ = steps.send(challenge[PREFIX.size :])
    return proof


def test_a_proof_cannot_be_reflected() -> None:
    """A listener without the key sends the connector's own proof back."""
    steps = offer(KEY, TERMS)
    hello, *_ = next(steps)
    proof = challenged(steps, CHALLENGE.pack(handshake.MAGIC, handshake.VERSION, bytes(32)))
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
        assert 0.2 <= time.monotonic() - start < SOON_S


def test_frames_in_single_bytes_and_nothing_beyond_is_read(pool: ThreadPoolExecutor) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        exchange = Exchange(ours, answering())
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
            assert len(frame) == wanted
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


def apart(pool: ThreadPoolExecutor, terms: Hello, listening: handshake.Steps) -> tuple[HandshakeError, HandshakeError]:
    """Returns the errors with which the connector and the listener refuse each other."""
    found = []
    for outcome in shake_with(pool, offer(KEY, terms), listening):
        assert isinstance(outcome, HandshakeError)
        found.append(outcome)
    return found[0], found[1]


def test_another_peer_than_the_one_that_is_wanted_refuses_and_both_say_so(pool: ThreadPoolExecutor) -> None:
    near, far = apart(pool, TERMS, answer(KEY, "shm", name="third"))
    assert "not the peer that we want, 'other'" in str(near)
    assert "'one' wants the peer 'other', we are 'third'" in str(far)


@pytest.mark.parametrize(
    ("wanted", "own"), [("", "other"), ("other", ""), ("other", "other\N{COMBINING ACUTE ACCENT}")]
)
def test_no_name_is_a_name_of_its_own(pool: ThreadPoolExecutor, wanted: str, own: str) -> None:
    near, _ = apart(pool, replace(TERMS, peer=wanted), answer(KEY, "shm", name=own))
    assert "not the peer that we want" in str(near)


@pytest.mark.parametrize("reason", ["inbox", "channels"])
def test_who_asks_for_too_much_is_told_so(pool: ThreadPoolExecutor, reason: str) -> None:
    near, far = apart(pool, TERMS, answer(KEY, "shm", name="other", refuses=lambda terms: reason))
    assert "ceiling" in str(near)
    assert "ceiling" in str(far)


def test_each_side_knows_the_others_name(pool: ThreadPoolExecutor) -> None:
    connector, listener = shake(pool)
    assert isinstance(connector, AuthenticatedTerms)
    assert isinstance(listener, AuthenticatedTerms)
    assert (connector.peer_name(listening=False), listener.peer_name(listening=True)) == ("other", "one")


@pytest.mark.parametrize("field", ["cipher", "name", "peer"])
def test_a_hello_is_not_changed_on_its_way(pool: ThreadPoolExecutor, field: str) -> None:
    """Into one that the listener would take, had the connector sent it: a cipher left out, another name."""
    terms = replace(TERMS, **{field: "" if field == "cipher" else "third"})
    hello, *_ = next(offer(KEY, terms))
    shift = slice(0, HELLO.size - handshake.NONCE_BYTES)

    def change(number: int, frame: bytes) -> bytes:
        return hello[shift] + frame[shift.stop :] if number == 0 else frame

    honest = shake_with(pool, offer(KEY, terms), answer(KEY, "shm", name=terms.peer))
    assert honest == (AuthenticatedTerms(**vars(terms)), AuthenticatedTerms(**vars(terms)))
    for error in shake_with(pool, offer(KEY, TERMS), answer(KEY, "shm", name=terms.peer), change):
        assert isinstance(error, HandshakeError)
        assert "keys differ" in str(error)


@pytest.mark.parametrize(("version", "nbytes"), [(2, 73), (3, 216)])
def test_a_listener_answers_another_version_by_its_own(version: int, nbytes: int) -> None:
    """A challenge has had 38 bytes ever since, of which the beginning is the same: so old peers name versions too."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((handshake.MAGIC + version.to_bytes(2, "big")).ljust(nbytes, b"\0"))
        with pytest.raises(HandshakeError, match=f"speaks version {version} .* we speak version {handshake.VERSION}"):
            run(ours, answering(), "peer", deadline=time.monotonic() + SOON_S)
        assert PREFIX.unpack_from(theirs.recv(38)) == (handshake.MAGIC, handshake.VERSION)


@pytest.mark.parametrize("version", [2, 3])
def test_a_connector_names_the_older_version_of_its_listener(version: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((handshake.MAGIC + version.to_bytes(2, "big")).ljust(38, b"\0"))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeError, match=f"speaks version {version} .* we speak version {handshake.VERSION}"):
            run(ours, offer(KEY, TERMS), "peer", deadline=time.monotonic() + SOON_S)


@pytest.mark.parametrize("name", ["x" * 65, "\N{SNOWMAN}" * 22, "a\0b"])
def test_names_that_do_not_fit_a_hello_are_refused(name: str) -> None:
    for field in ("name", "peer"):
        with pytest.raises(ValueError, match="64 bytes"):
            replace(TERMS, **{field: name})
