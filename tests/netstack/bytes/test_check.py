"""Checksum and cipher against second implementations: bitwise CRC-32C, and AES-GCM in Python."""

from __future__ import annotations

import os
import subprocess
import sys

import frames
import gcm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wiring import KEY, PATH, ROOT

from lamina.netstack import checksum

native = pytest.importorskip("lamina.netstack.host.native_module", exc_type=ImportError)
COUNTERS = st.one_of(st.integers(0, 3), st.integers(0, (1 << 64) - 1))


def test_the_oracles_know_the_standard_values() -> None:
    """The last two: test cases 13 and 14 of the submission of GCM to NIST."""
    assert frames.crc32c(b"123456789", 0xFFFFFFFF) ^ 0xFFFFFFFF == 0xE3069283
    assert gcm.seal(bytes(32), 0, b"").hex() == "530f8afbc74536b9a963b4f1c4cb738b"
    text, code = "cea7403d4d606b6e074ec5d3baf39d18", "d0d1c8a799996bf0265b98b5d48ab919"
    assert gcm.seal(bytes(32), 0, bytes(16)).hex() == text + code


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=700), part=st.sampled_from([frames.HEADER_PART, frames.PAYLOAD_PART]), frame=COUNTERS)
def test_checksums_equal_the_second_implementation(data: bytes, part: int, frame: int) -> None:
    assert native.check(part, frame, data) == frames.check(part, frame, data)


@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=70), key=st.binary(min_size=32, max_size=32), counter=COUNTERS)
def test_what_is_sealed_equals_the_second_implementation(data: bytes, key: bytes, counter: int) -> None:
    sealed = native.seal(key, counter, data)
    assert sealed == gcm.seal(key, counter, data)
    assert native.unseal(key, counter, sealed) == gcm.unseal(key, counter, sealed) == data


def test_every_length_around_the_blocks() -> None:
    data = os.urandom(600)
    for nbytes in range(600):
        assert native.check(1, 7, data[:nbytes]) == frames.check(1, 7, data[:nbytes]), nbytes


def test_what_is_no_frame_has_a_checksum_of_the_same_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the native module, of another one, which is as long."""
    data = os.urandom(1000)
    found = checksum.checksum(memoryview(data))
    assert found == frames.check(3, 0, data)
    assert found != checksum.checksum(data[:-1] + bytes([data[-1] ^ 1]))
    monkeypatch.setattr(checksum, "check", None)
    other = checksum.checksum(data)
    assert len(other) == len(found) == checksum.CHECKSUM_BYTES
    assert other != checksum.checksum(data[:-1] + bytes([data[-1] ^ 1]))


def test_every_flipped_bit_shows() -> None:
    data = bytearray(os.urandom(160))
    whole = native.check(2, 0, bytes(data))
    sealed = bytearray(native.seal(KEY, 7, data))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert native.check(2, 0, bytes(data)) != whole
        data[bit // 8] ^= 1 << bit % 8
    for bit in range(8 * len(sealed)):
        sealed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="wrong code"):
            native.unseal(KEY, 7, sealed)
        sealed[bit // 8] ^= 1 << bit % 8
    assert native.unseal(KEY, 7, sealed) == data


def test_key_and_counter_matter() -> None:
    assert len({native.check(part, frame, b"x") for part in (1, 2) for frame in (0, 1)}) == 4
    assert len({native.seal(key * 32, counter, bytes(16)) for key in (b"a", b"b") for counter in (0, 1)}) == 4
    for key, counter in ((b"b" * 32, 7), (KEY, 8)):
        with pytest.raises(ValueError, match="wrong code"):
            native.unseal(key, counter, native.seal(KEY, 7, b"x"))


def test_bad_arguments_are_refused() -> None:
    for call in (native.seal, native.unseal):
        with pytest.raises(ValueError, match="key"):
            call(b"short", 0, bytes(16))
    with pytest.raises(ValueError, match="short"):
        native.unseal(KEY, 0, bytes(15))


@pytest.mark.parametrize("named", ["/nowhere/libcrypto.so", "libc.so.6"])
def test_without_libcrypto_what_must_be_encrypted_is_refused_in_one_line(named: str) -> None:
    """And what stays within the host goes on."""
    code = (
        "from lamina.netstack import ChannelError, Geometry, Terms\n"
        "from lamina.netstack.host.tcp import TcpFabric\n"
        "g = Geometry(slots=1, slot_bytes=64)\n"
        "plain, sealing = TcpFabric(b'k' * 32), TcpFabric(b'k' * 32, seal=True)\n"
        "url = plain.listen().url\n"
        "for call in (sealing.listen, lambda: sealing.connect(url, Terms(outbound=g, inbound=g)),\n"
        "             lambda: plain.listen('192.0.2.1:0')):\n"
        "    try: call()\n"
        "    except ChannelError as error: print(error)\n"
        "from lamina.netstack.host.native_module import seal\n"
        "try: seal(bytes(32), 0, b'x')\n"
        "except OSError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        env=os.environ | {"LAMINA_LIBCRYPTO": named, "PYTHONPATH": PATH},
    )  # fmt: skip
    *refused, last = done.stdout.splitlines()
    assert len(refused) == 3
    for line in refused:
        assert "encrypted by libcrypto, which does not load" in line
        assert "install OpenSSL 1.1.1 or newer" in line
    assert last.startswith("libcrypto: ")
