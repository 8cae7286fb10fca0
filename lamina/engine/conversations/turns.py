"""Who speaks in which session, and whether it goes on with the same conversation. Pure policy: no torch, no I/O, no
clock.

A turn sends all of the conversation, as without a session. It must begin with all that the turn before has sent; what
the client makes of the answer is its own affair: it may cut it, edit it or leave it out. So a name that is used for two
conversations by mistake is found out, and neither of them goes on with the other's KV.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from lamina.request.bounds import MOST_WORD, Count, Digest

from .sessions import MOST_SESSIONS, SessionName

Kind = Literal["", "messages", "text", "tokens"]


class SessionBusyError(ValueError):
    """Another turn of the session is under way."""


class Said(NamedTuple):
    """All that a turn has sent, as bytes: a later turn that goes on from it begins with the same bytes. ``kind``:
    messages, text or tokens.
    """

    kind: Kind
    data: bytes


NOTHING_SAID = Said("", b"")


class Spoken(NamedTuple):
    """The record of what a turn has sent. ``length``: bytes; ``digest``: their SHA-256."""

    kind: Kind
    length: Count
    digest: Digest


def check_name(name: SessionName) -> None:
    """Raises ValueError for a name that is none."""
    if not 1 <= len(name.name) <= MOST_WORD or not name.name.isprintable():
        raise ValueError(f"session_id must be 1 to {MOST_WORD} printable characters: correct it")


def said_of(prompt: str | Sequence[int]) -> Said:
    """The bytes of a prompt: of text, or of token ids."""
    if isinstance(prompt, str):
        return Said("text", prompt.encode(errors="surrogatepass"))
    return Said("tokens", b"".join(token.to_bytes(8, "little", signed=True) for token in prompt))


def said_in(messages: Sequence[Mapping[str, Any]]) -> Said:
    """The bytes of a conversation's messages."""
    each = (json.dumps(dict(message), sort_keys=True, default=str).encode() for message in messages)
    return Said("messages", b"".join(len(data).to_bytes(8, "little") + data for data in each))


class Turns:
    """The turns of all sessions. A turn that ends without an answer leaves the session where it was."""

    def __init__(self) -> None:
        self._last: OrderedDict[SessionName, Spoken] = OrderedDict()
        self._running: dict[SessionName, Said] = {}

    def begin(self, name: SessionName, said: Said) -> None:
        """Raises SessionBusyError, and ValueError for a name that is none or what does not go on with the session."""
        check_name(name)
        self._check_idle(name)
        last = self._last.get(name)
        if last is not None and not _goes_on(last, said):
            raise ValueError(
                f"session_id {name.name!r}: what is sent does not begin with the {last.kind} of its last turn: send "
                f"all of the conversation, delete the session, or take another name"
            )
        self._running[name] = said

    def end(self, name: SessionName, *, answered: bool) -> None:
        """Idempotent."""
        said = self._running.pop(name, None)
        if said is None or not answered:
            return
        self._remember(name, Spoken(said.kind, len(said.data), hashlib.sha256(said.data).digest()))

    def spoken(self, name: SessionName) -> Spoken | None:
        """What the last turn has sent; None: there was none. Raises SessionBusyError."""
        self._check_idle(name)
        return self._last.get(name)

    @contextmanager
    def bring(self, name: SessionName, spoken: Spoken | None) -> Iterator[None]:
        """Take over a session, whose next turn begins with ``spoken``, if nothing fails meanwhile; until then no turn
        of it begins. Raises SessionBusyError, and ValueError for a name that is none.
        """
        check_name(name)
        self._check_idle(name)
        self._running[name] = NOTHING_SAID
        try:
            yield
            self._last.pop(name, None)
            if spoken is not None:
                self._remember(name, spoken)
        finally:
            del self._running[name]

    def drop(self, name: SessionName) -> None:
        """Forget a session. Raises SessionBusyError."""
        self._check_idle(name)
        self._last.pop(name, None)

    def _remember(self, name: SessionName, spoken: Spoken) -> None:
        self._last[name] = spoken
        self._last.move_to_end(name)
        if len(self._last) > MOST_SESSIONS:
            self._last.popitem(last=False)

    def _check_idle(self, name: SessionName) -> None:
        if name in self._running:
            raise SessionBusyError(
                f"session_id {name.name!r}: a turn of it is under way: wait for its end, or abort it"
            )


def _goes_on(last: Spoken, said: Said) -> bool:
    return said.kind == last.kind and hashlib.sha256(said.data[: last.length]).digest() == last.digest
