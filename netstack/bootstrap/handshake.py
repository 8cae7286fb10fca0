"""Mutual authentication of two peers over any connected stream socket, before anything is allocated.

Both prove by HMAC-SHA256 (RFC 2104) that they hold the same key. The proofs cover a transcript: protocol version,
transport, epoch, cipher, both geometries, the connector's name, the name of the wanted listener, and a fresh nonce of
each side. The label of each proof names its role, so neither can be replayed, reflected or moved to another link. The
connector proves itself first. Frames have fixed sizes:

    connector -> listener   hello      magic, version, epoch, cipher, transport, whether kernels send, outbound and
                                       inbound geometry, own and wanted name, nonce
    listener -> connector   challenge  magic, version, nonce
    connector -> listener   proof      HMAC(key, "connector" + hello + challenge)
    listener -> connector   proof      HMAC(key, "listener" + hello + challenge), or if the hello is refused
                                       HMAC(key, "refusal" + which of REFUSALS + hello + challenge)

Keys of the session are derived from the same transcript under their own labels. There is one for each direction, so
frames cannot be reflected, and new ones for each session, so they cannot be replayed. An attacker who learns the
cluster's key can compute them, and read recorded sessions: there is no forward secrecy.

The protocol itself does no I/O. ``offer`` and ``answer`` are generators, so a listener can hold many handshakes at
once, and a silent peer delays no other one.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic
from typing import TypeVar

from lamina.netstack.contract.channel_terms import NAME_BYTES, Geometry, Terms
from lamina.netstack.contract.fabric import ChannelTimeout, HandshakeError

VERSION = 5  # of all messages between peers, including cards of transports and their trials
MAGIC = b"LMNA"
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO = struct.Struct(f"!4sHH16s8s?IQIQ{NAME_BYTES}s{NAME_BYTES}s32s")
CHALLENGE = struct.Struct("!4sH32s")
PREFIX = struct.Struct("!4sH")  # the first fields of both, in every version
SEAL = "aes-256-gcm"  # cipher of frames that leave the host, by its name in a hello

# Why a listener refuses a peer that holds the key -> the connector's words for it
REFUSALS = {
    "transport": "the listener does not speak {terms.scheme}",
    "name": "the listener is not the peer that we want, {terms.peer!r}",
    "cipher": "the listener takes no frames of cipher {terms.cipher!r}",
    "terms": "the listener takes our terms for bad",
    "inbox": "our inboxes, {terms.outbound} and {terms.inbound}, are above the listener's ceiling",
    "channels": "the listener has as many channels as its ceiling allows",
}


@dataclass(frozen=True, kw_only=True)
class Hello(Terms):
    """A connector's terms, and the transport that it uses. Raises ValueError as Terms do."""

    scheme: str
    cipher: str = ""  # of all messages after the handshake; empty: not encrypted

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= len(self.scheme.encode()) <= 8:
            raise ValueError(f"a transport's name has 1 to 8 bytes, not {self.scheme!r}")


@dataclass(frozen=True, kw_only=True)
class AuthenticatedTerms(Hello):
    """The terms that both sides have proven, and the secret from which both derive keys."""

    secret: bytes = field(default=b"", repr=False, compare=False)

    def keys(self, *, listening: bool) -> tuple[bytes, bytes]:
        """Return two keys of 32 bytes: for the frames that this side sends, and for those that it receives."""
        there, back = (
            hmac.digest(self.secret, b"lamina " + label, sha256().name)
            for label in (b"from connector", b"from listener")
        )
        return (back, there) if listening else (there, back)


# Yields events of poll(2) by descriptor; it continues after one of them.
Wants = Mapping[int, int]
# Yields (bytes to send, number of bytes wanted next, what it means if the peer hangs up instead).
Steps = Generator[tuple[bytes, int, str], bytes, AuthenticatedTerms]
T = TypeVar("T")


def offer(key: bytes, terms: Hello) -> Steps:
    """Run the connector's side. Raises HandshakeError."""
    out, into = terms.outbound, terms.inbound
    hello = HELLO.pack(
        MAGIC, VERSION, terms.epoch, terms.cipher.encode(), terms.scheme.encode(), terms.kernels,
        out.slots, out.slot_bytes, into.slots, into.slot_bytes,
        terms.name.encode(), terms.peer.encode(), secrets.token_bytes(NONCE_BYTES),
    )  # fmt: skip
    challenge = yield hello, PREFIX.size, "it hung up before its challenge"
    _check_protocol(*PREFIX.unpack(challenge))
    challenge += yield b"", CHALLENGE.size - PREFIX.size, "it hung up within its challenge"
    transcript = hello + challenge
    proof = yield (
        _proof(key, b"connector", transcript),
        PROOF_BYTES,
        "it refused our proof: the keys differ",
    )
    if not hmac.compare_digest(proof, _proof(key, b"listener", transcript)):
        for reason, text in REFUSALS.items():
            if hmac.compare_digest(proof, _refusal(key, reason, transcript)):
                raise HandshakeError(text.format(terms=terms))
        raise HandshakeError("the listener's proof is wrong: the keys differ")
    return AuthenticatedTerms(**vars(terms), secret=_proof(key, b"session", transcript))


def answer(
    key: bytes,
    *schemes: str,
    name: str = "",
    must_seal: Collection[str] = (),
    refuses: Callable[[Terms], str] = lambda terms: "",
) -> Steps:
    """Run the side of the listener ``name`` of ``schemes``. ``must_seal``: schemes whose terms must have a cipher;
    ``refuses`` may refuse terms by a key of REFUSALS. Raises HandshakeError.
    """
    hello = yield b"", PREFIX.size, "it hung up before its hello"
    magic, version = PREFIX.unpack(hello)
    challenge = CHALLENGE.pack(MAGIC, VERSION, secrets.token_bytes(NONCE_BYTES))
    if magic == MAGIC and version != VERSION:
        yield challenge, 0, ""  # so that the other side can name the versions too
    _check_protocol(magic, version)
    hello += yield b"", HELLO.size - PREFIX.size, "it hung up within its hello"
    proof = yield challenge, PROOF_BYTES, "it hung up before its proof"
    transcript = hello + challenge
    if not hmac.compare_digest(proof, _proof(key, b"connector", transcript)):
        raise HandshakeError("the connector's proof is wrong: the keys differ")
    reason, why = "", ""
    try:
        terms = _terms(hello)
        reason, why = _objection(terms, schemes, name, must_seal)
        if not reason and (reason := refuses(terms)):
            why = f"the connector asks for more than the ceiling here allows: {terms.outbound}, {terms.inbound}"
    except ValueError as error:
        reason, why = "terms", f"the connector's terms are bad: {error}"
    if reason:
        yield _refusal(key, reason, transcript), 0, ""
        raise HandshakeError(why)
    yield _proof(key, b"listener", transcript), 0, ""
    return AuthenticatedTerms(**vars(terms), secret=_proof(key, b"session", transcript))


def _terms(hello: bytes) -> Hello:
    """Return the terms of a hello. Raises ValueError."""
    _, _, epoch, cipher, scheme, kernels, *shapes, name, peer, _ = HELLO.unpack(hello)
    out, into = (Geometry(slots=slots, slot_bytes=nbytes) for slots, nbytes in (shapes[:2], shapes[2:]))
    texts = zip(("scheme", "cipher", "name", "peer"), (scheme, cipher, name, peer), strict=True)
    words = {field: text.rstrip(b"\0").decode() for field, text in texts}
    return Hello(outbound=out, inbound=into, epoch=epoch, kernels=kernels, **words)


def _objection(terms: Hello, schemes: Sequence[str], name: str, must_seal: Collection[str]) -> tuple[str, str]:
    """Return (key of REFUSALS, reason in words) if the listener refuses the terms, otherwise two empty texts."""
    if terms.scheme not in schemes:
        return "transport", f"the connector speaks {terms.scheme!r}, we speak {' and '.join(schemes)}"
    if terms.peer != name:
        return "name", f"the connector {terms.name!r} wants the peer {terms.peer!r}, we are {name!r}"
    if terms.cipher not in ("", SEAL):
        return "cipher", f"the connector wants frames of cipher {terms.cipher!r}, we know {SEAL} alone"
    if terms.scheme in must_seal and not terms.cipher:
        return "cipher", "the connector wants frames that are not encrypted, and it is beyond this host"
    return "", ""


def _check_protocol(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise HandshakeError(f"the peer does not speak Lamina's protocol (it began with {magic!r})")
    if version != VERSION:
        raise HandshakeError(f"the peer speaks version {version} of the protocol, we speak version {VERSION}")


def _refusal(key: bytes, reason: str, transcript: bytes) -> bytes:
    return _proof(key, b"refusal " + reason.encode(), transcript)


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, b"lamina " + role + b"\0" + transcript, sha256().name)


class Exchange:
    """One handshake in progress on ``sock``, which it makes non-blocking and never reads beyond the handshake."""

    def __init__(self, sock: socket.socket, steps: Steps) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._steps = steps
        self._unsent, self._wanted, self._if_closed = next(steps)
        self._got = bytearray()

    @property
    def events(self) -> int:
        """Events of poll(2) on the socket for which the handshake waits."""
        return select.POLLOUT if self._unsent else select.POLLIN

    def advance(self) -> AuthenticatedTerms | None:
        """Continue as far as the socket allows. Returns the session once both sides are proven. Raises
        HandshakeError.
        """
        try:
            while True:
                if self._unsent:
                    self._unsent = self._unsent[self.sock.send(self._unsent) :]
                elif len(self._got) < self._wanted:
                    chunk = self.sock.recv(self._wanted - len(self._got))
                    if not chunk:
                        raise HandshakeError(self._if_closed)
                    self._got += chunk
                else:
                    self._unsent, self._wanted, self._if_closed = self._steps.send(bytes(self._got))
                    self._got.clear()
        except BlockingIOError:
            return None
        except StopIteration as end:
            session: AuthenticatedTerms = end.value
            return session
        except OSError as error:
            raise HandshakeError(f"{self._if_closed or 'the peer hung up'} ({error.strerror})") from error


def exchanged(sock: socket.socket, steps: Steps) -> Generator[Wants, None, AuthenticatedTerms]:
    """Run an Exchange; yields what to poll for while it waits. Raises HandshakeError."""
    exchange = Exchange(sock, steps)
    while (session := exchange.advance()) is None:
        yield {sock.fileno(): exchange.events}
    return session


def drive(waits: Generator[Wants, None, T], peer: str, *, deadline: float) -> T:
    """Run ``waits``, which yields the descriptors to poll, until ``deadline`` (of ``time.monotonic``). Returns its
    result. Raises HandshakeError, and ChannelTimeout when the peer is too slow; both texts begin with ``peer``.
    """
    try:
        while True:
            poller = select.poll()
            for fd, events in next(waits).items():
                poller.register(fd, events)
            if not poller.poll(max(0.0, deadline - monotonic()) * 1000):
                raise ChannelTimeout(f"{peer}: connect: the listener did not finish the handshake in time")
    except StopIteration as end:
        result: T = end.value
        return result
    except HandshakeError as error:
        raise HandshakeError(f"{peer}: connect: {error}") from error
    finally:
        waits.close()


def run(sock: socket.socket, steps: Steps, peer: str, *, deadline: float) -> AuthenticatedTerms:
    """Run one handshake to its end; ``sock`` is non-blocking then. Limited by ``deadline``, and raises, as
    ``drive``.
    """
    return drive(exchanged(sock, steps), peer, deadline=deadline)
