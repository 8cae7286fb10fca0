"""The promises of every launcher, over the whole table."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_cluster import FakeCluster

from lamina import netstack
from lamina.config import engine_config as options
from lamina.config.flat_options import make_config
from lamina.executor.launchers import LAUNCHERS, Launcher, WorkerHandle, open_launcher
from lamina.executor.launchers.static import StaticLauncher
from lamina.netstack import ChannelError, Geometry, Terms
from lamina.protocol.control import (
    Connect,
    ControlLink,
    Failed,
    LinkClosedError,
    MemoryReady,
    StartMemory,
    Stats,
    StatsRequest,
    Stop,
)

ROOT = Path(__file__).resolve().parents[2]
KEY = bytes(range(32))
SOON_S = 30.0  # a worker imports torch first
GEOMETRY = Geometry(slots=2, slot_bytes=64)
Open = Callable[[int], Launcher]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCluster]:
    pytest.importorskip("ray")
    # Several nodes: tests/cluster. Here one has room for three workers.
    made = FakeCluster(tmp_path_factory.mktemp("ray"), {"resources": {"lamina_memory": 3}, "num_cpus": 2})
    yield made
    made.close()


def test_options_name_the_table() -> None:
    assert ("auto", *LAUNCHERS) == options.LAUNCHERS


@pytest.fixture(params=LAUNCHERS)
def launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """(number of memory workers) -> their launcher, closed at the end in any case."""
    made, by_hand = list[Launcher](), list[subprocess.Popen[bytes]]()
    address = ""
    if request.param == "ray":
        cluster: FakeCluster = request.getfixturevalue("cluster")
        address = cluster.address
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
    if request.param == "static":
        monkeypatch.setenv("LAMINA_CLUSTER_KEY", KEY.hex())
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

    def open_for(count: int) -> Launcher:
        given = {"launcher": request.param, "ray_address": address, "transport": "tcp", "memory_workers": count}
        launcher = open_launcher(make_config(given), KEY, {"memory": count, "compute": 0})
        made.append(launcher)
        if isinstance(launcher, StaticLauncher):
            by_hand.extend(subprocess.Popen(c.text, shell=True, cwd=ROOT) for c in launcher.commands.values())
        return launcher

    yield open_for
    for launcher in made:
        launcher.close()
    try:
        for process in by_hand:
            process.wait(SOON_S)
    finally:
        for process in by_hand:
            process.kill()
            process.wait()


def link(handle: WorkerHandle) -> ControlLink:
    return ControlLink(handle.sock, MemoryReady | Stats | Failed)


def ready(handle: WorkerHandle, key: bytes) -> tuple[ControlLink, str]:
    """The worker's link and URL, once it listens."""
    control = link(handle)
    control.send(StartMemory(scheme="tcp", address=handle.host, key=key, threads=1))
    said = control.recv(timeout_s=SOON_S)
    assert isinstance(said, MemoryReady), said
    return control, said.url


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_until(true: Callable[[], bool], limit_s: float, what: str) -> float:
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < limit_s, what
        select.select([], [], [], 0.01)
    return time.monotonic() - start


@pytest.mark.long
def test_a_key_that_the_start_message_brings_is_nowhere_else(launch: Open) -> None:
    """Neither among the arguments, which all users of the host can read, nor in the environment."""
    launcher = launch(1)
    worker = launcher.start("memory", 0, 1)
    control, _ = ready(worker, launcher.key)
    for place in ("cmdline", "environ") if launcher.key else ("cmdline",):
        shown = Path(f"/proc/{worker.pid}/{place}").read_bytes()
        assert shown
        assert KEY not in shown
        assert KEY.hex().encode() not in shown
    control.close()
    worker.join(SOON_S)


@pytest.mark.long
def test_a_worker_serves_its_driver_and_goes_when_told(launch: Open) -> None:
    launcher = launch(2)
    first, second = (launcher.start("memory", index, 1) for index in range(2))
    assert (first.role, first.index, second.index) == ("memory", 0, 1)
    assert len({first.pid, second.pid, os.getpid()}) == 3
    variables = Path(f"/proc/{first.pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=1" in variables
    control, url = ready(first, launcher.key)
    with_key, without = netstack.open("tcp", key=KEY), netstack.open("tcp", key=bytes(32))
    control.send(Connect(epoch=0))
    with pytest.raises(ChannelError):
        without.connect(url, Terms(outbound=GEOMETRY, inbound=GEOMETRY), timeout_s=SOON_S)
    with_key.connect(url, Terms(outbound=GEOMETRY, inbound=GEOMETRY), timeout_s=SOON_S).close()
    control.send(StatsRequest())
    assert isinstance(control.recv(timeout_s=SOON_S), Stats)
    assert first.exit_reason() is None
    control.send(Stop())
    with pytest.raises(LinkClosedError):
        control.recv(timeout_s=SOON_S)
    wait_until(lambda: first.exit_reason() is not None, SOON_S, "it did not go")
    assert str(first.exit_reason()).endswith("exited with status 0")
    control.close()
    first.join(1.0)
    assert second.exit_reason() is None
    link(second).close()  # as a driver's end does
    second.join(SOON_S)
    assert gone(second.pid)


@pytest.mark.long(but=["static"])
def test_a_kill_ends_the_link_and_is_told(launch: Open) -> None:
    handle = launch(1).start("memory", 0, 1)
    os.kill(handle.pid, signal.SIGKILL)
    control = link(handle)
    with pytest.raises(LinkClosedError):
        control.recv(timeout_s=SOON_S)
    wait_until(lambda: handle.exit_reason() is not None, SOON_S, "nobody knows how it ended")
    assert str(handle.exit_reason()).endswith("was killed by SIGKILL")
    handle.join(1.0)


@pytest.mark.no_retry
@pytest.mark.long(but=["static"])
def test_join_ends_one_that_hangs(launch: Open) -> None:
    handle = launch(1).start("memory", 0, 1)
    os.kill(handle.pid, signal.SIGSTOP)
    link(handle).close()
    handle.join(0.1)
    wait_until(lambda: gone(handle.pid), 5.0, "it hangs on")


def test_one_that_stands_still_is_seen_where_another_may_take_its_place(launch: Open) -> None:
    launcher = launch(1)
    handle = launcher.start("memory", 0, 1)
    assert not handle.is_stopped
    if launcher.can_replace(handle):
        for _ in range(2):
            os.kill(handle.pid, signal.SIGSTOP)
            wait_until(lambda: handle.is_stopped, SOON_S, "nobody sees it")
            os.kill(handle.pid, signal.SIGCONT)
            wait_until(lambda: not handle.is_stopped, SOON_S, "it goes on")
    os.kill(handle.pid, signal.SIGSTOP)
    handle.sock.close()
    handle.join(0.1)
    wait_until(lambda: gone(handle.pid), SOON_S, "it is left")
    wait_until(lambda: not handle.is_stopped, SOON_S, "it has ended")


@pytest.mark.no_retry
def test_what_is_left_ends_with_its_launcher_or_its_link(launch: Open) -> None:
    launcher = launch(2)
    handles = [launcher.start("memory", index, 1) for index in range(2)]
    for handle in handles:
        handle.sock.close()
    launcher.close()
    launcher.close()
    wait_until(lambda: all(gone(h.pid) for h in handles), SOON_S, "workers are left")


@pytest.mark.long(but=["local"])
def test_what_a_launcher_took_is_there_for_the_next(launch: Open) -> None:
    """At once: a service is started again as soon as it has ended."""
    for _ in range(3):
        launcher = launch(3)
        worker = launcher.start("memory", 2, 1)
        worker.sock.close()
        worker.join(SOON_S)
        launcher.close()


@pytest.mark.long(but=["local", "ray"])
def test_cores_are_shared(launch: Open) -> None:
    one, two = launch(1), launch(2)
    cores = one.thread_count("memory", 0)
    assert cores >= 1
    assert two.thread_count("memory", 1) == max(1, cores // 2)


@pytest.mark.long(but=["local"])
def test_those_that_stay_are_numbered_anew_and_keep_their_places(launch: Open) -> None:
    """One of three has gone. A launcher that replaces workers does so in the place of the one that had the number."""
    launcher = launch(3)
    handles = [launcher.start("memory", index, 1) for index in range(3)]
    places = list(getattr(launcher, "places", {}).get("memory", ()))
    handles[0].sock.close()
    handles[0].join(SOON_S)
    launcher.keep_workers("memory", [2, 1])
    assert launcher.set_capacity("memory", 2), "there may be fewer anywhere"
    if places:
        assert launcher.places["memory"] == [places[2], places[1]]  # type: ignore[attr-defined]
    assert launcher.thread_count("memory", 1) >= 1
    if launcher.can_replace(handles[2]):
        os.kill(handles[2].pid, signal.SIGKILL)
        handles[2].sock.close()
        handles[2].join(SOON_S)
        again = launcher.start("memory", 0, 1)
        assert (again.role, again.index) == ("memory", 0)
        again.sock.close()
        again.join(SOON_S)
    assert handles[1].exit_reason() is None
    handles[1].sock.close()
    handles[1].join(SOON_S)
