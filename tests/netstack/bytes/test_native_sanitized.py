"""The native parts without Python, under sanitizers: the frame decoder fuzzed, the rings as two threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import build, run

HERE = Path(__file__).parent


@pytest.mark.long
def test_the_frame_decoder_survives_hostile_streams(tmp_path: Path) -> None:
    """Streams of frames whose fields are random, whose checks are right or not, cut anywhere; `make fuzz` goes on."""
    program = build(tmp_path, HERE / "fuzz_frame.cpp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    words = run(program, "30000", "1").split()
    counts = {words[i]: int(words[i + 1]) for i in range(0, len(words), 2)}
    assert counts["executions"] == 30000
    assert counts["delivered"] > 3000  # the honest part is honest
    assert counts["refused"] > 3000


@pytest.mark.long
def test_the_ring_is_free_of_races(tmp_path: Path) -> None:
    # The sanitizer knows no fences, which the ring uses in addition to its acquire and release, never in their place.
    program = build(tmp_path, HERE / "ring_threads.cpp", "-fsanitize=thread", "-Wno-tsan")
    for spin_ns in ("0", "20000"):
        assert run(program, "3000", spin_ns) == "messages 3000\n"


def test_a_cipher_that_fails_leaves_nothing_in_clear(tmp_path: Path) -> None:
    program = build(tmp_path, HERE / "cipher_broken.cpp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    assert run(program) == "sound 0 left 0\n"
