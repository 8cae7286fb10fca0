"""Kill things: a clear error soon, no hang, and no process or memory is left."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forked import ForkedProgram

from lamina import LLM, SamplingParams
from lamina.ops import attention
from lamina.ops.attention.reference import ReferenceAttention
from lamina.protocol.executor import WorkerError

pytestmark = pytest.mark.usefixtures("no_child_left")
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
TOLD_S = 20.0  # on a busy machine; five seconds on one of its own
ROOT = Path(__file__).resolve().parents[3]


# How each transport notices a death is the contract suite's; here are all workers over one, and one over another.
@pytest.mark.long(but=["memory-0-options0"])
@pytest.mark.parametrize(
    ("victim", "options"),
    [
        ("memory-0", {}),
        ("memory-1", {}),
        ("memory-1", {"transport": "tcp"}),
        ("compute-0", {}),
        ("compute-1", {"pipeline": 3}),
        ("compute-0", {"tensor_parallel_size": 2}),
        ("compute-1", {"tensor_parallel_size": 2}),
        ("prefill-0", {"prefill_workers": 1}),
    ],
)
def test_kill_of_a_worker_is_told_soon(victim: str, options: dict[str, Any], llama_path: Path) -> None:
    llm = LLM(str(llama_path), memory_workers=2, max_recoveries=0, **options)
    pids = llm.pools.pids
    stream = llm.stream([[5, 6, 7]], LONG)
    next(stream)
    os.kill(pids[victim], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=victim.replace("-", " worker ") + r" .*killed by SIGKILL"):
        for _ in stream:
            pass
    assert time.monotonic() - start < TOLD_S
    assert all(gone(pid) for pid in pids.values())
    with pytest.raises(ValueError, match="closed"):
        llm.generate([[3]])


@pytest.mark.long(but=["memory-0-options0-memory worker|shm://"])
@pytest.mark.parametrize(
    ("victim", "options", "words"),
    [("memory-0", {}, "memory worker|shm://"), ("prefill-0", {"prefill_workers": 1}, "prefill worker 0 .* a chunk")],
)
def test_a_stopped_worker_counts_as_hung_at_the_deadline(
    victim: str, options: dict[str, int], words: str, llama_path: Path
) -> None:
    """Also where the others go on: a second prompt comes when the prefill worker has stopped."""
    llm = LLM(str(llama_path), memory_workers=1, step_timeout_s=1.0, max_recoveries=0, **options)
    pids = llm.pools.pids
    stream = llm.stream([[5, 6, 7]], LONG)
    next(stream)
    os.kill(pids[victim], signal.SIGSTOP)
    llm.engine.add([5, 6, 7], LONG)
    start = time.monotonic()

    def go_on() -> None:
        for _ in stream:
            pass
        llm.generate([[5, 6, 7]], LONG)  # a fast machine is through with the first prompt before the deadline

    with pytest.raises(WorkerError, match=words):
        go_on()
    assert time.monotonic() - start < TOLD_S
    assert all(gone(pid) for pid in pids.values())


class Broken(ReferenceAttention):
    """An attention that fails."""

    def finish(self, *args: Any) -> None:
        raise RuntimeError("out of order")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_worker_that_failed_is_named_not_the_one_that_missed_it(
    llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("lamina.ops.attention.broken")
    module.open_backend = lambda device, dtype, store_dtype: Broken(device)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(attention.BACKENDS, "broken", "broken")
    monkeypatch.setattr(Broken, "__module__", module.__name__)  # its name is that of its module
    llm = LLM(str(llama_path), transport="loopback", attention="broken")
    with pytest.raises(WorkerError, match="memory worker: RuntimeError: out of order"):
        llm.generate([[5, 6, 7]])


DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
from lamina import LLM, SamplingParams
llm = LLM(sys.argv[1], memory_workers=2, transport=sys.argv[2])
stream = llm.stream([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
next(stream)
print(*llm.pools.pids.values(), flush=True)
for _ in stream:
    pass
for _ in range(1000):
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
"""


@pytest.mark.no_retry
@pytest.mark.parametrize(
    ("how", "scheme"),
    [(signal.SIGKILL, "shm"), (signal.SIGKILL, "tcp"), (signal.SIGINT, "shm"), (signal.SIGTERM, "shm")],
)
def test_nothing_is_left_when_the_driver_dies(how: signal.Signals, scheme: str, llama_path: Path) -> None:
    before = shared_memory()
    driver = ForkedProgram([str(llama_path), scheme], code=DRIVER)
    assert driver.stdout is not None
    try:
        pids = [int(p) for p in driver.stdout.readline().split()]
        assert len(pids) == 3
        driver.send_signal(how)
        driver.wait(timeout=20)
    finally:  # also where a busy machine starts it too late for this test: it has an hour of work
        driver.kill()
        driver.wait()
    deadline = time.monotonic() + TOLD_S
    for pid in pids:
        assert gone(pid, deadline - time.monotonic()), "worker processes outlive their driver"
    driver.stdout.close()
    assert shared_memory() == before


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize(
    "serve",
    [
        "lamina.workers.compute.main:serve_compute",
        "lamina.workers.memory.main:serve_memory",
        "lamina.workers.prefill.main:serve_prefill",
    ],
)
def test_a_worker_goes_with_its_driver_also_while_it_imports(serve: str) -> None:
    ours, theirs = socket.socketpair()
    worker = subprocess.Popen(
        [sys.executable, "-m", "lamina.workers", serve, "--control-fd", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=ROOT,
    )
    theirs.close()
    ours.close()
    worker.wait(30)


def gone(pid: int, timeout_s: float = 0.0) -> bool:
    """Returns whether the process has ended within so many seconds, which are slept: workers need the cores."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], max(0.0, timeout_s))[0])
    finally:
        os.close(process)


def shared_memory() -> set[str]:
    """The files of shared memory, but those of tests of stand-ins for NCCL, which may run at the same time."""
    return {p.name for p in Path("/dev/shm").iterdir() if not p.name.startswith("fake-nccl-")}
