"""The README's code runs as printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^lamina-launch (.+)$", README, re.MULTILINE)


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_something_to_run() -> None:
    assert len(SNIPPETS) >= 2
    assert len(COMMANDS) >= 2


@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_python(code: str) -> None:
    assert "import os" in run("-c", code)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_lines(command: str) -> None:
    assert run("-m", "lamina.cluster.launch", *shlex.split(command)).strip()


def test_the_tree_names_what_is_there() -> None:
    for line in README[README.index("## The tree") :].splitlines():
        name = line.split("  ")[0].strip()
        if line and not line.startswith("  ") and name.endswith("/"):
            for folder in name.split():
                assert (ROOT / folder).is_dir(), folder
