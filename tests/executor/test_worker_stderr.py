"""The stderr of workers reaches their parent as JSON, and neither waits for the other.

Covers: lamina/executor/launchers/worker_stderr.py.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.executor.launchers import local, zygote_client
from lamina.executor.launchers.local import Process
from lamina.executor.launchers.zygote_client import ZygoteManager
from lamina.observe.log_lines import log_json

SOON_S = 30.0
FLOOD_BYTES = 8 << 20
WORKER = f"""
import ctypes, json, os, sys
from contextlib import suppress

def serve_noise(sock):
    sock.sendall(b"1")
    match sock.recv(16):
        case b"abort":
            os.write(2, b'{{"not": "an object"\\n\\xff\\n')
            (libc := ctypes.CDLL(None)).malloc.restype = ctypes.c_void_p
            twice = ctypes.c_void_p(libc.malloc(64))
            libc.free(twice)
            libc.free(twice)
        case b"flood":
            for _ in range({FLOOD_BYTES >> 16}):
                with suppress(BlockingIOError):
                    os.write(2, b"x" * 65535 + b"\\n")
            sock.sendall(b"2")
        case b"lines":
            os.write(2, b'{{"whole": 1}}\\nno JSON\\n{{"whole": 2}}\\nan open ')
            os.write(2, b"line")
"""


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The stderr of this process, which logs JSON."""
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for module, hook in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(module, hook, getattr(module, hook))
    log_json("parent")
    yield sys.stderr  # type: ignore[misc]
    root.handlers = before
    logging.captureWarnings(False)


@pytest.fixture(params=["forked", "fresh"])
def start(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logged: io.StringIO
) -> Iterator[Callable[[], tuple[Process, socket.socket]]]:
    """Starts a worker as launchers do, which has imported next to nothing."""
    (tmp_path / "noise.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(local.ROLES, "noise", ("noise", "serve_noise"))
    monkeypatch.setattr(zygote_client, "MODULES", ("json",))
    made = ZygoteManager()
    if request.param == "fresh":
        monkeypatch.setenv(local.BINDING[0], "true")
    monkeypatch.setattr(local, "START", made)

    def begin() -> tuple[Process, socket.socket]:
        worker = local.start("noise", 1, ())
        worker[1].settimeout(SOON_S)
        assert worker[1].recv(1) == b"1"
        return worker

    yield begin
    made.close()


def ended(worker: tuple[Process, socket.socket], order: bytes) -> int | None:
    """Its exit status, after an order."""
    worker[1].sendall(order)
    assert worker[0].has_ended(SOON_S)
    worker[1].close()
    return worker[0].exit_status


def records(logged: io.StringIO, pid: int) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, logged.getvalue().splitlines()) if line.get("pid", pid) == pid]


def wait_until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < limit
        select.select([], [], [], 0.01)


def test_a_crash_of_native_code_is_one_record(
    start: Callable[[], tuple[Process, socket.socket]], logged: io.StringIO
) -> None:
    worker = start()
    assert ended(worker, b"abort") == -6
    (record,) = records(logged, worker[0].pid)
    told = {name: record[name] for name in ("level", "process", "signal")}
    assert told == {"level": "ERROR", "process": "noise", "signal": "SIGABRT"}
    head, *lines = record["message"].split("its last lines: ")[1].splitlines()
    assert head == '{"not": "an object"'
    assert lines[0] == r"\xff"
    assert lines[1].startswith("free(): double free"), "glibc's own words"
    assert "Fatal Python error: Aborted" in lines


def test_lines_of_json_go_on_as_they_are_and_all_others_are_records(
    start: Callable[[], tuple[Process, socket.socket]], logged: io.StringIO
) -> None:
    worker = start()
    assert ended(worker, b"lines") == 0
    first, second, third, fourth = records(logged, worker[0].pid)
    assert (first, third) == ({"whole": 1}, {"whole": 2})
    assert [(x["message"], x["level"]) for x in (second, fourth)] == [
        ("no JSON", "WARNING"),
        ("an open line", "WARNING"),
    ]


def test_a_worker_writes_on_while_nobody_reads(
    start: Callable[[], tuple[Process, socket.socket]], logged: io.StringIO
) -> None:
    """The parent may be stopped, or wait for a terminal."""
    worker = start()
    handler = logging.getLogger().handlers[0]
    handler.acquire()
    try:
        worker[1].sendall(b"flood")
        assert worker[1].recv(1) == b"2"
    finally:
        handler.release()
    assert worker[0].has_ended(SOON_S)
    worker[1].close()
    assert 0 < len(logged.getvalue()) < FLOOD_BYTES


def test_no_thread_and_no_descriptor_is_left(
    start: Callable[[], tuple[Process, socket.socket]], logged: io.StringIO
) -> None:
    ended(start(), b"lines")  # the zygote's own pipe stays
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    workers = [start() for _ in range(4)]
    assert len(os.listdir("/proc/self/fd")) > files
    assert [ended(worker, b"lines") for worker in workers] == [0] * 4
    del workers
    wait_until(lambda: threading.active_count() <= threads)
