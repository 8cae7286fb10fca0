"""Checksum and MAC against a second implementation: bitwise CRC-32C, and hashlib's BLAKE2b."""

from __future__ import annotations

import os

import frames
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("lamina.netstack.native", exc_type=ImportError)


def test_the_oracle_knows_the_standard_check_value() -> None:
    assert frames.crc32c(b"123456789", 0xFFFFFFFF) ^ 0xFFFFFFFF == 0xE3069283


@settings(max_examples=150, deadline=None)
@given(
    data=st.binary(max_size=700),
    key=st.one_of(st.none(), st.binary(min_size=32, max_size=32)),
    part=st.sampled_from([frames.HEADER_PART, frames.PAYLOAD_PART]),
    frame=st.one_of(st.integers(0, 3), st.integers(0, (1 << 64) - 1)),
)
def test_checks_equal_the_second_implementation(data: bytes, key: bytes | None, part: int, frame: int) -> None:
    assert native.check(key, part, frame, data) == frames.check(key, part, frame, data)


@pytest.mark.parametrize("key", [None, b"k" * 32], ids=["checksum", "code"])
def test_every_length_around_the_blocks(key: bytes | None) -> None:
    data = os.urandom(600)
    for nbytes in range(600):
        assert native.check(key, 1, 7, data[:nbytes]) == frames.check(key, 1, 7, data[:nbytes]), nbytes


@pytest.mark.parametrize("key", [None, b"k" * 32], ids=["checksum", "code"])
def test_every_flipped_bit_shows(key: bytes | None) -> None:
    data = bytearray(os.urandom(160))
    whole = native.check(key, 2, 0, bytes(data))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert native.check(key, 2, 0, bytes(data)) != whole
        data[bit // 8] ^= 1 << bit % 8


def test_part_frame_and_key_matter() -> None:
    seen = {
        native.check(key, part, frame, b"x") for key in (b"a" * 32, b"b" * 32) for part in (1, 2) for frame in (0, 1)
    }
    assert len(seen) == 8
    with pytest.raises(ValueError, match="key"):
        native.check(b"short", 1, 0, b"")
