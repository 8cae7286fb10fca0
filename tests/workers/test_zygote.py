"""A worker forked from the warm process is what a fresh one would be, and lives and ends as one.

Covers: lamina/executor/launchers/local.py, lamina/executor/launchers/process.py,
lamina/executor/launchers/zygote_client.py.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.executor.launchers import local, zygote_client
from lamina.executor.launchers.local import ProcessWorker, spawn
from lamina.executor.launchers.zygote_client import (
    ForkedProcess,
    OwnedZygote,
    ZygoteClient,
    ZygoteLostError,
    ZygoteManager,
)
from lamina.executor.stall_detector import STOPPED_S

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 60.0  # imports on a busy machine
CORES = sorted(os.sched_getaffinity(0))
ROLE = ("zygote_probe", "serve_probe")


@pytest.fixture(scope="module")
def start() -> Iterator[ZygoteManager]:
    """Starts a zygote for workers of this file, which are found in its folder."""
    made = ZygoteManager()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
        patch.setitem(local.ROLES, "probe", ROLE)
        patch.setattr(local, "START", made)
        yield made
        made.close()


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ZygoteManager]:
    """A warm process that imports next to nothing, for probes that say a line and end at a byte."""
    (tmp_path / "zygote_probe.py").write_text("def serve_probe(sock):\n    sock.sendall(b'{}\\n' + sock.recv(1))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(local.ROLES, "probe", ROLE)
    monkeypatch.setattr(zygote_client, "MODULES", ("json",))
    made = ZygoteManager()
    monkeypatch.setattr(local, "START", made)
    yield made
    made.close()


class Probe:
    """``told``: its facts; it ends with ``order``."""

    def __init__(self, threads: int = 0, on: tuple[int, ...] = (), *, fresh: bool = False) -> None:
        if fresh:
            more = ["--cores", ",".join(map(str, on))] if on else []
            self.sock, theirs = socket.socketpair()
            with theirs:
                self.process: local.Process = local.SpawnedProcess(spawn("probe", theirs, threads, more))
        else:
            self.process, self.sock = local.start("probe", threads, on)
        self.sock.settimeout(SOON_S)

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.sock.makefile().readline())
        return found

    def end(self, order: str = "0") -> int | None:
        self.sock.sendall(order.encode())
        assert self.process.has_ended(SOON_S)
        self.sock.close()
        return self.process.exit_status


ANOTHER = "another one takes its place, and imports first"
OWN = ["socket:"]  # apart from the control link, the copy that is watched for its end


def sockets(told: dict[str, Any]) -> list[str]:
    """Sockets and pipes of a probe, but for the first three descriptors and the control link."""
    return [name for name in told["files"] if name.startswith(("socket", "pipe"))]


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def wait_until(true: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < limit, what
        select.select([], [], [], 0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    ("threads", "on", "told"),
    [
        pytest.param(0, (), None, id="as the machine has"),
        pytest.param(0, (), "1", id="one by the environment"),
        pytest.param(0, (), "3,2", id="more than cores, by level"),
        pytest.param(3, (), "1", id="told"),
        pytest.param(1, (), None, id="one, told"),
        pytest.param(0, CORES[-1:], None, id="one core"),
        pytest.param(2, CORES[-1:], "1", id="one core, two threads"),
    ],
)
def test_a_forked_worker_is_what_a_fresh_one_is(
    threads: int, on: tuple[int, ...], told: str | None, start: ZygoteManager, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Also where the driver has changed since the warm process began."""
    start.get(local.worker_environment(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    monkeypatch.setenv("LAMINA_API_KEY", f"of {tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        probes = [Probe(threads, on, fresh=fresh) for fresh in (False, True)]
        assert isinstance(probes[0].process, ForkedProcess)
        forked, fresh = (probe.told() for probe in probes)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.umask(before)
    assert [probe.end() for probe in probes] == [0, 0]
    assert all(a != b for a, b in zip(forked.pop("own"), fresh.pop("own"), strict=True)), "seeds, and processes"
    assert forked.pop("threads") == fresh.pop("threads")
    assert forked == fresh
    assert fresh["directory"] == str(tmp_path)
    assert sockets(fresh) == OWN


def test_workers_find_the_package_where_their_driver_did() -> None:
    """It need not be installed, and another one may be."""
    first = local.worker_environment(0)["PYTHONPATH"].split(os.pathsep)[0]
    assert Path(first, "lamina", "__init__.py").samefile(ROOT / "lamina" / "__init__.py")


@pytest.mark.long
def test_two_forked_workers_draw_apart_and_share_nothing(start: ZygoteManager) -> None:
    first, second = Probe(), Probe()
    ours, other = first.told(), second.told()
    assert all(a != b for a, b in zip(ours["own"], other["own"], strict=True))
    assert ours["files"] == other["files"], "the second has nothing of the first"
    second.sock.close()
    assert second.process.has_ended(SOON_S), "nobody else holds the driver's end"
    assert first.end() == 0


@pytest.mark.parametrize(("order", "status"), [("7", 7), ("raise", 1), ("abort", -signal.SIGABRT)])
def test_how_a_worker_ends_is_told_and_harms_nobody(order: str, status: int, start: ZygoteManager) -> None:
    probe, beside = Probe(), Probe()
    before = start.pid
    probe.told()
    assert not probe.process.has_ended()
    assert probe.end(order) == status
    assert state(probe.process.pid) in ("", "Z")
    wait_until(lambda: not state(probe.process.pid), "nobody has reaped it")
    assert beside.told()
    assert beside.end("0") == 0
    assert start.pid == before


@pytest.mark.long(but=["forked"])
@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
def test_a_worker_that_is_done_ends_without_taking_its_modules_apart(
    fresh: bool, start: ZygoteManager, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its threads, exit functions and finalizers have their turn, and what it has printed is not lost."""
    probe = Probe(fresh=fresh)
    probe.told()
    probe.sock.sendall(b"return")
    assert probe.sock.makefile("rb").read() == b"thread;exit function;finalizer;"
    assert probe.process.has_ended(SOON_S)
    assert probe.process.exit_status == 0
    assert capfd.readouterr().out.endswith("an open line")


@pytest.mark.long
def test_workers_outlive_the_warm_process_and_the_next_one_has_a_new_one(
    start: ZygoteManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zygote_client, "MODULES", ("torch",))  # enough for probes, and sooner there
    probe = Probe()
    probe.told()
    before = start.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: state(before) in ("", "Z"), "it lives")
    assert not probe.process.has_ended()
    following = Probe()
    assert isinstance(following.process, ForkedProcess)
    assert start.pid != before
    assert [record.getMessage() for record in caplog.records] == [f"the zygote has ended: {ANOTHER}"]
    assert following.told()
    assert following.end() == 0
    assert probe.end() is None, "who could have told is gone"
    assert "ended" in local.exit_status_text(probe.process.exit_status)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_who_tells_all_of_a_service_to_end_ends_no_warm_process(
    how: signal.Signals, start: ZygoteManager, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends with its driver, whose requests may need a worker until then."""
    Probe().end()
    before = start.pid
    assert before is not None
    os.kill(before, how)
    probe = Probe()
    assert isinstance(probe.process, ForkedProcess)
    assert probe.end() == 0
    assert start.pid == before
    assert not caplog.records


@pytest.mark.long
def test_a_worker_of_another_environment_has_a_warm_process_of_it(
    start: ZygoteManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports may have read it. The one before stays for its own workers, and goes with them."""
    monkeypatch.setattr(zygote_client, "MODULES", ("torch",))
    first = Probe()
    before = start.pid
    assert before is not None
    assert first.told()["variable"] is None
    monkeypatch.setenv("PROBED", "yes")
    second = Probe()
    assert isinstance(second.process, ForkedProcess)
    assert start.pid != before
    assert second.told()["variable"] == "yes"
    assert state(before) not in ("", "Z")
    assert first.end("3") == 3, "its own warm process tells"
    wait_until(lambda: state(before) in ("", "Z"), "it stays without workers")
    assert second.end("4") == 4


def test_a_warm_process_with_a_thread_forks_nothing_and_that_is_said_once(
    light: ZygoteManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "pool.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()\n")
    monkeypatch.setattr(zygote_client, "MODULES", ("pool",))
    pids = list[int]()
    monkeypatch.setattr(
        zygote_client, "OwnedZygote", lambda environment: (pids.append((own := OwnedZygote(environment)).pid), own)[1]
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            probe = Probe()
            assert isinstance(probe.process, local.SpawnedProcess)
            assert probe.end() == 0
    assert [r.getMessage() for r in caplog.records if "2 threads" in r.getMessage()] == [
        "workers start as fresh processes, which takes longer: the zygote refuses to fork: it has 2 threads"
    ]
    light.close()
    (pid,) = pids
    assert not state(pid)


def test_a_warm_process_that_hangs_is_waited_for_once_and_hides_no_end_of_a_worker(
    light: ZygoteManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It never reads the order, which holds descriptors."""
    (tmp_path / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr(zygote_client, "MODULES", ("endless",))
    monkeypatch.setattr(zygote_client, "FORK_S", 0.2)
    with caplog.at_level(logging.WARNING):
        probe = Probe()
        monkeypatch.setattr(zygote_client, "FORK_S", 1e4)
        assert Probe().end() == 0
    probe.process.kill()
    assert probe.sock.recv(1) == b"", "the driver sees the end of its link"
    assert "the zygote has not replied for 0.2 s" in caplog.text


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_warm_process_that_is_stopped_is_replaced_as_soon_as_a_worker_is(
    how: signal.Signals, light: ZygoteManager, caplog: pytest.LogCaptureFixture
) -> None:
    """Or as one that has ended. The workers that it has forked go on."""
    before = Probe()
    pid = light.pid
    assert pid is not None
    os.kill(pid, how)
    begun = time.monotonic()
    after = Probe()
    took_s = time.monotonic() - begun
    assert isinstance(after.process, ForkedProcess)
    assert light.pid != pid
    assert state(pid) in ("", "Z")
    assert took_s < 30.0, "far below the minute that imports may take"
    why = f"has been stopped for {STOPPED_S:g} s" if how == signal.SIGSTOP else "has ended"
    assert [record.getMessage() for record in caplog.records] == [f"the zygote {why}: {ANOTHER}"]
    after.process.kill()
    assert after.sock.recv(1) == b"", "no order that was not read holds the link's other end"
    assert not before.process.has_ended()
    assert before.end() is None


def test_a_warm_process_that_has_closed_its_socket_has_ended() -> None:
    """A process that is killed closes its descriptors before its parent can wait for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control, other = socket.socketpair()
    theirs.close()
    warm = ZygoteClient({}, ours)
    with control, other, pytest.raises(ZygoteLostError, match="^the zygote has ended$"):
        warm.fork("probe", [], {}, control)
    warm.close()


def test_a_worker_whose_warm_process_is_stopped_starts_workers_from_one_of_its_own(
    light: ZygoteManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one that it was forked from is not the worker's to end, and forks nothing once it goes on."""
    (tmp_path / "zygote_probe.py").write_text(STARTER)
    monkeypatch.setattr(local, "STARTERS", {"probe"})
    probe = Probe()
    pid = light.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        probe.sock.sendall(b"1")
        told = probe.told()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert told["kind"] == "ForkedProcess"
    assert told["parent"] not in (pid, probe.process.pid)
    assert told["took_s"] < 30.0
    assert probe.process.has_ended(SOON_S)
    assert light.pid == pid
    wait_until(lambda: not children(pid), "it has forked a worker that nobody waits for")


def test_a_warm_process_that_cannot_import_leaves_that_to_the_worker(
    light: ZygoteManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zygote_client, "MODULES", ("lamina.nowhere",))
    with caplog.at_level(logging.WARNING):
        assert Probe().end() == 0
    assert "No module named 'lamina.nowhere'" in caplog.text


STARTER = """
import json, time
from pathlib import Path
from lamina.executor.launchers import local, zygote_client

def serve_probe(sock):
    if sock.recv(1) != b"1":
        return
    zygote_client.MODULES = ("json",)
    local.ROLES["probe"] = ("zygote_probe", "serve_probe")
    begun = time.monotonic()
    process, link = local.start("probe", 0, ())
    took_s = time.monotonic() - begun
    parent = int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    told = {"kind": type(process).__name__, "parent": parent, "took_s": took_s}
    link.close()
    process.has_ended(60.0)
    sock.sendall(json.dumps(told).encode() + b"\\n")
"""
DRIVER = """
import os, sys
from lamina.executor.launchers import local, zygote_client
local.ROLES["probe"] = ("zygote_probe", "serve_probe")
if sys.argv[1] == "importing":
    zygote_client.MODULES = ("endless",)
    local.START.get(local.worker_environment(0))
    print(local.START.pid, flush=True)
else:
    zygote_client.MODULES = ("json",)
    worker, ours = local.start("probe", 0, ())
    print(local.START.pid, worker.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.no_retry
@pytest.mark.parametrize("when", ["importing", "serving"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_nothing_is_left_of_a_driver(when: str, how: signal.Signals | None, tmp_path: Path) -> None:
    """None: it ends by itself."""
    begun = tmp_path / "begun"
    endless = f"import pathlib, signal\npathlib.Path({str(begun)!r}).touch()\nsignal.pause()\n"
    (tmp_path / "endless.py").write_text(endless)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, when],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support", tmp_path)))},
    )
    assert driver.stdout is not None
    assert driver.stdin is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == (1 if when == "importing" else 2)
    wait_until(lambda: when != "importing" or begun.exists(), "it does not import")
    if how is None:
        driver.stdin.close()
    else:
        driver.send_signal(how)
    driver.wait(SOON_S)
    wait_until(lambda: all(state(pid) in ("", "Z") for pid in pids), "they outlive their driver")
    driver.stdin.close()
    driver.stdout.close()


@pytest.mark.long
def test_a_worker_that_starts_workers_uses_the_one_warm_process(
    start: ZygoteManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's engine does so: its workers are its siblings."""
    monkeypatch.setattr(zygote_client, "MODULES", ("torch",))  # where another test has ended the one before
    monkeypatch.setattr(local, "STARTERS", {"probe"})
    probe = Probe()
    probe.told()
    probe.sock.sendall(b"start")
    found = probe.told()
    assert (found["kind"], found["parent"], found["status"]) == ("ForkedProcess", start.pid, 5)
    assert sockets(found) == OWN, "nothing of its brother"
    assert probe.end() == 0


@pytest.mark.no_retry
def test_a_join_ends_one_that_hangs(start: ZygoteManager, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ProcessWorker("probe", 0)
    os.kill(worker.pid, signal.SIGSTOP)
    worker.sock.close()
    worker.join(0.1)
    assert worker.exit_reason() == "was killed by SIGKILL"
