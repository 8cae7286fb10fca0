"""Cards: the addresses that two authenticated peers exchange before their NICs can connect."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256

from lamina.netstack.contract.fabric import HandshakeError

from .handshake import AuthenticatedTerms, Steps

READY = b"ready"
MAC_BYTES = 32


def exchange_cards(
    session: AuthenticatedTerms, card: bytes, reach: Callable[[bytes], None], *, listening: bool
) -> Steps:
    """Exchange cards, which have one size, under the session's keys.

    ``reach`` gets the peer's card and prepares this side for what the peer will send. The connector's card goes first,
    then the listener's, then the connector's message that it is ready. Each has its MAC, so that no process between the
    two can redirect a queue pair. Raises HandshakeError.
    """
    out_key, in_key = session.keys(listening=listening)
    nbytes = len(card) + MAC_BYTES
    if listening:
        theirs = yield b"", nbytes, "it hung up before its card"
        reach(_opened(in_key, theirs))
        ready = yield _sealed(out_key, card), MAC_BYTES, "it could not reach our queue pair"
        _opened(in_key, READY + ready)
    else:
        theirs = yield _sealed(out_key, card), nbytes, "it could not make or reach a queue pair"
        reach(_opened(in_key, theirs))
        yield _sealed(out_key, READY)[len(READY) :], 0, ""
    return session


def _sealed(key: bytes, text: bytes) -> bytes:
    return text + hmac.digest(key, text, sha256().name)


def _opened(key: bytes, sealed: bytes) -> bytes:
    text = sealed[:-MAC_BYTES]
    if not hmac.compare_digest(_sealed(key, text), sealed):
        raise HandshakeError("its card was changed on the way")
    return text
