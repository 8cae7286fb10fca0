"""Decodes JSON to Python values, by field and at a bounded cost: a body is scanned, then only known fields are decoded.

One long call into the decoder stops the whole process, so counts that are cheap to take bound each call. A scan makes
no objects. Two quotes without a backslash before them count as one text, and a comma counts as one number.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8, getincrementaldecoder
from typing import Any

import msgspec
import numpy as np

from lamina.request.bounds import MOST_MESSAGES
from lamina.server.errors import ApiError, context_length_error

MAX_TEXTS = MOST_MESSAGES  # texts in a body, keys included
MAX_COMMAS = 1 << 20  # commas in a body: scanning more takes longer than 20 ms
PIECE = 1 << 20
MAX_FIELD = 1 << 16  # bytes of a field that is no prompt
MAX_FIELDS = 1 << 18  # bytes of all such fields of a body, or of its messages: decoded they may take 40 times as much
SESSION_BYTES = 1 << 12  # bytes of an exported session, without its tokens
_BACKSLASH, _QUOTE = b'\\"'
FORMS = "prompt must be a string, strings, token ids, or lists of token ids"
Fields = dict[str, msgspec.Raw]


class _ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[_ContentPart] | None = None


_fields = msgspec.json.Decoder(Fields).decode
_messages = msgspec.json.Decoder(list[_ChatMessage]).decode
_each_message = msgspec.json.Decoder(list[Fields]).decode
_texts = msgspec.json.Decoder(list[str]).decode
_ids = msgspec.json.Decoder(list[int]).decode
_HALF_PAIR = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2}))"
)
_AT_BYTE = re.compile(r"\(byte (\d+)\)")
HALF_REACH = 16  # bytes between half of a pair and the place that msgspec names
_OPENING = re.compile(rb"[\s,]*\[")


def split_fields(body: bytes | bytearray, max_nesting: int) -> Fields:
    """Return the fields of a body, not decoded yet. Raises ApiError."""
    _check_encoding(body)
    if count_texts(body) > MAX_TEXTS:
        raise ApiError(400, f"the body has more than {MAX_TEXTS} texts: send fewer at once", code="too_many_texts")
    if sum(body.count(b",", i, i + PIECE) for i in range(0, len(body), PIECE)) > MAX_COMMAS:
        text = f"the body has more than {MAX_COMMAS} commas: send fewer token ids at once"
        raise ApiError(400, text, code="too_many_values")
    try:
        return _fields(body)
    except msgspec.ValidationError as e:
        raise ApiError(400, "the body must be a JSON object", code="invalid_json") from e
    except msgspec.DecodeError as e:
        half = _half_pair(body, str(e))
        what = f"half of a surrogate pair, {half}" if half else e
        raise ApiError(400, f"the body is not JSON: {what}", code="invalid_json") from e
    except RecursionError as e:
        raise ApiError(400, f"the body is nested deeper than {max_nesting}", code="too_deep") from e


def _half_pair(body: bytes | bytearray, error: str) -> str:
    """Return the half of a surrogate pair for which msgspec has refused a body; "" if it has another reason. Looks only
    where the error lies, as searching a whole body takes a fifth of a second.
    """
    at = _AT_BYTE.search(error)
    end = int(at[1]) + HALF_REACH if at else len(body)
    half = _HALF_PAIR.search(body[max(0, end - 2 * HALF_REACH) : end])
    return half[1].decode() if half else ""


def _check_encoding(body: bytes | bytearray) -> None:
    """Raises ApiError unless a body is UTF-8 without a byte order mark."""
    if body.startswith(BOM_UTF8):
        raise ApiError(400, "the body begins with a byte order mark: leave it out", code="invalid_json")
    decoder, view = getincrementaldecoder("utf-8")(), memoryview(body)
    for begin in range(0, len(body), PIECE):  # between pieces, other threads can run
        try:
            decoder.decode(view[begin : begin + PIECE], final=begin + PIECE >= len(body))
        except UnicodeDecodeError as e:
            text = f"the body is not UTF-8: byte {e.object[e.start]:#04x} after {e.object[: e.start][-8:]!r}"
            raise ApiError(400, text, code="invalid_json") from e


class Allowance:
    """The bytes that fields other than prompts may still have, in a body or in its messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left = MAX_FIELDS

    def take(self, raw: msgspec.Raw) -> None:
        """Count a field. Raises ApiError if the allowance is used up."""
        self._left -= memoryview(raw).nbytes
        if self._left < 0:
            text = f"{self._name} has more than {MAX_FIELDS} bytes in fields that are no text: send fewer"
            raise ApiError(400, text, code="invalid_value")


def session(raw: msgspec.Raw, max_len: int) -> Any:
    """Decode ``session``: base64 of at most ``max_len`` tokens of 4 bytes each. Raises ApiError."""
    is_text = bytes(raw).startswith(b'"')  # else decoding costs more than the length suggests
    return decode_value("session", raw, 1, SESSION_BYTES + max_len * 16 // 3 if is_text else MAX_FIELD)


def decode_value(name: str, raw: bytes | msgspec.Raw, max_nesting: int, most: int = MAX_FIELD) -> Any:
    """Decode a field of at most ``most`` bytes that is neither a prompt nor a conversation. Raises ApiError."""
    data = bytes(raw)
    if len(data) > most:
        raise ApiError(400, f"{name} is larger than {most} bytes", param=name, code="invalid_value")
    try:
        field = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ApiError(400, f"{name} is not JSON: {e}", param=name, code="invalid_json") from e
    except RecursionError:
        field = None
    else:
        if not _is_too_deep(field, max_nesting):
            return field
    raise ApiError(400, f"{name} is nested deeper than {max_nesting}", param=name, code="too_deep")


def prompt(raw: msgspec.Raw, max_prompts: int, max_len: int) -> Any:
    """Decode ``prompt`` in one of its four forms: at most ``max_prompts`` prompts of at most ``max_len`` token ids
    each. A value of another form is returned as it is. Raises ApiError.
    """
    data = bytes(raw)
    begins = re.match(rb'\[\s*([\["\d-])', data)
    try:
        if data.startswith(b'"'):
            return msgspec.json.decode(data, type=str)
        if begins is None:
            return decode_value("prompt", data, 2)
        if begins[1] == b'"':
            _check_prompts(count_texts(data), max_prompts)
            return _texts(data)
        if begins[1] != b"[":
            return ids("prompt", data, max_len)
        _check_prompts(data.count(b"[") - 1, max_prompts)
        *rows, rest, _ = data[1:].split(b"]")
        if rest.strip():
            raise ApiError(400, FORMS, param="prompt", code="invalid_value")
        return [ids("prompt", _row(piece), max_len) for piece in rows]
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ApiError(400, f"{FORMS}: {e}", param="prompt", code="invalid_value") from e


def ids(name: str, raw: bytes | msgspec.Raw, max_len: int) -> list[int]:
    """Decode at most ``max_len`` token ids. Raises ApiError if there are more, and msgspec.DecodeError."""
    data = bytes(raw)
    count = data.count(b",") + 1
    if count > max_len:
        raise context_length_error(max_len, f"{name} has {count} tokens", name)
    return _ids(data)


def messages(raw: msgspec.Raw, max_nesting: int) -> list[dict[str, Any]]:
    """Decode a conversation, check the types of roles, contents and parts, and keep all fields. Raises ApiError."""
    try:
        _messages(raw)  # first: if it succeeds, there are no more messages and parts than texts
        each, rest = _each_message(raw), Allowance("messages")
        return [{k: _of_message(k, v, max_nesting, rest) for k, v in fields.items()} for fields in each]
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ApiError(400, f"messages: {e}", param="messages", code="invalid_value") from e
    except RecursionError as e:
        raise ApiError(400, f"messages are nested deeper than {max_nesting}", param="messages", code="too_deep") from e


def _of_message(name: str, raw: msgspec.Raw, max_nesting: int, rest: Allowance) -> Any:
    data = bytes(raw)
    if name != "content":
        rest.take(raw)
        return decode_value(f"messages.{name}", data, max_nesting, MAX_FIELDS)
    if not data.startswith(b"["):
        return msgspec.json.decode(data, type=str | None)
    return [_part(fields, max_nesting, rest) for fields in _each_message(data)]


def _part(fields: Fields, max_nesting: int, rest: Allowance) -> dict[str, Any]:
    kind = msgspec.json.decode(fields["type"], type=str)
    if kind != "text":
        return {"type": kind}  # which is refused, however large the rest may be
    text = msgspec.json.decode(fields.get("text", b"null"), type=str | None)
    others = {k: v for k, v in fields.items() if k not in ("type", "text")}
    for field in others.values():
        rest.take(field)
    return {
        "type": kind,
        "text": text,
        **{k: decode_value(f"messages.content.{k}", v, max_nesting) for k, v in others.items()},
    }


def count_texts(data: bytes | bytearray) -> int:
    """Estimate the number of texts: at most the real number, at least half of it. A text that ends with a backslash
    counts half.
    """
    pieces = range(0, len(data), PIECE)  # between pieces, other threads can run
    quotes = sum(data.count(b'"', i, i + PIECE) for i in pieces)
    if b"\\" not in data:
        return quotes // 2
    view = np.frombuffer(data, np.uint8)  # bytes.count takes ten times as long for two bytes
    escaped = 0
    for begin in pieces:
        each = view[begin : begin + PIECE + 1]
        escaped += int(np.count_nonzero((each[:-1] == _BACKSLASH) & (each[1:] == _QUOTE)))
    return (quotes - escaped) // 2


def _check_prompts(count: int, limit: int) -> None:
    if count > limit:
        text = f"prompt must be at most {limit} prompts, not {count}"
        raise ApiError(400, text, param="prompt", code="invalid_value")


def _row(piece: bytes) -> bytes:
    opening = _OPENING.match(piece)
    if opening is None:
        raise ApiError(400, FORMS, param="prompt", code="invalid_value")
    return b"[" + piece[opening.end() :] + b"]"


def _is_too_deep(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [x for v in level for x in _children(v)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [x for x in items if isinstance(x, dict | list)]
