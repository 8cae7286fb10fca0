"""The handshake, byte for byte and word for word: every label of its proofs, every frame's size, every refusal."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Generator
from dataclasses import replace
from hashlib import sha256

import pytest
from wiring import KEY

from lamina.netstack import ChannelTimeout, Geometry, HandshakeError
from lamina.netstack.bootstrap import handshake
from lamina.netstack.bootstrap.handshake import (
    CHALLENGE,
    HELLO,
    MAGIC,
    NONCE_BYTES,
    PREFIX,
    PROOF_BYTES,
    REFUSALS,
    SEAL,
    VERSION,
    AuthenticatedTerms,
    Exchange,
    Hello,
    Steps,
    answer,
    offer,
)

OUT, INTO = Geometry(slots=4, slot_bytes=100), Geometry(slots=7, slot_bytes=1 << 32)
TERMS = Hello(scheme="shm", epoch=3, outbound=OUT, inbound=INTO, cipher=SEAL, name="one", peer="other", kernels=True)
NONCE = bytes(range(NONCE_BYTES))


@pytest.fixture(autouse=True)
def _known_nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda nbytes: NONCE[:nbytes])


def proof(label: bytes, transcript: bytes, key: bytes = KEY) -> bytes:
    return hmac.new(key, b"lamina " + label + b"\0" + transcript, sha256).digest()


def hello_of(terms: Hello) -> bytes:
    """Lays a hello out by hand: network order, fixed widths, texts filled up with zeros."""
    out, into = terms.outbound, terms.inbound
    return b"".join(
        (
            b"LMNA", (5).to_bytes(2, "big"), terms.epoch.to_bytes(2, "big"), terms.cipher.encode().ljust(16, b"\0"),
            terms.scheme.encode().ljust(8, b"\0"), bytes([terms.kernels]),
            out.slots.to_bytes(4, "big"), out.slot_bytes.to_bytes(8, "big"),
            into.slots.to_bytes(4, "big"), into.slot_bytes.to_bytes(8, "big"),
            terms.name.encode().ljust(64, b"\0"), terms.peer.encode().ljust(64, b"\0"), NONCE,
        )
    )  # fmt: skip


HELLO_BYTES = hello_of(TERMS)
CHALLENGE_BYTES = b"LMNA" + (5).to_bytes(2, "big") + NONCE
TRANSCRIPT = HELLO_BYTES + CHALLENGE_BYTES


def end_of(steps: Steps, sent: bytes) -> object:
    """The last message of the side once it has got its last frame: its result, or its error on the wire."""
    try:
        return steps.send(sent)
    except StopIteration as end:
        return end.value


def offered(terms: Hello = TERMS) -> Steps:
    """A connector that waits for the listener's proof."""
    steps = offer(KEY, terms)
    assert next(steps) == (hello_of(terms), PREFIX.size, "it hung up before its challenge")
    rest = steps.send(CHALLENGE_BYTES[: PREFIX.size])
    assert rest == (b"", CHALLENGE.size - PREFIX.size, "it hung up within its challenge")
    mine = proof(b"connector", hello_of(terms) + CHALLENGE_BYTES)
    assert steps.send(CHALLENGE_BYTES[PREFIX.size :]) == (mine, PROOF_BYTES, "it refused our proof: the keys differ")
    return steps


def answered(hello: bytes = HELLO_BYTES, steps: Steps | None = None) -> Steps:
    """A listener that waits for the connector's proof."""
    steps = steps or answer(KEY, "shm", name="other")
    assert next(steps) == (b"", PREFIX.size, "it hung up before its hello")
    assert steps.send(hello[: PREFIX.size]) == (b"", HELLO.size - PREFIX.size, "it hung up within its hello")
    assert steps.send(hello[PREFIX.size :]) == (CHALLENGE_BYTES, PROOF_BYTES, "it hung up before its proof")
    return steps


def test_both_sides_send_these_bytes_and_no_others() -> None:
    listening, connecting = answered(), offered()
    theirs = end_of(listening, proof(b"connector", TRANSCRIPT))
    assert theirs == (proof(b"listener", TRANSCRIPT), 0, "")
    sessions = [end_of(listening, b""), end_of(connecting, proof(b"listener", TRANSCRIPT))]
    for session, listens in zip(sessions, (True, False), strict=True):
        assert session.secret == proof(b"session", TRANSCRIPT)  # type: ignore[attr-defined]
        keys = [
            hmac.new(session.secret, b"lamina " + label, sha256).digest()  # type: ignore[attr-defined]
            for label in (b"from connector", b"from listener")
        ]
        assert list(session.keys(listening=listens)) == (keys[::-1] if listens else keys)  # type: ignore[attr-defined]
        assert Hello(**{n: getattr(session, n) for n in vars(TERMS)}) == TERMS


@pytest.mark.parametrize("side", ["connector", "listener"])
def test_a_wrong_proof_is_told(side: str) -> None:
    steps = offered() if side == "listener" else answered()
    with pytest.raises(HandshakeError) as refused:
        steps.send(bytes(PROOF_BYTES))
    assert str(refused.value) == f"the {side}'s proof is wrong: the keys differ"


def refusal(terms: Hello, steps: Steps | None = None, hello: bytes = b"") -> tuple[str, str]:
    """Returns which of REFUSALS a listener sends on the wire, and the cause that it logs."""
    hello = hello or hello_of(terms)
    transcript = hello + CHALLENGE_BYTES
    listening = answered(hello, steps)
    frame, wanted, if_closed = listening.send(proof(b"connector", transcript))
    assert (wanted, if_closed) == (0, "")
    with pytest.raises(HandshakeError) as why:
        listening.send(b"")
    (reason,) = [r for r in REFUSALS if proof(b"refusal " + r.encode(), transcript) == frame]
    return reason, str(why.value)


@pytest.mark.parametrize(
    ("changes", "reason", "why"),
    [
        ({"scheme": "tcp"}, "transport", "the connector speaks 'tcp', we speak shm and auto"),
        ({"peer": "third"}, "name", "the connector 'one' wants the peer 'third', we are 'other'"),
        ({"cipher": "rot13"}, "cipher", f"the connector wants frames of cipher 'rot13', we know {SEAL} alone"),
        (
            {"scheme": "auto", "cipher": ""},
            "cipher",
            "the connector wants frames that are not encrypted, and it is beyond this host",
        ),
        ({"epoch": 9}, "inbox", f"the connector asks for more than the ceiling here allows: {OUT}, {INTO}"),
        ({"epoch": 8}, "channels", f"the connector asks for more than the ceiling here allows: {OUT}, {INTO}"),
    ],
)
def test_why_a_listener_refuses(changes: dict[str, str], reason: str, why: str) -> None:
    ceiling = {9: "inbox", 8: "channels"}
    listening = answer(
        KEY, "shm", "auto", name="other", must_seal=["auto"], refuses=lambda terms: ceiling.get(terms.epoch, "")
    )
    assert refusal(replace(TERMS, **changes), listening) == (reason, why)  # type: ignore[arg-type]


def test_in_clear_is_fine_where_nothing_leaves_the_host() -> None:
    plain = replace(TERMS, cipher="")
    listening = answered(hello_of(plain), answer(KEY, "shm", name="other", must_seal=["auto"]))
    transcript = hello_of(plain) + CHALLENGE_BYTES
    assert end_of(listening, proof(b"connector", transcript)) == (proof(b"listener", transcript), 0, "")


def test_terms_that_cannot_be_are_refused_by_name() -> None:
    slots = HELLO.size - 2 * 64 - NONCE_BYTES - 24
    hello = HELLO_BYTES[:slots] + bytes(4) + HELLO_BYTES[slots + 4 :]
    reason, why = refusal(TERMS, hello=hello)
    assert reason == "terms"
    assert why.startswith("the connector's terms are bad: ")


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_connector_says_each_refusal_in_its_words(reason: str) -> None:
    steps = offered()
    with pytest.raises(HandshakeError) as refused:
        steps.send(proof(b"refusal " + reason.encode(), TRANSCRIPT))
    assert str(refused.value) == REFUSALS[reason].format(terms=TERMS)


@pytest.mark.parametrize("side", ["connector", "listener"])
def test_another_protocol_and_another_version_are_named(side: str) -> None:
    spoken = "the peer speaks version 9 of the protocol, we speak version 5"
    foreign = "the peer does not speak Lamina's protocol (it began with b'HTTP')"
    for prefix, words in ((PREFIX.pack(MAGIC, 9), spoken), (PREFIX.pack(b"HTTP", VERSION), foreign)):
        steps = offer(KEY, TERMS) if side == "connector" else answer(KEY, "shm")
        next(steps)
        if side == "listener" and prefix.startswith(MAGIC):
            assert steps.send(prefix) == (CHALLENGE_BYTES, 0, ""), "so that the other side can name the versions too"
            prefix = b""
        with pytest.raises(HandshakeError) as refused:
            steps.send(prefix)
        assert str(refused.value) == words


@pytest.mark.parametrize(("scheme", "fits"), [("", False), ("x", True), ("x" * 8, True), ("x" * 9, False)])
def test_how_long_the_name_of_a_transport_may_be(scheme: str, fits: bool) -> None:
    if fits:
        assert Hello(scheme=scheme, outbound=OUT, inbound=INTO).scheme == scheme
        return
    with pytest.raises(ValueError) as refused:
        Hello(scheme=scheme, outbound=OUT, inbound=INTO)
    assert str(refused.value) == f"a transport's name has 1 to 8 bytes, not {scheme!r}"


def test_a_peer_that_is_gone_when_all_was_asked_is_told_by_the_kernels_word() -> None:
    def last_words() -> Steps:
        yield b"bye", 0, ""
        raise AssertionError("it cannot be sent")

    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(HandshakeError) as failed:
            Exchange(ours, last_words()).advance()
    assert str(failed.value) == "the peer hung up (Broken pipe)"


@pytest.mark.parametrize("name", ["maX", "X", "a" * 64, ""])
def test_a_name_comes_as_it_was_sent(name: str) -> None:
    terms = replace(TERMS, name=name)
    listening, transcript = answered(hello_of(terms)), hello_of(terms) + CHALLENGE_BYTES
    end_of(listening, proof(b"connector", transcript))
    assert end_of(listening, b"").name == name  # type: ignore[attr-defined]


def test_a_frame_in_two_pieces_is_read_to_its_end_and_no_further() -> None:
    def four_bytes() -> Steps:
        assert (yield b"", 4, "") == b"1234"
        return AuthenticatedTerms(**vars(TERMS))

    ours, theirs = socket.socketpair()
    with ours, theirs:
        exchange = Exchange(ours, four_bytes())
        theirs.sendall(b"12")
        assert exchange.advance() is None
        theirs.sendall(b"34more")
        assert exchange.advance() == AuthenticatedTerms(**vars(TERMS))
        assert ours.recv(99) == b"more"


@pytest.mark.parametrize(("deadline", "waits_ms"), [(12.5, 2500.0), (9.0, 0.0)])
def test_a_wait_ends_at_its_deadline(deadline: float, waits_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Silence:
        def register(self, *_: object) -> None: ...

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            waited.append(timeout_ms)
            return []

    def one_wait() -> Generator[handshake.Wants, None, None]:
        yield {1: 1}

    monkeypatch.setattr(handshake, "monotonic", lambda: 10.0)
    monkeypatch.setattr(handshake.select, "poll", Silence)
    with pytest.raises(ChannelTimeout) as late:
        handshake.drive(one_wait(), "tcp://there", deadline=deadline)
    assert str(late.value) == "tcp://there: connect: the listener did not finish the handshake in time"
    assert waited == [waits_ms]
