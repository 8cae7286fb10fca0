"""A pytest plugin: one JSON line for each test, with its outcome and, unless it passed, its cause in one line.

python -m pytest -p suite_report --suite-report FILE        SUITE_LEFT_OUT: a file of patterns, tests that are not run
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import known
import pytest

WORDS = 400


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite-report", type=Path, required=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = os.environ.get("SUITE_LEFT_OUT")
    if path:
        patterns = Path(path).read_text().splitlines()
        dropped = [i for i in items if any(known.matches(p, i.nodeid) for p in patterns)]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [i for i in items if i not in dropped]


def _cause(call: pytest.CallInfo[Any]) -> str:
    error = call.excinfo.value if call.excinfo is not None else ""
    text = " ".join(str(error).split())
    where = ""
    if call.excinfo is not None:
        entry = call.excinfo.traceback[-1]
        for e in call.excinfo.traceback:
            if "/tests/" in str(e.path):
                entry = e
        where = f" at {Path(entry.path).name}:{entry.lineno + 1}"
    return f"{type(error).__name__}: {text[:WORDS]}{where}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    if report.when != "call" and report.passed:
        return
    cause = ""
    if report.skipped:
        cause = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(getattr(report, "wasxfail", ""))
    elif report.failed:
        cause = _cause(call)
    _write(item.config, {"test": item.nodeid, "outcome": report.outcome, "when": report.when, "cause": cause})


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        said = " ".join(str(report.longrepr).split())[-WORDS:]
        _write(collector.config, {"test": report.nodeid, "outcome": "failed", "when": "collect", "cause": said})


def _write(config: pytest.Config, entry: dict[str, Any]) -> None:
    with config.getoption("suite_report").open("a") as out:
        out.write(json.dumps(entry) + "\n")
