"""Checks that a session has one turn at a time, and that each turn continues the same conversation.

A turn sends the whole conversation, as without a session. It must begin with all that the previous turn has sent. The
client may cut, edit or leave out the answer. So a name that is used for two conversations by mistake is detected, and
neither uses the other's KV. Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from lamina.request.bounds import MOST_WORD, Count, Digest

from .session_table import MAX_SESSIONS, SessionName

Kind = Literal["", "messages", "text", "tokens"]


class SessionBusyError(ValueError):
    """Raised while another turn of the session is running."""


class TurnTranscript(NamedTuple):
    """All that a turn has sent, as bytes. The next turn must begin with them. ``kind``: messages, text or tokens."""

    kind: Kind
    data: bytes


EMPTY_TRANSCRIPT = TurnTranscript("", b"")


class TranscriptDigest(NamedTuple):
    """The digest of a transcript. ``length``: bytes; ``digest``: their SHA-256."""

    kind: Kind
    length: Count
    digest: Digest


def check_name(name: SessionName) -> None:
    """Raises ValueError for an invalid name."""
    if not 1 <= len(name.name) <= MOST_WORD or not name.name.isprintable():
        raise ValueError(f"session_id must be 1 to {MOST_WORD} printable characters: correct it")


def prompt_transcript(prompt: str | Sequence[int]) -> TurnTranscript:
    """The bytes of a prompt: of text, or of token ids."""
    if isinstance(prompt, str):
        return TurnTranscript("text", prompt.encode(errors="surrogatepass"))
    return TurnTranscript("tokens", b"".join(token.to_bytes(8, "little", signed=True) for token in prompt))


def messages_transcript(messages: Sequence[Mapping[str, Any]]) -> TurnTranscript:
    """The bytes of a conversation's messages."""
    each = (json.dumps(dict(message), sort_keys=True, default=str).encode() for message in messages)
    return TurnTranscript("messages", b"".join(len(data).to_bytes(8, "little") + data for data in each))


class SessionTurns:
    """The turns of all sessions. A turn that ends without an answer leaves the session where it was."""

    def __init__(self) -> None:
        self._last: OrderedDict[SessionName, TranscriptDigest] = OrderedDict()
        self._running: dict[SessionName, TurnTranscript] = {}

    def begin(self, name: SessionName, transcript: TurnTranscript) -> None:
        """Begin a turn. Raises SessionBusyError, and ValueError for a bad name or another conversation."""
        check_name(name)
        self._check_idle(name)
        last = self._last.get(name)
        if last is not None and not _continues(last, transcript):
            raise ValueError(
                f"session_id {name.name!r}: what is sent does not begin with the {last.kind} of its last turn: send "
                f"all of the conversation, delete the session, or take another name"
            )
        self._running[name] = transcript

    def end(self, name: SessionName, *, answered: bool) -> None:
        """End a turn. Idempotent."""
        transcript = self._running.pop(name, None)
        if transcript is None or not answered:
            return
        self._remember(
            name, TranscriptDigest(transcript.kind, len(transcript.data), hashlib.sha256(transcript.data).digest())
        )

    def last_transcript(self, name: SessionName) -> TranscriptDigest | None:
        """Return the digest of the last turn; None if there was none. Raises SessionBusyError."""
        self._check_idle(name)
        return self._last.get(name)

    @contextmanager
    def import_session(self, name: SessionName, spoken: TranscriptDigest | None) -> Iterator[None]:
        """Import a session, whose next turn must begin with ``spoken``, unless the block raises.

        No turn of it begins within the block. Raises SessionBusyError, and ValueError for an invalid name.
        """
        check_name(name)
        self._check_idle(name)
        self._running[name] = EMPTY_TRANSCRIPT
        try:
            yield
            self._last.pop(name, None)
            if spoken is not None:
                self._remember(name, spoken)
        finally:
            del self._running[name]

    def drop_session(self, name: SessionName) -> None:
        """Forget a session. Raises SessionBusyError."""
        self._check_idle(name)
        self._last.pop(name, None)

    def _remember(self, name: SessionName, spoken: TranscriptDigest) -> None:
        self._last[name] = spoken
        self._last.move_to_end(name)
        if len(self._last) > MAX_SESSIONS:
            self._last.popitem(last=False)

    def _check_idle(self, name: SessionName) -> None:
        if name in self._running:
            raise SessionBusyError(
                f"session_id {name.name!r}: a turn of it is under way: wait for its end, or abort it"
            )


def _continues(last: TranscriptDigest, transcript: TurnTranscript) -> bool:
    return transcript.kind == last.kind and hashlib.sha256(transcript.data[: last.length]).digest() == last.digest
