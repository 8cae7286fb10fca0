"""Runs pytest as CI does: a test that fails is run once more, alone, in a process of its own.

python tests/landing.py PYTEST_ARGUMENTS [--and PYTEST_ARGUMENTS ...]

A test that then passes is printed as ``flaky: NAME``, with the output of its failure, and counts as passed. Five
flaky tests are allowed; more count as failed. A failure is final if the test is marked ``no_retry``, if it timed out or
crashed its process, or if it failed after its end, as a leak does. Errors of collection are final, too.
The last line has the counts of all runs, and the exit status is 0 where none failed.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAKY = 5  # tests that may pass at their second run
RETRIED = 20  # more failures than these are a broken build; none of them is run again
LIMIT_S = 75 * 60.0  # for all runs together: CI has 90 minutes, and lints before
INTERRUPTED_S = 60.0  # pytest may use them to end its fixtures
LATE = re.compile(r"from pytest-timeout\.|^E\s+subprocess\.TimeoutExpired", re.MULTILINE)
INDENT = "    "  # a summary of pytest in indented output is not the summary of this program
WORST = ("passed", "skipped", "failed")


class Recorder:
    """Appends a JSON line for each report, so that a run that is killed leaves what it had."""

    def __init__(self, path: Path) -> None:
        self._path, self._selected = path, 0

    def _write(self, **line: Any) -> None:
        with self._path.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup" and report.passed:
            return  # the test has no outcome yet
        text = "\n".join([report.longreprtext, *(f"--- {title} ---\n{content}" for title, content in report.sections)])
        final = why_never_retried(report) if report.failed else ""
        self._write(test=report.nodeid, outcome=report.outcome, final=final, text=text if report.failed else "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(broken=f"{report.nodeid or 'the tests'}: error of collection")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._selected = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._selected = len(ids)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(status=int(exitstatus), selected=self._selected)


def why_never_retried(report: pytest.TestReport) -> str:
    """Names the reason why a failure is final; empty if the test may be run again."""
    if report.when not in ("setup", "call", "teardown"):  # xdist reports it in the name of a process that is gone
        return "the process that ran it crashed"
    if LATE.search(report.longreprtext):
        return "it timed out"
    if report.when == "teardown":
        return "it failed after its end, as a leak does"
    return "it is marked no_retry" if "no_retry" in report.keywords else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="a file that gets a JSON line for each report")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("record")))


@dataclass
class Test:
    outcome: str = "passed"
    final: str = ""  # the reason why a failure is not retried
    text: str = ""  # of all its failures, with the captured output


@dataclass
class Run:
    """The outcome of one pytest process."""

    tests: dict[str, Test] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # failures of the run itself

    def failed(self) -> dict[str, Test]:
        return {name: test for name, test in self.tests.items() if test.outcome == "failed"}


def run_pytest(arguments: list[str], deadline: float, log: Path | None = None) -> Run:
    """Runs pytest in the project's folder until ``deadline``; its output goes to ``log`` or is passed through."""
    with tempfile.TemporaryDirectory(prefix="landing-") as folder, (log or Path("/dev/null")).open("w") as out:
        record = Path(folder) / "record"
        command = [sys.executable, "-m", "pytest", "-p", "tests.landing", f"--record={record}", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=out if log else None, stderr=out if log else None)
        late = not ended(process, deadline - time.monotonic())
        lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    run = read(lines, process.returncode)
    if late:
        run.broken.append(f"the tests took longer than {LIMIT_S / 60:.0f} minutes and were stopped")
    return run


def ended(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Waits for a process. One that is late, or that this process leaves, is interrupted, then killed."""
    try:
        process.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(INTERRUPTED_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return True


def read(lines: list[dict[str, Any]], status: int) -> Run:
    broken = dict.fromkeys(line["broken"] for line in lines if "broken" in line)  # each process of xdist reports it
    run = Run(broken=list(broken))
    for line in (line for line in lines if "test" in line):
        test = run.tests.setdefault(line["test"], Test())
        test.outcome = max(test.outcome, line["outcome"], key=WORST.index)
        test.final, test.text = test.final or line["final"], test.text + line["text"]
    selected = next((line["selected"] for line in lines if "status" in line), None)
    if selected is None:
        run.broken.append(f"pytest stopped before its end, with status {status}")
    elif len(run.tests) < selected:
        run.broken.append(f"{selected - len(run.tests)} of {selected} tests did not run")
    elif status != (1 if run.failed() else 0) and not run.broken:
        run.broken.append(f"pytest ended with status {status}")
    return run


def flaky(run: Run, deadline: float) -> Iterator[str]:
    """Runs failed tests again and yields the names of those that pass."""
    say(*(f"not run again, since {test.final}: {name}" for name, test in run.failed().items() if test.final))
    again = {name: test for name, test in run.failed().items() if not test.final}
    if run.broken or len(again) > RETRIED:
        reason = run.broken[0] if run.broken else f"more than {RETRIED} are a broken build"
        say(*(f"not run again, since {reason}: {name}" for name in again))
        return
    for name, test in again.items():
        with tempfile.NamedTemporaryFile(prefix="landing-") as log:
            second = run_pytest(["-m", "", name], deadline, Path(log.name))
            output = Path(log.name).read_text(errors="replace")
        if not second.broken and [t.outcome for t in second.tests.values()] == ["passed"]:
            say(f"flaky: {name}", textwrap.indent(test.text, INDENT))
            yield name
        else:
            say(f"failed again, alone: {name}", textwrap.indent(output, INDENT))


def say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    deadline, counts, passed_alone, suites = time.monotonic() + LIMIT_S, Counter[str](), list[str](), [list[str]()]
    for argument in arguments:
        if argument == "--and":
            suites.append([])
        else:
            suites[-1].append(argument)
    for suite in suites:
        run = run_pytest(suite, deadline)
        counts.update(test.outcome for test in run.tests.values())
        counts["failed"] += len(run.broken)
        say("", *run.broken)
        passed_alone += flaky(run, deadline)
    if len(passed_alone) > FLAKY:
        say(f"{len(passed_alone)} tests are flaky, and more than {FLAKY} count as failed")
    else:
        counts["failed"] -= len(passed_alone)
        counts["passed"] += len(passed_alone)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    say(f"{counts['passed']} passed, {counts['failed']} failed{skipped}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
