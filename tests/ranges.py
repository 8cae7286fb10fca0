"""Installs Lamina with the ends of the version ranges in pyproject.toml, and runs tests with each set of versions.

python tests/ranges.py [ENVIRONMENT ...]        # PIP_ARGS passes options to pip, such as another index

A wheel is built once, from a copy of the tracked files, and installed into each environment, which is made anew under
build/ranges. Tests run in a copy without the package's source, so they import what was installed. An environment that
passes is removed; its log stays, with all versions.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
EXTRA = "test"
CROSSED = ("torch", "transformers")  # each is also tried at its lowest version among the newest ones
INSTALL_S, TESTS_S = 3600.0, 3600.0
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
SOURCE = ("lamina", "netstack", "converter", "csrc", "setup.py")  # what tests must not see
# Arguments of Python, for one run each. Together they import every dependency that has a range.
RUNS = tuple(
    shlex.split(f"-m pytest {arguments}")
    for arguments in (
        """
        tests/api/wrapped tests/converter tests/models tests/api tests/ops/attention/test_numba_kernels.py
        tests/executor/hosts/test_ray_hosts.py tests/e2e/test_llm.py tests/e2e/test_tensor_parallel.py
        tests/e2e/models/test_other_families.py tests/server/request/test_fields.py
        tests/server/middleware/test_layers.py
        tests/server/request/test_server_options.py tests/server/metrics/test_monitoring.py
        tests/server/test_openai_client.py
        tests/server/test_wire.py tests/cluster/test_cluster_files.py
        """,
        "-m slow tests/cluster/test_over_ray.py -k tokens_are_those_of_the_local_launcher",
    )
)


@dataclass(frozen=True)
class Range:
    """The versions of a package that pyproject.toml allows."""

    text: str  # as it stands there
    requirement: Requirement
    lowest: str

    @property
    def name(self) -> str:
        """The normalised name, by which pip lists it."""
        return canonicalize_name(self.requirement.name)


@dataclass(frozen=True)
class Environment:
    """A set of versions. ``lowest``: the packages at the lower end of their range; pip takes the newest of others."""

    name: str
    end: str
    lowest: tuple[str, ...]
    shown: tuple[str, ...]  # the packages whose end is tried here


@dataclass
class Tried:
    """An environment after its run. ``failure``: empty if all passed; ``rows``: package -> version and failure."""

    failure: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)  # package -> why its version is not the end of its range


def declared(project: Path, extra: str = EXTRA) -> dict[str, Range]:
    """The ranges of all that ``extra`` of the project installs, by normalised name.

    Raises ValueError for a package that lacks an end.
    """
    with (project / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)
    own, extras = table["project"]["name"], table["project"].get("optional-dependencies", {})
    todo, names = list(table["project"]["dependencies"]), [extra]
    found: dict[str, Range] = {}
    while names:
        todo += extras[names.pop()]
        while todo:
            text = todo.pop(0)
            if canonicalize_name(Requirement(text).name) == canonicalize_name(own):
                names += Requirement(text).extras
            else:
                each = _range(text)
                found[each.name] = each
    return found


def _range(text: str) -> Range:
    requirement = Requirement(text)
    lower = [s.version for s in requirement.specifier if s.operator in (">=", "==")]
    upper = [s.version for s in requirement.specifier if s.operator in ("<", "==")]
    if len(lower) != 1 or len(upper) != 1:
        raise ValueError(f"{text} lacks an end: write {requirement.name}>=LOWEST,<FIRST_NOT_TRIED")
    return Range(text, requirement, lower[0])


def environments(ranges: dict[str, Range], crossed: Iterable[str] = CROSSED) -> list[Environment]:
    """All lower ends, all upper ends, and each of ``crossed`` at its lower end alone."""
    every = tuple(ranges)
    return [
        Environment("lowest", "lowest", every, every),
        Environment("newest", "newest", (), every),
        *(Environment(f"{name}-lowest", "lowest, others newest", (name,), (name,)) for name in crossed),
    ]


class Trial:
    """One environment: made, checked, and used by tests. Commands write to ``log``."""

    def __init__(self, folder: Path, environment: Environment, ranges: dict[str, Range]) -> None:
        self._folder, self._environment, self._ranges = folder, environment, ranges
        self._python, self.log = folder / "venv" / "bin" / "python", folder / "log"
        self._pip = [*PIP, "--python", str(self._python)]

    def run(self, project: Path, wheel: Path, runs: Sequence[Sequence[str]], pip_args: Sequence[str]) -> Tried:
        """Raises OSError where the folder cannot be written."""
        shutil.rmtree(self._folder, ignore_errors=True)
        tree, tried = self._folder / "tree", Tried()
        copy_tracked(project, tree, without=SOURCE)
        if not self._install(wheel, pip_args):
            tried.failure = "cannot be installed"
            return tried
        self._look(tried, pip_args)
        for arguments in runs:
            # -P: neither the folder of a program nor the current one comes before what is installed.
            if not call(self.log, self._python, "-P", *arguments, cwd=tree, limit_s=TESTS_S):
                tried.failure = f"tests fail: {' '.join(arguments)}"
        if not tried.failure and not tried.missed:
            for folder in (tree, self._folder / "venv"):
                shutil.rmtree(folder)
        return tried

    def _install(self, wheel: Path, pip_args: Sequence[str]) -> bool:
        constraints = self._folder / "constraints.txt"
        lowest = [self._ranges[name] for name in self._environment.lowest]
        constraints.write_text("".join(f"{r.requirement.name}=={r.lowest}\n" for r in lowest))
        return call(self.log, sys.executable, "-m", "venv", "--without-pip", self._folder / "venv") and call(
            self.log, *self._pip, "install", "-c", constraints, *pip_args, f"{wheel}[{EXTRA}]"
        )

    def _look(self, tried: Tried, pip_args: Sequence[str]) -> None:
        """Take down the versions that were installed, and which of them are not the ends that they are to be."""
        listed = json.loads(_output(*self._pip, "list", "--format=json"))
        tried.versions = {canonicalize_name(each["name"]): each["version"] for each in listed}
        newest = [self._ranges[n] for n in self._environment.shown if n not in self._environment.lowest]
        newer: dict[str, str] = {}
        if newest:
            ask = ["install", "--quiet", "--dry-run", "--no-deps", "--upgrade", "--report=-", *pip_args]
            report = json.loads(_output(*self._pip, *ask, *(r.text for r in newest)))
            told = [each["metadata"] for each in report["install"]]
            newer = {canonicalize_name(each["name"]): each["version"] for each in told}
        for name in self._environment.shown:
            version = Version(tried.versions[name])
            if name in newer:
                tried.missed[name] = f"{newer[name]} is allowed, and other packages hold it back"
            elif name in self._environment.lowest and version != Version(self._ranges[name].lowest):
                tried.missed[name] = f"{self._ranges[name].lowest} was to be installed"
        with self.log.open("a") as log:
            log.writelines(f"{name}=={version}\n" for name, version in tried.versions.items())


def build(project: Path, folder: Path, pip_args: Sequence[str]) -> Path | None:
    """The wheel of the project's tracked files, or None if it cannot be built."""
    shutil.rmtree(folder, ignore_errors=True)
    copy_tracked(project, folder / "source")
    if not call(folder / "log", *PIP, "wheel", "--no-deps", *pip_args, "--wheel-dir", folder, folder / "source"):
        return None
    shutil.rmtree(folder / "source")
    return next(folder.glob("*.whl"))


def call(log: Path, *command: object, cwd: Path | None = None, limit_s: float = INSTALL_S) -> bool:
    """True if the command succeeds within ``limit_s``. Output goes to ``log``; programs of its folder come first."""
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    path = os.pathsep.join([str(Path(str(command[0])).parent), own.get("PATH", os.defpath)])
    with log.open("a") as out:
        out.write(f"$ {shlex.join(map(str, command))}\n")
        out.flush()
        try:
            run = subprocess.run(
                [str(c) for c in command], cwd=cwd or log.parent, env=own | {"PATH": path}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            out.write(f"ended after {limit_s:.0f} s\n")
            return False
    return run.returncode == 0


def _output(*command: str) -> str:
    run = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=INSTALL_S, check=True
    )
    return run.stdout


def copy_tracked(project: Path, target: Path, without: Iterable[str] = ()) -> None:
    """Copy the files that git tracks, as they are now, with symbolic links as links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=project, capture_output=True, check=True, timeout=60).stdout
    left_out = set(without)
    for name in filter(None, listed.decode().split("\0")):
        path = project / name
        if Path(name).parts[0] in left_out or not (path.is_symlink() or path.exists()):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target / name, follow_symlinks=False)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, as wide as they need to be."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main(arguments: Sequence[str] | None = None, project: Path = ROOT, runs: Sequence[Sequence[str]] = RUNS) -> int:
    """The exit status: 0 if every environment has passed with the versions that it is for."""
    ranges = declared(project)
    known = {e.name: e for e in environments(ranges, [name for name in CROSSED if name in ranges])}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("environment", nargs="*", choices=[*known, []], help="only these")
    chosen = parser.parse_args(arguments).environment or list(known)
    folder, pip_args = project / "build" / "ranges", shlex.split(os.environ.get("PIP_ARGS", ""))
    say = functools.partial(print, flush=True)
    if (wheel := build(project, folder / "wheel", pip_args)) is None:
        say(f"no wheel can be built: see {folder / 'wheel' / 'log'}")
        return 1
    rows, failed = [("range", "end", "version", "result")], False
    for name in chosen:
        began, trial = time.monotonic(), Trial(folder / name, known[name], ranges)
        say(f"{name}: {trial.log}")
        tried = trial.run(project, wheel, runs, pip_args)
        failed = failed or bool(tried.failure or tried.missed)
        say(f"{name}: {tried.failure or 'tests pass'} ({(time.monotonic() - began) / 60:.0f} min)")
        for package in known[name].shown:
            result = "; ".join(filter(None, [tried.failure, tried.missed.get(package, "")])) or "passed"
            version = tried.versions.get(package, "-")
            rows.append((ranges[package].text, known[name].end, version, result))
    say(table(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
