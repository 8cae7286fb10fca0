"""Programs in C++ that tests compile and run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 100.0


def build(tmp_path: Path, source: Path, *flags: str, headers: Path = ROOT / "csrc") -> Path:
    """``source``, which includes from ``headers``. Skips without a compiler, or without a sanitizer of ``flags``."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = tmp_path / source.stem
    command = [compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-pthread", f"-I{headers}", *flags]
    command += [str(source), "-ldl", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode and "cannot find -l" in done.stderr:
        pytest.skip(f"needs the sanitizer's runtime: {done.stderr.strip().splitlines()[-2]}")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *arguments: str) -> str:
    """The output of ``program``, which must end well and say nothing else."""
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
