"""Runs a lint of text over all files of the repository."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".md", ".cpp", ".h", ".cu", ".cuh"}


class Fault(NamedTuple):
    """A fault at a line of a file. ``text``: the sentence."""

    path: str
    line: int
    rule: str
    text: str


Lint = Callable[[str, str], Iterator[Fault]]  # parameters: a path and the file's text


def linted() -> list[str]:
    """Returns the paths of all text files that git knows or would add."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(path for path in paths if Path(path).suffix in SUFFIXES and not path.startswith("perf/results/"))


def main(lint: Lint) -> int:
    """Prints the faults of all files. Returns 1 if there are any."""
    files = ((path, ROOT / path) for path in linted())
    faults = [fault for path, file in files if file.is_file() for fault in lint(path, file.read_text())]
    for fault in faults:
        print(f"{fault.path}:{fault.line}: {fault.rule}: {fault.text[:200]}")
    return 1 if faults else 0
