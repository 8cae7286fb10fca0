"""With --log-json all that a server and its processes write to stderr is a JSON object a line.

Covers: lamina/observe/log_lines.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from noisy_transport import NATIVE
from running import MODEL, ROOT, Running, eventually

from lamina.server.journal.journal import Journal

SOON_S = 240.0
KEYS = {"time", "level", "logger", "message", "process", "pid", "request_id"}
WORKERS = ("memory-0", "memory-1", "compute-0")
Line = dict[str, Any]


def lines_of(log: Path) -> list[Line]:
    """All whole lines, each of which must be a JSON object."""
    lines = [json.loads(line) for line in log.read_text().rpartition("\n")[0].splitlines()]
    assert [line for line in lines if not line.keys() >= KEYS] == []
    return lines


def pids(lines: list[Line]) -> dict[str, int]:
    """The workers of the last epoch."""
    *_, text = [x["message"] for x in lines if " is pid " in x["message"]]
    return {name: int(pid) for name, pid in re.findall(r"(\S+) is pid (\d+)", text)}


def torn_journal(folder: Path) -> Path:
    """A journal whose last bytes are no whole record: a server says so before anything else."""
    Journal(str(folder), MODEL, 1 << 20).close()
    (segment,) = [path for path in folder.iterdir() if path.stat().st_size > 8 and "segment" in path.name]
    with segment.open("ab") as file:
        file.write(b"\x07\0\0")
    return folder


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_lines_of_a_start_a_crash_and_a_stop(tmp_path: Path) -> None:
    flags = (
        "--log-json", "--memory-workers=2", "--dtype=float32", "--transport=noisy", "--api-key=key",
        "--enable-server-load-tracking", f"--journal={torn_journal(tmp_path / 'journal')}",
    )  # fmt: skip
    variables = {"LAMINA_TRANSPORTS": "noisy=noisy_transport"}
    server = Running(tmp_path / "log", *flags, env=variables, fresh=True)
    try:
        lines = lines_of(server.log)
        first = pids(lines)
        assert sorted(first) == sorted(WORKERS)
        ask(server)
        crash(server, first["memory-1"], "memory")
        assert eventually(lambda: pids(lines_of(server.log)) != first, SOON_S)
        ask(server)
        engine = next(x["pid"] for x in lines if x["process"] == "engine")
        crash(server, engine, "engine")
        ask(server)
        server.signal(signal.SIGTERM)
        assert server.wait(SOON_S) == 0
    finally:
        server.kill()
    noises_of(lines_of(server.log), first)


def ask(server: Running) -> None:
    body = {"prompt": "import os\n", "max_tokens": 2}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"Authorization": "Bearer key"}, timeout=SOON_S
    )
    assert answer.status_code == 200, answer.text


def crash(server: Running, pid: int, process: str) -> None:
    """Has a process crash: one record has its signal, and the lines that it wrote last."""

    def records() -> list[Line]:
        return [x for x in lines_of(server.log) if x.get("signal") and x["pid"] == pid]

    os.kill(pid, signal.SIGSEGV)
    assert eventually(records, SOON_S), server.log.read_text()
    (record,) = records()
    assert (record["process"], record["signal"], record["level"]) == (process, "SIGSEGV", "ERROR")
    assert f"(pid {pid}) was killed by SIGSEGV; its last lines: " in record["message"]
    assert "Fatal Python error: Segmentation fault" in record["message"]


def noises_of(lines: list[Line], workers: dict[str, int]) -> None:
    """Looks for all lines of each worker, and those of the server from before it served."""
    said = [x["message"] for x in lines if x["process"] == "server"]
    for words in ("is ignored: GET /load always counts", "--api-key: other users", "were not written whole", "ending"):
        assert any(words in text for text in said), words
    assert {"server", "engine", "memory", "compute"} <= {x["process"] for x in lines}
    for name, pid in workers.items():
        own = [x for x in lines if x["pid"] == pid and x["process"] == name.partition("-")[0]]
        texts = [x["message"] for x in own]
        assert any("an old habit" in text for text in texts), name
        assert {"theirs", "%d ('no number',)", NATIVE} <= {*texts}
        errors = {x["exception"].splitlines()[-1] for x in own if x["message"] == "uncaught exception"}
        assert errors == {"ZeroDivisionError: division by zero", "ValueError: in the end"}


@pytest.mark.parametrize("flag", ["--no-such-flag", "--max-num-seqs=0"])
def test_bad_input_is_one_object(flag: str) -> None:
    command = [sys.executable, "-m", "lamina.cli.launch", "serve", MODEL, "--log-json", flag]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, line["level"], flag.partition("=")[0] in line["message"]) == (2, "ERROR", True)
