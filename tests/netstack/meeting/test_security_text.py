"""SECURITY.md names tests and files: they are there."""

from __future__ import annotations

import re

from wiring import ROOT

TEXT = (ROOT / "SECURITY.md").read_text()


def test_every_named_test_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) >= 6
    assert not {name for name in named if f"def {name}(" not in tests}


def test_every_named_file_exists() -> None:
    named = set(re.findall(r"`((?:netstack|csrc|tests|lamina)/[\w./]+)`", TEXT))
    assert len(named) >= 10
    assert not {name for name in named if not (ROOT / name).exists()}


def test_the_limits_are_the_real_ones() -> None:
    from lamina.netstack.meeting.listener import HALF_OPEN_MAX, HANDSHAKE_S

    assert f"at most {HALF_OPEN_MAX} half-open peers, {HANDSHAKE_S:g} s each" in TEXT
