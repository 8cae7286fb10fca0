"""Programs in C++ that tests compile and run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from compiled import made_by

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SECONDS = 100.0


def build(tmp_path: Path, source: Path, *flags: str, headers: Path = CSRC) -> Path:
    """``source``, which includes from ``headers``; where they are Lamina's own, the program is kept under build/.

    Skips without a compiler, or without a sanitizer of ``flags``.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    command = [compiler, "-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-pthread", f"-I{headers}", *flags]
    command += [str(source), "-ldl"]
    if headers == CSRC:
        folder, said, status = made_by(command, "-o", f"{{}}/{source.stem}")
    else:
        tmp_path.mkdir(exist_ok=True)
        done = subprocess.run(
            [*command, "-o", str(tmp_path / source.stem)], capture_output=True, text=True, check=False, timeout=SECONDS
        )
        folder, said, status = tmp_path, done.stderr, done.returncode
    if status and "cannot find -l" in said:
        pytest.skip(f"needs the sanitizer's runtime: {said.strip().splitlines()[-2]}")
    assert status == 0, said
    return folder / source.stem


def run(program: Path, *arguments: str) -> str:
    """The output of ``program``, which must end well and say nothing else."""
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
