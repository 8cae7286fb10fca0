"""Programs that compilers make for tests are kept under build/, by compiler, command and the content of all that they
include.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "tests"
SECONDS = 110.0
SUFFIXES = {".cpp", ".cu", ".cuh", ".h"}
INCLUDED = re.compile(rb'^[ \t]*#[ \t]*include[ \t]+(?:["<]([^">\n]+)[">])?', re.MULTILINE)


class Compiled(NamedTuple):
    """``folder`` holds what was made; ``said``: on both outputs. ``status`` 0: it went well, and is kept."""

    folder: Path
    said: str
    status: int


def made_by(command: Sequence[str], *options: str, files: Mapping[str, str] = {}) -> Compiled:
    """Run ``command``, whose sources are those of csrc and tests. A place {} in ``options`` is the folder to fill,
    where ``files`` lie by then: name -> text.
    """
    told = repr((command, options, files, _version(command[0]), _sources([*command, *options])))
    digest = hashlib.sha256(told.encode()).hexdigest()[:32]
    folder = KEPT / digest
    if not folder.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{digest}.", dir=KEPT, ignore_cleanup_errors=True) as ours:  # of who is first
            for name, text in files.items():
                Path(ours, name).parent.mkdir(parents=True, exist_ok=True)
                Path(ours, name).write_text(text)
            filled = [*command, *(option.replace("{}", ours) for option in options)]
            done = subprocess.run(filled, capture_output=True, text=True, check=False, timeout=SECONDS)
            said = done.stdout + done.stderr
            if done.returncode:
                return Compiled(folder, said, done.returncode)
            Path(ours, "said").write_text(said)
            with suppress(OSError):  # others have made the same
                Path(ours).rename(folder)
    return Compiled(folder, (folder / "said").read_text(), 0)


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=SECONDS).stdout


def _sources(words: Sequence[str]) -> str:
    """Digests of all files that these words of a command name, and of what those include from there in any branch; of
    the system's own the compiler's version says enough. Raises ValueError for an include that no reader can follow.
    """
    folders = [Path(word[2:]) for word in words if word.startswith("-I")]
    ahead, known = [Path(word) for word in words if Path(word).suffix in SUFFIXES], dict[Path, bytes]()
    while ahead:
        path = ahead.pop().resolve()
        if path in known or not path.is_file():
            continue
        known[path] = text = path.read_bytes()
        for name in INCLUDED.findall(text):
            if not name:
                raise ValueError(f"{path}: an include has no name")
            ahead += [folder / name.decode() for folder in (path.parent, *folders)]
    return repr([(str(path), hashlib.sha256(known[path]).hexdigest()) for path in sorted(known)])
