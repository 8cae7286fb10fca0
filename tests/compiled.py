"""What compilers make for tests is kept under build/, by compiler, command and the content of all that it may read."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "tests"
SECONDS = 110.0
SUFFIXES = {".cpp", ".cu", ".cuh", ".h"}


class Compiled(NamedTuple):
    """``folder`` holds what was made; ``said``: on both outputs. ``status`` 0: it went well, and is kept."""

    folder: Path
    said: str
    status: int


def made_by(command: Sequence[str], *options: str, files: Mapping[str, str] = {}) -> Compiled:
    """Run ``command``, whose sources are those of csrc and tests. A place {} in ``options`` is the folder to fill,
    where ``files`` lie by then: name -> text.
    """
    told = [*command, *options, *files.items()]
    digest = hashlib.sha256(repr((told, _version(command[0]), _sources())).encode()).hexdigest()[:32]
    folder = KEPT / digest
    if not folder.exists():
        ours = KEPT / f"{digest}.{os.getpid()}"  # others may make the same
        ours.mkdir(parents=True)
        for name, text in files.items():
            (ours / name).parent.mkdir(parents=True, exist_ok=True)
            (ours / name).write_text(text)
        filled = [*command, *(option.replace("{}", str(ours)) for option in options)]
        done = subprocess.run(filled, capture_output=True, text=True, check=False, timeout=SECONDS)
        said = done.stdout + done.stderr
        if done.returncode:
            shutil.rmtree(ours)
            return Compiled(folder, said, done.returncode)
        (ours / "said").write_text(said)
        try:
            ours.rename(folder)
        except OSError:  # somebody else was first
            shutil.rmtree(ours)
    return Compiled(folder, (folder / "said").read_text(), 0)


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=SECONDS).stdout


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for room in ("csrc", "tests"):
        for path in sorted(p for p in (ROOT / room).rglob("*") if p.suffix in SUFFIXES):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
