"""Encodes JSON in pieces, since all other requests wait during one call of the encoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

ROW_UNITS = 2048  # numbers or texts that are encoded at once: 2 ms of a slow core
PIECE = 1 << 16  # bytes
LARGE = 1 << 12  # units from which on JSON is made in pieces


class Rows:
    """A JSON array whose items are made, once, as it is encoded."""

    def __init__(self, items: Iterable[Any], count: int, units: int = 1, *, deep: bool = False) -> None:
        """``count``: the number of items. ``units``: about how many numbers and texts an item has. ``deep``: the items
        are objects that contain such arrays.
        """
        self.items = items
        self.units = count * units
        self.at_once = 1 if deep else max(1, ROW_UNITS // units)
        self.deep = deep


def _listed(value: Any) -> Any:
    if isinstance(value, Rows):
        return list(value.items)
    raise NotImplementedError  # msgspec names the type


_encode = msgspec.json.Encoder(enc_hook=_listed).encode
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}


def encode(value: Any) -> bytes:
    """Encode all at once. Characters at which some clients end a line, of a stream of events too, are escaped."""
    made = _encode(value)
    for end, escaped in _LINE_ENDS.items():
        made = made.replace(end, escaped)
    return made


def units(value: Any) -> int:
    """Return the units of all Rows in ``value``."""
    if isinstance(value, Rows):
        return value.units
    if isinstance(value, dict):
        return sum(map(units, value.values()))
    return 0


def pieces(value: Any) -> Iterator[bytes]:
    """Yield the JSON of ``value`` in pieces of about PIECE bytes, each made in a few milliseconds."""
    held, size = list[bytes](), 0
    for part in _parts(value):
        held.append(part)
        size += len(part)
        if size >= PIECE:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict) and any(isinstance(v, dict | Rows) for v in value.values()):
        opening = b"{"
        for name, inner in value.items():
            yield opening + encode(name) + b":"
            yield from _parts(inner)
            opening = b","
        yield b"}"
    elif isinstance(value, Rows):
        yield from _parts_of_rows(value)
    else:
        yield encode(value)


def _parts_of_rows(rows: Rows) -> Iterator[bytes]:
    opening, items = b"[", iter(rows.items)
    while chosen := list(islice(items, rows.at_once)):
        yield opening
        if rows.deep:
            yield from _parts(chosen[0])
        else:
            yield encode(chosen)[1:-1]
        opening = b","
    yield b"[]" if opening == b"[" else b"]"
