"""Real clients, each in an environment of its own under build/clients, against one real server.

pytest -m slow tests/clients        # PIP_ARGS passes options to pip; LAMINA_CLIENTS names another folder
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import Running

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ("openai-python", "openai-node", "langchain-openai", "litellm", "llm", "lm-eval", "guidellm", "aiperf",
           "vllm bench", "transformers chat", "schemathesis", "llama-index", "instructor", "pydantic-ai",
           "ai-sdk", "aider")  # fmt: skip
INSTALL_S, RUN_S = 1500, 900
_tried: set[str] = set()
_ran: set[str] = set()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("server") / "log"
    running = Running(log, "--dtype=float32", "--served-model-name=tiny", "--max-num-seqs=16")
    yield running
    running.kill()


@pytest.fixture(scope="session")
def environment() -> Callable[..., Path]:
    """(name, requirements, without) -> the folder of programs of a virtual environment that has them, and not those."""

    def make(name: str, *requirements: str, without: tuple[str, ...] = ()) -> Path:
        folder = Path(os.environ.get("LAMINA_CLIENTS", ROOT / "build" / "clients")) / name
        done = folder / ".ready"
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            more = shlex.split(os.environ.get("PIP_ARGS", ""))
            run = subprocess.run(
                [*pip, *more, *requirements], capture_output=True, text=True, timeout=INSTALL_S, check=False
            )
            if run.returncode:
                pytest.skip(f"{' '.join(requirements)} cannot be installed: {run.stderr.strip()[-300:]}")
            if without:
                drop = [*pip[:3], "uninstall", "--quiet", "--yes", *without]
                subprocess.run(drop, capture_output=True, timeout=INSTALL_S, check=True)
            done.touch()
        return folder / "bin"

    return make


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """(command, timeout_s, variables) -> what it printed. It runs in a folder of its own, without a hub and without
    telemetry.
    """

    def call(*command: object, timeout_s: float = RUN_S, **variables: str) -> str:
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "TMPDIR")}
        quiet = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "NO_PROXY": "*"}
        done = subprocess.run(
            [str(c) for c in command], cwd=tmp_path, env={**kept, **quiet, **variables}, capture_output=True,
            text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return call


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[str]:
    """Counts the client of a test, by its marker ``client(name)``, once it has passed."""
    name = request.node.get_closest_marker("client").args[0]
    assert name in CLIENTS
    _tried.add(name)
    yield name
    if getattr(request.node, "passed", False):
        _ran.add(name)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call" and report.passed:
        item.passed = True  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "client(name): the client that a test runs")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _tried:
        return
    missing = ", ".join(c for c in CLIENTS if c not in _ran)
    terminalreporter.write_line(f"{len(_ran)} of {len(CLIENTS)} clients ran" + (f"; not: {missing}" if missing else ""))
