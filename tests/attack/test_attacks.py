"""Each attack can succeed: on something that is weak on purpose it does. And the program prints one line for each.

Covers: tests/attack/all_attacks.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from all_attacks import ATTACKS
from shipped import ROOT
from verdict import Attack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
WITH_CONTROL = [attack for attack in ATTACKS if attack.control is not None]


@pytest.mark.parametrize("attack", WITH_CONTROL, ids=lambda attack: attack.name)
def test_it_succeeds_against_what_is_weak(attack: Attack, tmp_path: Path) -> None:
    assert attack.control is not None
    verdict = attack.control(tmp_path)
    if verdict.held is None:
        pytest.skip(verdict.evidence)
    assert verdict.held is False, verdict.evidence


def test_the_program_prints_what_held_and_what_fell() -> None:
    done = _run("foreign-names", "late-verbs-writes")
    assert done.returncode == 0, done.stderr
    head, names, late = done.stdout.splitlines()
    assert head.split() == ["attack", "result", "s", "evidence"]
    assert names.split()[:2] == ["foreign-names", "held"]
    assert late.split()[1:3] == ["not", "tried"]


def test_an_unknown_name_is_refused() -> None:
    done = _run("x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("there is no attack x: endless-bodies, ")


def _run(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tests/attack", *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
