"""Encodes messages to frames and decodes frames. A message that cannot be encoded or decoded is an error of its request
alone.

A message names its request by ``key``, or its query by ``number``. If it names neither, the engine fails and another
one continues.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgspec

from lamina.protocol.control import MAX_FRAME
from lamina.request import ErrorOrigin

from .messages import Delta, Outputs, PromptRefused, PromptTimes, ScaleReply, SessionsReply

LENGTH = struct.Struct("<I")  # before each frame, as on control links
_encode = msgspec.msgpack.Encoder().encode
_delta = msgspec.msgpack.Decoder(Delta).decode


class UnsendableError(Exception):
    """A message that cannot be encoded as a frame. Nothing of it was sent."""


class Garbled(NamedTuple):
    """A received frame that cannot be decoded; ``key`` or ``number`` names the sender's request or query."""

    key: int | None
    number: int | None
    text: str


class Mended(NamedTuple):
    """A message in place of one that cannot be sent or read. ``ended``: keys of requests that it ends by an error."""

    message: Any
    ended: list[int]


def framed(message: msgspec.Struct) -> bytes:
    """Return a message as a frame with its length. Raises UnsendableError."""
    try:
        data = _encode(message)
    except Exception as e:  # OverflowError, UnicodeEncodeError, TypeError, RecursionError ...
        raise UnsendableError(f"it cannot be encoded: {type(e).__name__}: {e}") from e
    if len(data) > MAX_FRAME:
        raise UnsendableError(f"it has {len(data)} bytes, more than a frame of {MAX_FRAME}")
    return LENGTH.pack(len(data)) + data


def failed(key: int, text: str) -> Delta:
    """Return the end of a whole prompt by an error that is not the client's."""
    return Delta(
        key=key, index=0, token_ids=[], text="", finish_reason="error", stop_reason=text, blame=ErrorOrigin.SERVER,
        times=PromptTimes(0.0, 0.0, 0.0),
    )  # fmt: skip


def garbled(frame: bytes | bytearray, error: Exception) -> Garbled | None:
    """Return the request or query of an undecodable frame from the server; None if it names none."""
    fields = _loose(frame)
    key, number = _whole(fields.get("key")), _whole(fields.get("number"))
    if key is None and (number is None or fields.get("type") == "reset"):
        return None
    return Garbled(key, number, f"the engine cannot read it: {error}")


def in_place_of(message: Any, error: Exception) -> Mended | None:
    """Return the message to send in place of an engine's reply that cannot be encoded; None if it is no reply."""
    text = f"the engine's reply cannot be encoded: {type(error).__name__}: {error}"
    if isinstance(message, Outputs):
        bad = [delta.key for delta in message.deltas if not _is_sendable(delta)]
        good = [delta for delta in message.deltas if delta.key not in bad]
        ends = [failed(key, text) for key in dict.fromkeys(bad)]
        return Mended(msgspec.structs.replace(message, deltas=good + ends), [end.key for end in ends])
    if isinstance(message, PromptRefused):
        return Mended(PromptRefused(message.key, text, ErrorOrigin.SERVER), [])
    if isinstance(message, SessionsReply):
        return Mended(SessionsReply(message.number, [], refusal=text, blame=ErrorOrigin.SERVER), [])
    if isinstance(message, ScaleReply) and message.was_requested:
        return Mended(ScaleReply(error=text), [])
    return None


def read_anyway(frame: bytes, error: Exception) -> Mended | None:
    """Return what can be decoded of an engine's frame; None if it is no reply to a request or query."""
    fields, text = _loose(frame), f"the engine's reply cannot be read: {error}"
    key, number = _whole(fields.get("key")), _whole(fields.get("number"))
    if fields.get("type") == "outputs" and isinstance(given := fields.get("deltas"), list):
        deltas, bad = list[Delta](), list[int]()
        for each in given:
            try:
                deltas.append(_delta(_encode(each)))
            except msgspec.ValidationError:
                if not isinstance(each, list) or not each or (name := _whole(each[0])) is None:
                    return None
                bad.append(name)
        ends = [failed(name, text) for name in dict.fromkeys(bad)]
        good = [delta for delta in deltas if delta.key not in bad]
        tokens, more = _whole(fields.get("num_tokens")) or 0, fields.get("has_more") is True
        return Mended(Outputs(good + ends, tokens, more), [end.key for end in ends])
    if fields.get("type") == "refused" and key is not None:
        return Mended(PromptRefused(key, text, ErrorOrigin.SERVER), [])
    if fields.get("type") == "sessions-are" and number is not None:
        return Mended(SessionsReply(number, [], refusal=text, blame=ErrorOrigin.SERVER), [])
    return None


def _is_sendable(delta: Delta) -> bool:
    try:
        framed(delta)
    except UnsendableError:
        return False
    return True


def _loose(frame: bytes | bytearray) -> dict[str, Any]:
    """Return the fields of a frame without their types; {} if it is no object."""
    try:
        fields = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None
