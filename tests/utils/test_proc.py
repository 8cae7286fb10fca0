"""The kernel's facts about processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lamina.utils import proc
from lamina.utils.proc import cpu_ns_if_stopped, descendants_of


def test_what_any_thread_has_started_is_seen_and_what_that_has() -> None:
    command = ["sh", "-c", "sh -c 'echo $$; read line; :'; :"]
    with ThreadPoolExecutor(1) as thread:
        started = thread.submit(subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with started.result() as child:
            grandchild = int(child.stdout.readline())
            assert {child.pid, grandchild} <= {*descendants_of(os.getpid())}
            child.communicate(b"\n")


@pytest.mark.parametrize("looks", [[{2}, {1, 2}, {1, 3}, {3}], [set(), {1, 2, 3}, {1}]])
def test_what_one_look_leaves_out_is_seen_by_the_next(looks: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "seen_now", lambda pid: looks.pop(0))
    assert descendants_of(1) == [1, 2, 3]
    assert not looks


@pytest.mark.parametrize("work", ["ctypes.PyDLL(None).sleep(600)", "sum(range(10 ** 15))"], ids=["sleeps", "computes"])
def test_one_that_lets_no_other_thread_run_does_not_stand_still_but_by_a_signal(work: str) -> None:
    """It holds the interpreter's lock, so that no thread of it answers: it may be slow for as long as it likes."""
    command = [sys.executable, "-c", f"import ctypes; print(flush=True); {work}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert cpu_ns_if_stopped(child.pid) is None
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        spent = cpu_ns_if_stopped(child.pid)
        assert spent is not None
        assert cpu_ns_if_stopped(child.pid) == spent, "and does not run"
        child.send_signal(signal.SIGCONT)
        os.waitpid(child.pid, os.WCONTINUED)
        assert cpu_ns_if_stopped(child.pid) is None
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert cpu_ns_if_stopped(child.pid) > spent, "it has run in between, however short"
        child.kill()
