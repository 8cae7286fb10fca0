"""Structs of C++ in memory that Python fills and reads, by the layout that a native module reports."""

from __future__ import annotations

import sys
from collections.abc import Mapping


class StructLayout:
    """``nbytes`` of a struct, and of each field, an unsigned integer or an address, its (offset, bytes)."""

    def __init__(self, nbytes: int, fields: Mapping[str, tuple[int, int]]) -> None:
        self.nbytes = nbytes
        self._fields = dict(fields)

    def pack(self, values: Mapping[str, int]) -> bytes:
        """Return the struct with these values, 0 in all other fields. Raises ValueError for an unknown field."""
        if unknown := values.keys() - self._fields.keys():
            raise ValueError(f"the struct has no field {', '.join(sorted(unknown))}; it has {', '.join(self._fields)}")
        data = bytearray(self.nbytes)
        for name, value in values.items():
            offset, nbytes = self._fields[name]
            data[offset : offset + nbytes] = value.to_bytes(nbytes, sys.byteorder)
        return bytes(data)

    def unpack(self, data: bytes) -> dict[str, int]:
        """Return every field's value."""
        return {
            name: int.from_bytes(data[offset : offset + nbytes], sys.byteorder)
            for name, (offset, nbytes) in self._fields.items()
        }
