"""Compares the faults of a lint with the committed count for each folder, which may only fall.

A count of a folder may rise by what other folders lose: text that has moved since the merge base with origin/main.
``--write`` records lower counts and moved text. A merge keeps both lines of a folder; the higher one counts until then.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".md", ".cpp", ".h", ".cu", ".cuh"}
SHOWN = 40


class Fault(NamedTuple):
    path: str
    line: int
    rule: str
    text: str

    def folder(self) -> str:
        """Two levels of the tree: every room of a package has a count of its own."""
        return "/".join(self.path.split("/")[:-1][:2]) or "."


Lint = Callable[[str, str], Iterator[Fault]]  # of a path and the file's text


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def linted(path: str) -> bool:
    return Path(path).suffix in SUFFIXES and not path.startswith("perf/results/")


def now(lint: Lint) -> list[Fault]:
    paths = sorted(filter(linted, git("ls-files", "-co", "--exclude-standard").splitlines()))
    return [fault for path in paths if (ROOT / path).is_file() for fault in lint(path, (ROOT / path).read_text())]


def since_base(lint: Lint, faults: list[Fault]) -> tuple[list[Fault], list[Fault]]:
    """Faults that have come and gone since the merge base, as far as git knows it; an edited sentence is in both."""
    base = git("merge-base", "HEAD", "origin/main").strip() or "HEAD"
    changed = set(git("diff", "--name-only", "--no-renames", base).splitlines())
    changed |= set(git("ls-files", "-o", "--exclude-standard").splitlines())
    old = [f for path in sorted(filter(linted, changed)) for f in lint(path, git("show", f"{base}:{path}"))]
    known = Counter((f.folder(), f.rule, f.text) for f in old)
    come = []
    for fault in (f for f in faults if f.path in changed):
        key = (fault.folder(), fault.rule, fault.text)
        known[key] -= 1
        if known[key] < 0:
            come.append(fault)
    gone = [Fault(f"{folder}/", 0, rule, text) for (folder, rule, text), n in known.items() for _ in range(n)]
    return come, gone


def moved(come: list[Fault], gone: list[Fault]) -> Counter[str]:
    """Counts, for each folder, the faults that came from another folder with the same words."""
    left = Counter((f.rule, f.text) for f in gone)
    into = Counter[str]()
    for fault in come:
        if left[fault.rule, fault.text] > 0:
            left[fault.rule, fault.text] -= 1
            into[fault.folder()] += 1
    return into


def read(path: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line in filter(None, path.read_text().splitlines() if path.exists() else ()):
        folder, count = line.rsplit(maxsplit=1)
        counts[folder] = max(int(count), counts.get(folder, 0))
    return counts


def write(path: Path, counts: Mapping[str, int]) -> None:
    path.write_text("".join(f"{folder} {count}\n" for folder, count in sorted(counts.items()) if count))


def main(name: str, lint: Lint, arguments: list[str]) -> int:
    """Lints all files. Returns 1, after printing the new faults, if a folder has more of them than its count."""
    path, faults = Path(__file__).with_name(f"{name}.counts"), now(lint)
    counts, limits = Counter(f.folder() for f in faults), Counter(read(path))
    above = counts - limits
    come, gone = since_base(lint, faults) if above else ([], [])
    allowed = limits + moved(come, gone)
    for folder in sorted(counts - allowed):
        places = [f for f in come if f.folder() == folder] or [f for f in faults if f.folder() == folder]
        for fault in places[:SHOWN]:
            print(f"{fault.path}:{fault.line}: {fault.rule}: {fault.text[:200]}")
        print(f"{name}: {folder} has {counts[folder]} faults, at most {allowed[folder]} are allowed")
    if "--write" in arguments:
        write(path, {folder: min(count, allowed[folder]) for folder, count in counts.items()})
        return 1 if counts - allowed else 0
    for folder in sorted(above.keys() - (counts - allowed).keys()):
        print(f"{name}: text with faults has moved to {folder}: run make format, which records it")
    if fallen := (limits - counts).total():
        print(f"{name}: {fallen} fewer faults than recorded: make format records it", file=sys.stderr)
    return 1 if above else 0
