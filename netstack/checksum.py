"""A checksum of bytes that go from one worker to another, or stay in memory for long: against accidents."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress

Bytes = bytes | bytearray | memoryview
check: Callable[[int, int, Bytes], bytes] | None = None
with suppress(ImportError):  # then no transport leaves this process, and every process that compares runs here, too
    from .host.native_module import check

CHECKSUM_BYTES = 16
_PART = 3  # a header's and a payload's are 1 and 2


def checksum(data: Bytes) -> bytes:
    """Return CHECKSUM_BYTES: four CRC-32C of interleaved words, by instructions of the processor if it has them; by
    zlib without the native module.
    """
    if check is None:
        return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little")
    return check(_PART, 0, data)
