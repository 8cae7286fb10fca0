"""What several tests of workers on other hosts compare with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODEL = "examples/tiny_lm/model"
ASK = ("--prompt", "class Stack:", "--max-tokens", "16", "--ignore-eos", "--dtype", "float32")


class Known(NamedTuple):
    """The words of a `lamina-launch`, and the text that it prints where all workers are on this host."""

    command: tuple[str, ...]
    text: str


def generate() -> Known:
    command = ("generate", MODEL, *ASK)
    done = subprocess.run(
        [sys.executable, "-m", "lamina.cli.launch", *command, "--memory-workers", "1"], cwd=ROOT, capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, timeout=110, check=True,
    )  # fmt: skip
    return Known(command, done.stdout)
