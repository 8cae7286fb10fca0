"""Mutation testing of policy and of links, by mutmut: small mistakes are made on purpose, and a test must see each.

``make mutation``, or ``python tests/mutation.py GROUP ...``. A group is some files and the fast tests of them. Files
with more than MOST mutants are sampled, always alike. Survivors that no test can tell from the original are in
mutation_argued.txt, each with its reason; any other one is shown as a diff and makes the exit status 1. A run that was
ended early (--limit-s) goes on where it stopped; its scores so far are shown.

mutmut leaves out decorated functions, so properties too, and what is outside functions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutation"
ARGUED = Path(__file__).with_name("mutation_argued.txt")
MUTMUT = "mutmut==3.8.1"
MOST, SEED = 600, 1  # mutants of a file
SURVIVED, NO_TESTS, TIMEOUT = 0, (5, 33), (-24, 24, 36, 152, 255)  # mutmut's codes
LOST = (SURVIVED, *NO_TESTS)

# In the environment of mutmut: FILE MUTANT ... -> JSON of their diffs
DIFFS = """
import json, pathlib, sys
from mutmut.mutation.diff_apply import get_diff_for_mutant
file, *names = sys.argv[1:]
print(json.dumps({name: get_diff_for_mutant(name, path=pathlib.Path(file)) for name in names}))
"""


@dataclass(frozen=True)
class Group:
    files: tuple[str, ...]
    tests: tuple[str, ...]


GROUPS = {
    "engine": Group(
        (
            "lamina/scheduler/scheduler.py", "lamina/scheduler/kv_manager/allocator.py",
            "lamina/scheduler/kv_manager/prefix_cache.py", "lamina/scheduler/sequence.py",
            "lamina/scheduler/sampling_requests.py",
        ),
        ("tests/scheduler/test_scheduler.py", "tests/scheduler/test_scheduler_exact.py",
         "tests/scheduler/test_sequence.py", "tests/scheduler/test_sampling_requests.py",
         "tests/engine/test_engine.py", "tests/engine/test_limits.py",
         "tests/scheduler/test_roll_back.py", "tests/scheduler/kv_manager/test_prefix_cache.py"),
    ),
    "loans": Group(
        ("lamina/scheduler/kv_manager/spill_placement.py", "lamina/protocol/loan_placement.py"),
        ("tests/protocol/test_loan_placement.py", "tests/scheduler/kv_manager/test_spill_placement.py"),
    ),
    "sampling": Group(
        ("lamina/ops/sampling/sampler.py", "lamina/ops/sampling/token_history.py",
        "lamina/ops/sampling/sampling_settings.py"), ("tests/ops/sampling/test_sampler.py",
         "tests/ops/sampling/test_token_history.py", "tests/ops/sampling/test_sampling_settings.py",
         "tests/ops/sampling/test_changed_logits.py"),
    ),
    "server": Group(
        ("lamina/server/engine_client/engine_process.py", "lamina/server/engine_client/live_request.py",
         "lamina/server/engine_client/engine_client.py", "lamina/server/call.py",
        "lamina/server/response/event_stream.py", "lamina/server/queue_limit.py"),
         ("tests/server/engine_client/test_engine_client.py", "tests/server/request/test_flow.py",
         "tests/server/request/test_exact_limits.py", "tests/server/engine_client/test_engine_process.py",
         "tests/server/request/test_exact_answers.py", "tests/server/engine_client/test_serve_engine.py",
         "tests/server/engine_client/test_engine_restarts.py"),
    ),
    "fleet": Group(
        ("lamina/executor/hosts/ray_node.py", "lamina/executor/launchers/__init__.py",
        "lamina/executor/hosts/worker_placement.py"), ("tests/cluster/test_ray_node.py",
         "tests/executor/hosts/test_worker_placement.py", "tests/executor/hosts/test_room_of_hosts.py",
         "tests/engine/test_limits.py"),
    ),
    "links": Group(
        ("lamina/protocol/encrypted_socket.py", "lamina/netstack/bootstrap/handshake.py"),
        ("tests/protocol/test_encrypted_socket.py", "tests/protocol/test_encrypted_socket_edges.py",
         "tests/netstack/bootstrap/test_handshake.py", "tests/netstack/bootstrap/test_handshake_words.py"),
    ),
    "protocol": Group(
        ("lamina/protocol/codec.py", "lamina/protocol/kv_placement.py"),
        ("tests/protocol/test_codec_bytes.py", "tests/protocol/test_kv_placement.py",
         "tests/workers/memory/test_places.py::test_what_is_dealt_is_counted"),
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", default=list(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--most", type=int, default=MOST, help="mutants of a file that are tried")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end after so many seconds")
    parser.add_argument("--again", action="store_true", help="try survivors again too")
    parser.add_argument("--show", action="store_true", help="run nothing; what is known so far")
    args = parser.parse_args()
    if unknown := set(args.groups) - set(GROUPS):
        parser.error(f"unknown groups {', '.join(sorted(unknown))}; choose from {', '.join(GROUPS)}")
    deadline, left = time.monotonic() + args.limit_s, 0
    argued = read_argued()
    for name in args.groups:
        tree = Tree(name, args.most)
        if not args.show:
            tree.run(deadline, again=args.again)
        left += tree.report(argued)
    return 1 if left else 0


class Tree:
    """A copy of the repository in which the mutants of a group live."""

    def __init__(self, name: str, most: int) -> None:
        self._group, self._most = GROUPS[name], most
        self._path = WORK / name

    def run(self, deadline: float, *, again: bool) -> None:
        """Try what has not been tried, and with ``again`` what has survived, until ``deadline``."""
        self._copy()
        if not all(self._meta(file).exists() for file in self._group.files):
            self._mutmut(deadline, "no mutant has this name")  # makes them all, and finds the tests of each function
        due = {None, *(LOST if again else ())}
        names = [name for file in self._group.files for name, code in self.tried(file).items() if code in due]
        if names:
            self._mutmut(deadline, *names)

    def tried(self, file: str) -> dict[str, int | None]:
        """Mutant -> what came of it, of those of ``file`` that are in the sample."""
        codes = self._codes(file)
        names = sorted(codes)
        if len(names) > self._most:
            names = sorted(random.Random(SEED).sample(names, self._most))
        return {name: codes[name] for name in names}

    def report(self, argued: dict[str, str]) -> int:
        """Print the score of each file; returns how many survivors are not argued for."""
        left = 0
        for file in self._group.files:
            codes = self.tried(file)
            known = {n: c for n, c in codes.items() if c is not None}
            lost = sorted(n for n, c in known.items() if c in LOST)
            changes = self._changes(file, lost)
            excused = [n for n in lost if changes[n] in argued or _lengths_agree(changes[n])]
            killed = len(known) - len(lost)
            late = sum(c in TIMEOUT for c in known.values())
            print(
                f"{file}: {killed} of {len(known)} killed ({late} by a timeout), {len(excused)} cannot be told, "
                f"{len(lost) - len(excused)} survive; {len(codes) - len(known)} untried; "
                f"{len(codes)} of {len(self._codes(file))} in the sample"
            )
            for name in lost:
                if name not in excused:
                    print(f"  {name}{' (no test)' if known[name] in NO_TESTS else ''}\n    {changes[name]}")
            left += len(lost) - len(excused)
        return left

    def _copy(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        for folder in ("lamina", "tests"):
            shutil.copytree(ROOT / folder, self._path / folder, ignore=ignored, dirs_exist_ok=True)
        mutants = self._path / "mutants"
        mutants.mkdir(exist_ok=True)
        for place in (self._path, mutants):
            for name in ("csrc", "docs", "examples", "perf", "README.md", "SECURITY.md", "CONTRIBUTING.md"):
                if not (place / name).is_symlink():
                    (place / name).symlink_to(ROOT / name)
        settings: dict[str, Any] = {
            "source_paths": ["lamina"],
            "only_mutate": list(self._group.files),
            "pytest_add_cli_args_test_selection": list(self._group.tests),
            "pytest_add_cli_args": ["-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=whole"],
            "process_isolation": "forkserver",  # threads of torch and of tests do not live through a fork
            "use_git_change_detection": False,
            "track_dependencies": False,
            "timeout_multiplier": 5.0,
            "timeout_constant": 2.0,
        }
        own = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        (self._path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + f"\n[tool.mutmut]\n{own}")

    def _mutmut(self, deadline: float, *names: str) -> None:
        command = [environment() / "mutmut", "run", "--max-children", "1", *names]
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        with (self._path / "log").open("ab") as log:
            process = subprocess.Popen(command, cwd=self._path, env=variables, stdout=log, stderr=log)
            try:
                process.wait(max(0.0, min(deadline - time.monotonic(), 1e6)))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
            finally:
                process.wait()

    def _meta(self, file: str) -> Path:
        return self._path / "mutants" / f"{file}.meta"

    def _codes(self, file: str) -> dict[str, int | None]:
        if not (meta := self._meta(file)).exists():
            return {}
        codes: dict[str, int | None] = json.loads(meta.read_text())["exit_code_by_key"]
        return codes

    def _changes(self, file: str, names: list[str]) -> dict[str, str]:
        """Mutant -> ``FILE FUNCTION: old line -> new line``"""
        done = subprocess.run(
            [environment() / "python", "-c", DIFFS, file, *names], cwd=self._path, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        return {name: _change(file, name, diff) for name, diff in json.loads(done.stdout).items()}


def _change(file: str, name: str, diff: str) -> str:
    lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    old, new = (" ".join(" ".join(x[1:].split()) for x in lines if x[0] == sign) for sign in "-+")
    function = name.rpartition(".")[2].partition("__mutmut_")[0][2:].replace("ǁ", ".")
    return f"{file} {function}: {old} -> {new}"


def _lengths_agree(change: str) -> bool:
    """Returns whether the change is of strict= of a zip alone: without it nothing is checked, and our parts are of one
    length.
    """
    old, _, new = change.partition(": ")[2].partition(" -> ")
    return re.sub(r", strict=(True|False)(?=\))", "", old) == re.sub(r",( strict=(None|False))? ?(?=\))", "", new)


def environment() -> Path:
    """The programs of a virtual environment that has mutmut, and the packages of this one."""
    folder = WORK / "venv"
    if not (folder / "bin" / "mutmut").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        python = folder / "bin" / "python"
        more = shlex.split(os.environ.get("PIP_ARGS", ""))
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *more]
        subprocess.run([*pip, MUTMUT], check=True)
        (there,) = folder.glob("lib/python*/site-packages")
        (there / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def read_argued() -> dict[str, str]:
    """Change -> why no test can tell it from the original."""
    return dict(_pairs(ARGUED.read_text()))


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines:
            yield lines[0], " ".join(lines[1:])


if __name__ == "__main__":
    sys.exit(main())
