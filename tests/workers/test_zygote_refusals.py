"""When a worker is not forked from the warm process, without one: a part of a second."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.executor.launchers import local
from lamina.workers import zygote

ROOT = Path(__file__).resolve().parents[2]


def test_an_order_that_nobody_waits_for_is_not_forked() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        assert zygote.why_abandoned(ours) == ""
        theirs.close()
        assert zygote.why_abandoned(ours)


def test_a_system_that_shows_no_ends_of_processes_is_no_place_to_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", lacking)
    assert "Function not implemented" in zygote.why_not_fork()


def test_libraries_in_a_folder_with_a_space_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "/home/a b/lib/libgomp.so.1"
    line = f"7f0000000000-7f0000001000 r--p 00000000 08:01 42 {' ' * 20}{where}\n7f000-7f100 rw-p 00000000 00:00 0\n"
    monkeypatch.setattr(zygote, "Path", lambda _: SimpleNamespace(read_text=lambda: line))
    monkeypatch.setattr(zygote.ctypes, "CDLL", lambda path: path)
    assert list(zygote.mapped_libraries("libgomp")) == [where]


@pytest.mark.parametrize("name", local.BINDING)
def test_where_openmp_binds_threads_workers_are_fresh(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lays them on cores as it is loaded: those of a forked worker would lie on the warm process's."""
    spawned: list[Any] = []
    monkeypatch.setenv(name, "true")
    monkeypatch.setattr(
        local,
        "spawn",
        lambda *a, **k: (
            spawned.append(a) or SimpleNamespace(pid=1, kill=lambda: None, wait=lambda *a: 0, poll=lambda: 0)
        ),
    )
    monkeypatch.setattr(local.START, "get", lambda *a: pytest.fail("the warm process was asked"))
    local.start("memory", 1, (0,))[1].close()
    assert len(spawned) == 1


def test_one_process_needs_no_native_module() -> None:
    gone = "import sys; sys.modules['lamina.netstack.host._netstack'] = None"
    code = f"{gone}; import lamina.api.frontend, lamina.workers.worker_process"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=110)
