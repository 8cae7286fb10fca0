"""CPU seconds of each test file, with those of all processes under test: ``python -m pytest -p
tests.support.cpu_seconds``.

Wall time says little on a machine that others use, and a test's own duration leaves out the processes that it starts.
How long a test waited, its wall time without its CPU time, says something on an idle machine alone.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

TICK = os.sysconf("SC_CLK_TCK")
SHOWN = 25
LINES = "LAMINA_TEST_CPU"  # environment variable: a file that gets a JSON line for each test


def cpu_seconds(process: int) -> float:
    """Returns the CPU seconds of ``process``, its children that have ended, and its descendants that run; 0 where it
    has ended by now.
    """
    folder, children = Path(f"/proc/{process}"), list[str]()
    try:
        fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        for thread in os.listdir(folder / "task"):
            with suppress(OSError):  # it has ended meanwhile
                children += (folder / "task" / thread / "children").read_text().split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK + sum(cpu_seconds(int(child)) for child in children)


class CpuSeconds:
    """The CPU seconds of each test, by the reports of this process or of all that run tests for it."""

    def __init__(self) -> None:
        self._before = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._wall: dict[str, float] = defaultdict(float)

    def pytest_collection_finish(self) -> None:
        self._before = cpu_seconds(os.getpid())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """The report says what has been used since the last one."""
        report = yield
        now = cpu_seconds(os.getpid())
        report.cpu_seconds, self._before = now - self._before, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += getattr(report, "cpu_seconds", 0.0)
        self._wall[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files, waits = defaultdict[str, list[float]](list), defaultdict[str, float](float)
        for test, seconds in self._seconds.items():
            files[test.partition("::")[0]].append(seconds)
            waits[test.partition("::")[0]] += max(0.0, self._wall[test] - seconds)
        total, here, show = sum(self._seconds.values()), cpu_seconds(os.getpid()), terminalreporter.write_line
        show(f"CPU seconds: {total:.1f} of {len(self._seconds)} tests, {here:.1f} of all here")
        for file, each in sorted(files.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
            show(f"{sum(each):8.1f} {len(each):5} tests, most {max(each):5.1f}, waited {waits[file]:5.1f} s  {file}")
        if path := os.environ.get(LINES):
            with Path(path).open("a") as lines:
                lines.writelines(
                    json.dumps({"test": t, "cpu_s": round(s, 3), "wall_s": round(self._wall[t], 3)}) + "\n"
                    for t, s in self._seconds.items()
                )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds())
