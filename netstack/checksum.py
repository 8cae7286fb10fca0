"""A checksum of bytes that one worker gives to another, or that lie in memory for long: against accidents."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress

Bytes = bytes | bytearray | memoryview
check: Callable[[int, int, Bytes], bytes] | None = None
with suppress(ImportError):  # then no transport leads out of this process, and whoever compares is here, too
    from .host.native_module import check

CHECKSUM_BYTES = 16
_PART = 3  # a header's and a payload's are 1 and 2


def checksum(data: Bytes) -> bytes:
    """CHECKSUM_BYTES: four CRC-32C of interleaved words, by instructions of the processor where it has them; by zlib
    where there is no native module.
    """
    if check is None:
        return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little")
    return check(_PART, 0, data)
