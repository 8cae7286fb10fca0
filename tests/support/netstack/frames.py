"""The wire format of csrc/netstack/host/frame.h, written down a second time, in Python and from the standards."""

from __future__ import annotations

import struct

import gcm

DATA, CREDIT, FAREWELL = 1, 2, 3
HEADER = struct.Struct("<H6xQQQ32s16s")  # kind, length, seqno, credit, tag, check of the payload
CHECK_BYTES = 16
HEADER_BYTES = HEADER.size + CHECK_BYTES
HEADER_PART, PAYLOAD_PART = 1, 2
BLOCK = 128


def crc32c(data: bytes, crc: int) -> int:
    """Bit by bit, without the final inversion (RFC 3720, appendix B.4)."""
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


def checksum(data: bytes) -> bytes:
    """Four lanes of 16-byte words; the length goes into the first."""
    padded = data.ljust(-(-len(data) // BLOCK) * BLOCK, b"\0")
    lanes = []
    for lane in range(4):
        words = b"".join(padded[i : i + 16] for i in range(16 * lane, len(padded), 64))
        lanes.append(crc32c(words, 0xFFFFFFFF))
    lanes[0] ^= len(data) & 0xFFFFFFFF
    return struct.pack("<4I", *lanes)


def check(part: int, frame: int, data: bytes) -> bytes:
    """Returns the check of one part of the frame with that count in its direction, within one host."""
    return checksum(struct.pack("<QQ", part, frame) + data)


def guarded(key: bytes | None, part: int, frame: int, data: bytes) -> tuple[bytes, bytes]:
    """Returns that part as it is sent, and its check."""
    if key is None:
        return data, check(part, frame, data)
    sealed = gcm.seal(key, 2 * frame + (part == HEADER_PART), data)
    return sealed[:-CHECK_BYTES], sealed[-CHECK_BYTES:]


def pack(
    key: bytes | None,
    count: int,
    payload: bytes = b"",
    *,
    kind: int = DATA,
    length: int | None = None,
    seqno: int = 0,
    credit: int = 0,
    tag: bytes = b"",
) -> bytes:
    """A frame; its checks are right whatever it says."""
    nbytes = len(payload) if length is None else length
    payload, guard = guarded(key, PAYLOAD_PART, count, payload)
    header = HEADER.pack(kind, nbytes % (1 << 64), seqno % (1 << 64), credit % (1 << 64), tag, guard)
    return b"".join(guarded(key, HEADER_PART, count, header)) + payload


def unpack(key: bytes, count: int, frame: bytes) -> tuple[tuple[int, int, int, int, bytes], bytes]:
    """The fields and the payload of a frame under ``key``."""
    header = gcm.unseal(key, 2 * count + 1, frame[:HEADER_BYTES])
    *fields, guard = HEADER.unpack(header)
    return tuple(fields), gcm.unseal(key, 2 * count, frame[HEADER_BYTES:] + guard)  # type: ignore[return-value]
