"""CONTRIBUTING.md has one command for each rung of the network's ladder: it is there, and it selects tests."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from wiring import ROOT

ROWS = re.findall(r"^\| (\d) \|.*?\|(.*)\|.*\|$", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
RUNGS = {int(rung): re.findall(r"`((?:\$PY|make) [^`]*)`", cell) for rung, cell in ROWS}


def output(*words: str) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # which may hide names
    done = subprocess.run(words, cwd=ROOT, env=own, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def what_runs(command: str) -> list[str]:
    """The commands that a line of the table stands for: those of its target, where it is one of make."""
    if not command.startswith("make "):
        return [command.replace("$PY", sys.executable)]
    return output("make", "-n", *command.split()[1:], "READY=", f"BIN={Path(sys.executable).parent}").splitlines()


def test_every_rung_that_needs_no_hardware_has_its_command() -> None:
    assert list(RUNGS) == list(range(8))
    assert all(RUNGS[rung] for rung in range(7))


@pytest.mark.long(but=["0"])
@pytest.mark.parametrize("rung", range(7))
def test_its_commands_select_tests(rung: int) -> None:
    found = []
    for line in (line for command in RUNGS[rung] for line in what_runs(command) if "-m pytest" in line):
        words = shlex.split(line)
        found = [name for name in output(*words, "--collect-only").splitlines() if "::" in name]
        assert found, line
        expression = words[words.index("-k") + 1] if "-k" in words else ""
        for word in set(re.findall(r"\w+", expression)) - {"or", "and", "not"}:
            assert any(word in name for name in found), f"{word} selects nothing"
    assert found, "no command of this rung runs tests"
