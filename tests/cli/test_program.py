"""``lamina-launch`` as a process: how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import atexit, sys, threading
import logging, logging.handlers
from lamina.cli import launch

class Left:
    def __del__(self):
        print("modules were taken apart")

def end():
    logging.getLogger().addHandler(kept)
    logging.warning("a kept line")
    atexit.register(print, "exit function")
    began = threading.Event()
    threading.Thread(target=lambda: (began.wait(), main.join(0.05), print("thread"))).start()
    began.set()
    {how}

left, main = Left(), threading.main_thread()
kept = logging.handlers.MemoryHandler(100, target=logging.StreamHandler(sys.stdout))
launch.main = end
launch.run_program()
"""


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        ("return 0", 0, ""),
        ("return 2", 2, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(143)", 143, ""),
        ("sys.exit('why')", 1, "why"),
        ("raise OSError('lost')", 1, "OSError: lost"),
    ],
)
def test_a_command_that_is_done_ends_without_taking_its_modules_apart(how: str, status: int, error: str) -> None:
    """Its threads and exit functions have their turn, and its status stays; Python itself ends one that has failed."""
    command = [sys.executable, "-c", CODE.format(how=how)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == status
    words = ["thread", "exit function", "a kept line"]
    assert done.stdout.splitlines() == [*words, *(["modules were taken apart"] if error else [])]
    assert done.stderr.strip().endswith(error)


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "lamina", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout[:7]) == (0, "lamina ")
