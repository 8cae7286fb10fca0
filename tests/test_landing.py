"""tests/landing.py on folders of tests that fail once, always, late, by a crash, or with a leak."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("landing.py")
# ``first(name)`` is true for the first run of a test; the file "runs" has a line for each run.
HELP = """
import os, signal, subprocess, sys, threading
from pathlib import Path
import pytest

def first(name):
    runs = Path("runs")
    known = runs.exists() and name in runs.read_text().splitlines()
    with runs.open("a") as out:
        out.write(name + "\\n")
    return not known

def test_good():
    first("good")
"""
FLAKY = """
def test_flaky():
    print("seen at the first run")
    assert not first("flaky")
"""


class Landed:
    """The program's output, and how often each test ran."""

    def __init__(self, folder: Path, done: subprocess.CompletedProcess[str]) -> None:
        self.status, self.text = done.returncode, done.stdout
        self.lines = done.stdout.splitlines()
        self.counts = self.lines[-1]
        self.flaky = [line.removeprefix("flaky: ") for line in self.lines if line.startswith("flaky: ")]
        self.runs = Counter((folder / "runs").read_text().splitlines())


def started(folder: Path, *arguments: str, limit_s: float | None = None) -> subprocess.Popen[str]:
    limit = f"landing.LIMIT_S = {limit_s}; " if limit_s else ""
    code = f"import sys; sys.path.insert(0, 'tests'); import landing; {limit}sys.exit(landing.main(sys.argv[1:]))"
    program = ["-c", code] if limit_s else ["tests/landing.py"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}  # half the start
    return subprocess.Popen(
        [sys.executable, *program, *arguments], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def land(folder: Path, *arguments: str, limit_s: float | None = None) -> Landed:
    process = started(folder, *arguments, limit_s=limit_s)
    output, _ = process.communicate(timeout=100)
    return Landed(folder, subprocess.CompletedProcess(process.args, process.returncode, output))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    shutil.copy(PROGRAM, tmp_path / "tests" / "landing.py")
    markers = "no_retry: never run again\n  slow: only with -m slow"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = -q -m 'not slow'\nmarkers =\n  {markers}\n")
    return tmp_path


def write(folder: Path, *tests: str, file: str = "test_sample.py") -> None:
    (folder / file).write_text(HELP + "".join(map(textwrap.dedent, tests)))


def test_a_flaky_test_is_named_and_counts_as_passed(folder: Path) -> None:
    write(folder, FLAKY)
    landed = land(folder)
    assert (landed.status, landed.counts) == (0, "2 passed, 0 failed")
    assert landed.flaky == ["test_sample.py::test_flaky"]
    assert landed.runs == {"good": 1, "flaky": 2}
    behind = landed.lines[landed.lines.index("flaky: test_sample.py::test_flaky") :]
    assert "    seen at the first run" in behind  # and the traceback
    assert any(re.match(r"    E +.*assert not True", line) for line in behind)


def test_a_test_that_fails_again_fails(folder: Path) -> None:
    write(folder, FLAKY, "def test_wrong():\n    first('wrong')\n    assert 1 == 2\n")
    landed = land(folder)
    assert (landed.status, landed.counts) == (1, "2 passed, 1 failed")
    assert landed.flaky == ["test_sample.py::test_flaky"]
    assert "failed again, alone: test_sample.py::test_wrong" in landed.lines
    assert landed.runs == {"good": 1, "flaky": 2, "wrong": 2}


@pytest.mark.long
def test_without_a_failure_nothing_is_run_again(folder: Path) -> None:
    write(folder, "@pytest.mark.skip\ndef test_skipped(): ...\n")
    landed = land(folder)
    assert (landed.status, landed.counts) == (0, "1 passed, 0 failed, 1 skipped")
    assert landed.runs == {"good": 1}


FINAL = {
    "marked": ("it is marked no_retry", "@pytest.mark.no_retry\ndef test_final():\n    assert not first('final')"),
    "late": (
        "it timed out",
        "@pytest.mark.timeout(0.5)\ndef test_final():\n    assert not first('final') or threading.Event().wait()",
    ),
    "late program": (
        "it timed out",
        "def test_final():\n    assert not first('final') or subprocess.run(['sleep', '60'], timeout=0.1)",
    ),
    "leak": (
        "it failed after its end, as a leak does",
        "@pytest.fixture\ndef clean():\n    yield\n    assert not first('final')\n\ndef test_final(clean): ...",
    ),
}  # fmt: skip


@pytest.mark.long(but=["marked"])
@pytest.mark.parametrize("kind", FINAL)
def test_a_wrong_token_a_hang_or_a_leak_is_never_retried(folder: Path, kind: str) -> None:
    reason, test = FINAL[kind]
    write(folder, FLAKY, test)
    landed = land(folder)
    assert (landed.status, landed.counts) == (1, "2 passed, 1 failed")
    assert f"not run again, since {reason}: test_sample.py::test_final" in landed.lines
    assert landed.runs == {"good": 1, "flaky": 2, "final": 1}
    assert landed.flaky == ["test_sample.py::test_flaky"]


@pytest.mark.long
def test_tests_of_exact_results_are_never_retried() -> None:
    folders = [f"tests/{name}" for name in ("e2e/devices", "e2e/kv", "e2e/models", "ops/attention", "api/wrapped")]
    command = [sys.executable, "-m", "pytest", "--collect-only", *folders, "-m", "not no_retry"]
    done = subprocess.run(command, cwd=PROGRAM.parents[1], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    assert " deselected" in done.stdout


DEATH = "def test_death():\n    if first('death'):\n        os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.long
def test_a_crash_of_a_process_that_runs_tests_is_never_retried(folder: Path) -> None:
    write(folder, DEATH, FLAKY)
    landed = land(folder, "-n", "2")
    assert (landed.status, landed.counts) == (1, "2 passed, 1 failed")
    assert "not run again, since the process that ran it crashed: test_sample.py::test_death" in landed.lines
    assert landed.runs == {"good": 1, "flaky": 2, "death": 1}


@pytest.mark.long
def test_a_crash_of_pytest_counts_as_a_failure(folder: Path) -> None:
    write(folder, DEATH)
    landed = land(folder)
    assert (landed.status, landed.counts) == (1, "1 passed, 1 failed")
    assert "pytest stopped before its end, with status -9" in landed.lines
    assert landed.runs == {"good": 1, "death": 1}


@pytest.mark.long
@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one process", "two"])
def test_an_error_of_collection_is_never_retried(folder: Path, processes: tuple[str, ...]) -> None:
    write(folder, FLAKY)
    write(folder, "assert 1 == 2", file="test_import.py")
    landed = land(folder, "--continue-on-collection-errors", *processes)
    assert (landed.status, landed.counts) == (1, "1 passed, 2 failed")
    assert "test_import.py: error of collection" in landed.lines
    assert landed.runs == {"good": 1, "flaky": 1}


SIX = "@pytest.mark.parametrize('n', range({}))\ndef test_often(n):\n    assert not first(f'often {{n}}')\n"


@pytest.mark.long
@pytest.mark.parametrize(("many", "status", "counts"), [(5, 0, "6 passed, 0 failed"), (6, 1, "1 passed, 6 failed")])
def test_five_flaky_tests_are_allowed_and_no_sixth(folder: Path, many: int, status: int, counts: str) -> None:
    write(folder, SIX.format(many))
    landed = land(folder)
    assert (landed.status, landed.counts) == (status, counts)
    assert landed.flaky == [f"test_sample.py::test_often[{n}]" for n in range(many)]


@pytest.mark.long
def test_flaky_tests_of_all_runs_count_together(folder: Path) -> None:
    write(folder, SIX.format(3))
    write(folder, SIX.format(3).replace("often {n}", "other {n}"), file="test_other.py")
    landed = land(folder, "test_sample.py", "--and", "test_other.py", "-n", "2")
    assert (landed.status, landed.counts) == (1, "2 passed, 6 failed")
    assert len(landed.flaky) == 6


@pytest.mark.long
def test_a_broken_build_is_not_run_again(folder: Path) -> None:
    write(folder, SIX.format(21))
    landed = land(folder)
    assert (landed.status, landed.counts) == (1, "1 passed, 21 failed")
    assert landed.runs.most_common(1)[0][1] == 1


@pytest.mark.long
def test_tests_that_did_not_run_are_a_failure(folder: Path) -> None:
    write(folder, FLAKY, "def test_last():\n    first('last')\n")
    landed = land(folder, "-x")
    assert (landed.status, landed.counts) == (1, "1 passed, 2 failed")
    assert "1 of 3 tests did not run" in landed.lines


@pytest.mark.long
def test_a_run_without_tests_is_a_failure(folder: Path) -> None:
    write(folder)
    landed = land(folder, "--and", "-m", "slow")
    assert (landed.status, landed.counts) == (1, "1 passed, 1 failed")
    assert "pytest ended with status 5" in landed.lines


@pytest.mark.long
def test_a_slow_test_is_found_at_its_second_run(folder: Path) -> None:
    write(folder, "@pytest.mark.slow", FLAKY)
    landed = land(folder, "-m", "slow")
    assert (landed.status, landed.counts) == (0, "1 passed, 0 failed")


@pytest.mark.long
def test_all_runs_end_at_the_time_limit(folder: Path) -> None:
    write(folder, "def test_forever():\n    first('forever')\n    threading.Event().wait()\n")
    landed = land(folder, limit_s=5)
    assert landed.status == 1
    assert landed.counts == "1 passed, 2 failed"  # the test that was interrupted and the run
    assert any("were stopped" in line for line in landed.lines)
    assert landed.runs == {"good": 1, "forever": 1}


@pytest.mark.long
def test_who_ends_it_ends_pytest(folder: Path) -> None:
    code = "Path('pid').write_text(str(os.getpid()))\n    threading.Event().wait()"
    write(folder, f"def test_forever():\n    {code}\n")
    os.mkfifo(folder / "pid")
    process = started(folder)
    pytest_process = (folder / "pid").read_text()
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + 15
    assert not Path("/proc", pytest_process).exists()
