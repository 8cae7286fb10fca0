"""Attacks that are tests of their own, with fakes of the hostile side: run by name, in a process with a time limit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shipped import ROOT
from verdict import Verdict

LIMIT_S = 240
NEEDS_NOTHING = "not gpu and not rdma and not vm"


def by_tests(*tests: str) -> Callable[[Path], Verdict]:
    """An attack that holds if all of ``tests`` pass: paths with names, as pytest takes them."""

    def attack(folder: Path) -> Verdict:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            NEEDS_NOTHING,
        ]
        try:
            done = subprocess.run(
                [*command, *tests], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Verdict(False, f"no end after {LIMIT_S} s")
        last = done.stdout.strip().splitlines()[-1:] or [""]
        failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
        if done.returncode == 0:
            skipped = re.search(r"(\d+) skipped", done.stdout)
            return Verdict(True, f"{len(tests)} groups of tests" + (f", {skipped[0]}" if skipped else ""))
        return Verdict(False, failed[1] if failed else last[0][:100])

    return attack
