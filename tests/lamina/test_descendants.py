"""What the kernel says of processes."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from lamina import processes
from lamina.processes import descendants_of


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
    monkeypatch.setattr(processes, "_seen_now", lambda pid: looks.pop(0))
    assert descendants_of(1) == [1, 2, 3]
    assert not looks
