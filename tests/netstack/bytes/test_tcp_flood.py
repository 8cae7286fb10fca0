"""A peer that sends without end keeps no call of tcp beyond its time."""

from __future__ import annotations

from pathlib import Path

from programs import build, run


def test_a_peer_that_floods_tcp_keeps_no_call_beyond_its_time(tmp_path: Path) -> None:
    program = build(tmp_path, Path(__file__).with_name("tcp_flood.cpp"))
    assert run(program) == "nothing came, in time\n"
