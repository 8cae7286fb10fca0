"""Workers that are started by hand: the commands that are printed, the workers that come, and how all of it ends.

Covers: lamina/cli/common/cluster_plan.py, lamina/cli/worker.py, lamina/executor/launchers/static.py,
lamina/executor/launchers/static_commands.py.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from local_text import Known

from lamina import __version__
from lamina.cli.launch import main
from lamina.config.flat_options import make_config
from lamina.executor.launchers.remote_links import ControlListener, connect
from lamina.executor.launchers.static import StaticLauncher, open_launcher
from lamina.executor.launchers.static_agent import (
    AGENT_NAME,
    AgentHello,
    KillWorker,
    StartWorker,
    StaticWorkerSpec,
    WorkerExited,
    WorkerRefused,
    WorkerStarted,
    run_agent,
)
from lamina.netstack import HandshakeError
from lamina.protocol.control import ControlLink, LinkClosedError
from lamina.protocol.encrypted_socket import EncryptedSocket

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples" / "tiny_lm" / "model")
PAPER = str(ROOT / "examples" / "h100_h20.yaml")
KEY = bytes(range(32))
SOON_S = 60.0
ROOM = ["--kv-cache-memory-bytes", "16MiB", "--memory-workers", "2"]
TWO_HOSTS = "hosts:\n  - {address: 127.0.0.2, compute: 1, memory: 1}\n  - {address: 127.0.0.3, memory: 1}\n"


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "key"
    path.write_text(KEY.hex())
    path.chmod(0o600)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LAMINA_CLUSTER_KEY", raising=False)
    monkeypatch.setenv("LAMINA_CLUSTER_KEY_FILE", str(path))
    return str(path)


Open = Callable[..., StaticLauncher]


@pytest.fixture
def launch(key_file: str) -> Iterator[Open]:
    """(options) -> a launcher for two memory workers and a compute worker, closed at the end."""
    made = list[StaticLauncher]()

    def open_with(**options: Any) -> StaticLauncher:
        given = {"launcher": "static", "transport": "tcp", "kv_memory": "8MiB", **options}
        made.append(open_launcher(make_config(given), KEY, {"memory": 2, "compute": 1, "prefill": 0}))
        return made[-1]

    yield open_with
    for launcher in made:
        launcher.close()


def visit(launcher: StaticLauncher, role: str = "memory", **said: Any) -> ControlLink:
    """Connects as the command of a worker does."""
    host, _, port = launcher.address.rpartition(":")
    sock = connect(host, int(port), KEY, SOON_S, name=AGENT_NAME, peer=launcher.name)
    link = ControlLink(sock, StartWorker | WorkerRefused | KillWorker)
    link.send(AgentHello(**{"role": role, "host": "127.0.0.1", "cores": 4, "version": __version__, **said}))
    return link


def settle(launcher: StaticLauncher, role: str = "memory", **said: Any) -> ControlLink:
    """``visit``, until the launcher counts on it."""
    before = set(launcher.agents)
    link = visit(launcher, role, **said)
    wait_until(lambda: len(launcher.agents) > len(before))
    return link


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.01)


def too_late(launcher: StaticLauncher) -> None:
    """Acts as if --start-timeout-s were over."""
    launcher.deadline = 0.0


@pytest.mark.no_retry
@pytest.mark.long
def test_printed_commands_make_a_working_engine(key_file: str, known: Known, tmp_path: Path) -> None:
    """Tokens are those of the local launcher, all that was started ends by itself, each host has its own workers."""
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(TWO_HOSTS)
    command = [sys.executable, "-m", "lamina.cli.launch", *known.command, *ROOM, "--launcher", "static"]
    driver = subprocess.Popen(
        [*command, "--cluster", str(hosts), "--driver", "127.0.0.1:0"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    by_hand = list[subprocess.Popen[str]]()
    bare = {k: v for k, v in os.environ.items() if k != "LAMINA_CLUSTER_KEY_FILE"}  # the commands name it
    try:
        assert driver.stderr is not None
        told, said = queue.SimpleQueue[str](), list[str]()
        reader = threading.Thread(target=lambda stream=driver.stderr: [told.put(line) for line in stream])
        reader.start()
        while sum(" worker " in line for line in said) < 3:
            said.append(told.get(timeout=SOON_S))
        assert said[0] == f"# start 3 workers by hand within 600 s (--start-timeout-s); they need the file {key_file}\n"
        assert re.sub(r"driver-[0-9a-f]{16}@127.0.0.1:\d{4,5} ", "NAME@127.0.0.1:PORT ", "".join(said[1:])) == (
            "# on 127.0.0.2\n"
            f"env LAMINA_CLUSTER_KEY_FILE={key_file} lamina-launch worker compute-0 --driver NAME@127.0.0.1:PORT "
            "--host "
            "127.0.0.2\n"
            f"env LAMINA_CLUSTER_KEY_FILE={key_file} lamina-launch worker memory-0 --driver NAME@127.0.0.1:PORT --host "
            "127.0.0.2\n"
            "# on 127.0.0.3\n"
            f"env LAMINA_CLUSTER_KEY_FILE={key_file} lamina-launch worker memory-1 --driver NAME@127.0.0.1:PORT --host "
            "127.0.0.3\n"
        )
        for line in said:
            if not line.startswith("#"):
                by_hand.append(
                    subprocess.Popen(line, shell=True, cwd=ROOT, env=bare, stderr=subprocess.PIPE, text=True)
                )
        assert driver.stdout is not None
        assert driver.stdout.read() == known.text
        reader.join(SOON_S)
        assert driver.wait(SOON_S) == 0, [told.get() for _ in range(told.qsize())]
        for worker in by_hand:
            _, log = worker.communicate(timeout=SOON_S)
            assert worker.returncode == 0, log
            assert "exited with status 0" in log
    finally:
        for process in (driver, *by_hand):
            process.kill()
            process.wait()


def test_a_dry_run_says_what_to_run(key_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--launcher", "static", "--driver", "10.20.0.1:7000", "--memory-workers", "2", "--dry-run"]
    ask = ["generate", MODEL, "--prompt", "x", *flags, "--kv-cache-memory-bytes", "8GiB"]
    assert main([*ask, "--cluster", PAPER, "--memory-device", "cuda"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert " by hand over auto " in said[0]
    assert said[2].split()[:2] == ["compute-0", "10.20.0.1"]
    at = said.index("# on 10.20.0.2")
    for number in range(2):  # each has a GPU to itself
        assert said[at + 1 + number] == (
            f"env LAMINA_CLUSTER_KEY_FILE={key_file} CUDA_VISIBLE_DEVICES={number} lamina-launch worker "
            f"memory-{number} --driver NAME@10.20.0.1:7000 --host 10.20.0.2"
        )
    ask[ask.index("--driver") + 1] = "the first@10.20.0.1:7000"
    assert main(ask) == 0
    said = capsys.readouterr().out.splitlines()
    assert "# on any host that reaches this one" in said
    assert said[-1].startswith("would complete")
    assert said[-2].endswith("lamina-launch worker memory-1 --driver 'the first@10.20.0.1:7000'")


def test_who_does_not_come_is_named(launch: Open) -> None:
    launcher = launch()
    link = settle(launcher, "compute")
    too_late(launcher)
    with pytest.raises(
        OSError, match=r"2 of 3 workers did not come to [\d.:]+ within 600 s \(--start-timeout-s\)"
    ) as e:
        launcher.thread_count("memory", 0)
    for number in range(2):
        assert f"on any host: env LAMINA_CLUSTER_KEY_FILE={os.environ['LAMINA_CLUSTER_KEY_FILE']} " in str(e.value)
        assert f"lamina-launch worker memory-{number} --driver {launcher.name}@{launcher.address}" in str(e.value)
    assert "compute-0" not in str(e.value)
    launcher.close()
    assert isinstance(link.recv(SOON_S), KillWorker)


def test_the_wait_is_no_longer_than_it_may_be(launch: Open) -> None:
    launcher = launch(start_timeout_s=0.2)
    start = time.monotonic()
    with pytest.raises(OSError, match="3 of 3 workers did not come"):
        launcher.start("compute", 0)
    assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"version": "0.0.0"}, f"it has Lamina 0.0.0, the driver has {__version__}: install the same"),
        ({"role": "prefill"}, "the driver has 0 prefill workers"),
        ({"index": 2}, "the driver has 2 memory workers, numbered from 0"),
        ({"role": "engine"}, "the driver has 0 engine workers"),
        ({"index": -7}, "the driver has 2 memory workers, numbered from 0"),
        ({"host": "nowhere"}, "'nowhere' does not appear to be an IPv4 or IPv6 address"),
        ({"cores": 0}, "it reports 0 cores"),
    ],
)
def test_who_is_of_no_use_is_told_why(said: dict[str, Any], words: str, launch: Open) -> None:
    launcher = launch()
    answer = visit(launcher, **said).recv(SOON_S)
    assert isinstance(answer, WorkerRefused)
    assert answer.text.startswith(words)
    too_late(launcher)
    with pytest.raises(OSError, match="the last one that came was refused: ") as e:
        launcher.start("memory", 0)
    assert words in str(e.value)


def test_each_place_is_taken_once_and_is_free_again_when_its_holder_leaves(launch: Open) -> None:
    launcher = launch()
    first, second = settle(launcher, index=1), settle(launcher)
    third = visit(launcher).recv(SOON_S)
    assert third == WorkerRefused("all workers of that kind have come already")
    again = visit(launcher, index=1).recv(SOON_S)
    assert again == WorkerRefused("all workers of that kind have come already")
    first.close()
    wait_until(lambda: len(launcher.agents) == 1)
    links = [settle(launcher, cores=6), settle(launcher, "compute")]
    assert launcher.thread_count("memory", 1) == 3  # of six cores, which it shares with another memory worker
    assert launcher.thread_count("memory", 0) == 2
    assert len(links) == 2
    launcher.close()
    assert isinstance(second.recv(SOON_S), KillWorker)


def test_a_planned_host_gets_its_own_workers(launch: Open, tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text(TWO_HOSTS)
    launcher = launch(hosts=str(tmp_path / "hosts.yaml"))
    places = {who: command.host for who, command in launcher.commands.items()}
    assert places == {("compute", 0): "127.0.0.2", ("memory", 0): "127.0.0.2", ("memory", 1): "127.0.0.3"}
    refused = visit(launcher, host="127.0.0.4").recv(SOON_S)
    assert isinstance(refused, WorkerRefused)
    assert refused.text.startswith("none is planned on 127.0.0.4 (--cluster ")
    assert isinstance(visit(launcher, host="127.0.0.3", index=0).recv(SOON_S), WorkerRefused)
    links = [settle(launcher, host="127.0.0.3"), settle(launcher, "compute", host="127.0.0.2")]
    links.append(settle(launcher, host="127.0.0.2", cores=9))
    assert launcher.thread_count("memory", 0) == 9
    assert [link.fileno() > 0 for link in links] == [True] * 3


def test_room_for_kv_on_another_host_must_be_said(launch: Open) -> None:
    launcher = launch(kv_memory="auto")
    links = [settle(launcher, "compute"), settle(launcher), settle(launcher, host="127.0.0.2")]
    with pytest.raises(
        ValueError, match=r"--kv-cache-memory-bytes auto is for one host: say what a worker takes on 127\.0\.0\.2"
    ):
        launcher.thread_count("memory", 0)
    assert len(links) == 3


def test_a_command_that_ends_instead_of_starting_its_worker_is_told(launch: Open) -> None:
    launcher = launch()
    links = [settle(launcher, role) for role in ("memory", "memory", "compute")]
    failed: list[str] = []

    def start() -> None:
        try:
            launcher.start("memory", 0)
        except OSError as error:
            failed.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    begun = links[0].recv(SOON_S)
    assert isinstance(begun, StartWorker)
    assert (begun.role, begun.index, begun.threads) == ("memory", 0, 2)
    links[0].close()
    thread.join(SOON_S)
    assert failed == ["the command for memory worker 0 on 127.0.0.1 did not start it: see its output there"]


def test_strangers_stay_outside(launch: Open) -> None:
    launcher = launch()
    host, _, port = launcher.address.rpartition(":")
    with pytest.raises(HandshakeError, match="keys differ"):
        connect(host, int(port), bytes(32), SOON_S, name=AGENT_NAME, peer=launcher.name)
    wait_until(lambda: launcher.refusal)
    too_late(launcher)
    with pytest.raises(OSError, match="the last one that came was refused: the connector's proof is wrong: the keys"):
        launcher.start("memory", 0)


def test_nonsense_from_a_key_holder_costs_one_link(launch: Open) -> None:
    launcher = launch()
    host, _, port = launcher.address.rpartition(":")
    for message in (WorkerExited(exit_reason="x"), WorkerStarted(pid=1), WorkerRefused("x")):
        link = ControlLink(connect(host, int(port), KEY, SOON_S, name=AGENT_NAME, peer=launcher.name), StartWorker)
        link.send(message)
        with pytest.raises(LinkClosedError):
            link.recv(SOON_S)
    links = [visit(launcher, role) for role in ("memory", "memory", "compute")]
    assert launcher.thread_count("compute", 0) == 4
    assert len(links) == 3


def test_without_a_key_there_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("LAMINA_CLUSTER_KEY", "LAMINA_CLUSTER_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["generate", MODEL, "--prompt", "x", "--launcher", "static"]) == 2
    said = capsys.readouterr().err
    assert "--launcher static: workers prove the cluster's key: put one in a file" in said
    assert said.count("\n") == 1
    assert main(["worker", "memory", "--driver", "x@127.0.0.1:7000"]) == 2
    assert "name its file by LAMINA_CLUSTER_KEY_FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["disk", "--driver", "x@h:1"], "disk is no worker: name one of compute, memory, prefill, or memory-0"),
        (["memory-", "--driver", "x@h:1"], "memory- is no worker"),
        (["memory", "--driver", "x@h"], "--driver must be NAME@HOST:PORT, such as team-a@10.0.0.1:7000, not 'x@h'"),
        (["memory", "--driver", "h:1"], "--driver must be NAME@HOST:PORT, such as team-a@10.0.0.1:7000, not 'h:1'"),
        (["memory", "--driver", "x@h:0"], "--driver must be NAME@HOST:PORT"),
        (
            ["memory", "--driver", "x@h:1", "--host", "10.255.255.254"],
            "--host 10.255.255.254 is no address of this host",
        ),
        (["memory", "--driver", "x@h:1", "--wait-s", "0"], "--wait-s must be a positive number of seconds, not 0.0"),
        (["memory", "--driver", "x@h:1", "--wait-s", "nan"], "--wait-s must be a positive number of seconds, not nan"),
    ],
)
def test_flags_of_a_worker_that_make_no_sense(
    flags: list[str], words: str, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("0.0.0.0:0", "--driver 0.0.0.0 is no host's own: give the IP by which workers reach this host"),
        ("name.invalid:0", "--driver: name.invalid cannot be looked up"),
        ("10.255.255.254:0", "cannot listen at 10.255.255.254:0: "),
    ],
)
def test_places_where_no_driver_listens(address: str, words: str, launch: Open) -> None:
    with pytest.raises((ValueError, OSError), match=re.escape(words)):
        launch(driver_address=address)


def test_a_worker_waits_for_its_driver_no_longer_than_it_is_told(
    key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # nothing listens
        at = f"127.0.0.1:{sock.getsockname()[1]}"
        start = time.monotonic()
        assert main(["worker", "memory", "--driver", f"x@{at}", "--wait-s", "0.5"]) == 2
        assert 0.5 <= time.monotonic() - start < SOON_S
    assert f"no driver at {at} within 0.5 s (--wait-s)" in capsys.readouterr().err


def test_a_worker_with_another_key_is_told_at_once(launch: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launch()
    monkeypatch.delenv("LAMINA_CLUSTER_KEY_FILE")
    monkeypatch.setenv("LAMINA_CLUSTER_KEY", bytes(32).hex())
    done = subprocess.run(
        [*command_of(launcher), "memory"],
        cwd=ROOT, capture_output=True, text=True, timeout=SOON_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "the keys differ: are the cluster's key and the name of --driver here the driver's?" in done.stderr


def command_of(launcher: StaticLauncher) -> list[str]:
    at = ["--driver", f"{launcher.name}@{launcher.address}"]
    return [sys.executable, "-m", "lamina.cli.launch", "worker", *at]


def test_a_worker_serves_the_driver_of_its_command_alone(launch: Open, capsys: pytest.CaptureFixture[str]) -> None:
    """An attacker who can redirect its packets could else hand it to another engine of the same key."""
    own, other = launch(), launch()
    assert main(["worker", "memory", "--driver", f"{own.name}@{other.address}"]) == 2
    assert (
        f"the listener is not the peer that we want, '{own.name}': are the cluster's key and the name of --driver"
        in (capsys.readouterr().err)
    )
    assert not other.agents
    link = settle(own)
    assert len(own.agents) == 1
    link.close()


def test_a_driver_may_be_given_its_name(launch: Open) -> None:
    """The name is for workers that are started before it, or by a script."""
    launcher = launch(driver_name="the first")
    link = settle(launcher)
    assert all(f"--driver 'the first@{launcher.address}'" in command.text for command in launcher.commands.values())
    link.close()
    with pytest.raises(ValueError, match="--driver: a name has at most 64 bytes, not 65: shorten it"):
        launch(driver_name="x" * 65)


class Driver:
    """The other end of a command's link, without a launcher."""

    def __init__(self) -> None:
        self.listener = ControlListener("127.0.0.1", KEY, "the first", "", links=4)
        at = "127.0.0.1", self.listener.port
        worker = StaticWorkerSpec(role="memory", index=3, driver=at, driver_name="the first")
        self._pool = ThreadPoolExecutor(1)
        self.status = self._pool.submit(run_agent, worker, KEY, SOON_S)
        name, sock, keys = self.listener.accept_any(SOON_S)
        self.link = ControlLink(EncryptedSocket(sock.detach(), keys), AgentHello | WorkerStarted | WorkerExited)
        self.came = self.link.recv(SOON_S)
        assert name == AGENT_NAME

    def close(self) -> None:
        self.link.close()
        self.listener.close()
        self._pool.shutdown()


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.close()


def test_a_command_says_what_it_is_for_and_goes_when_told(driver: Driver) -> None:
    cores = len(os.sched_getaffinity(0))
    assert driver.came == AgentHello(role="memory", index=3, host="127.0.0.1", cores=cores, version=__version__)
    driver.link.send(KillWorker())
    assert driver.status.result(SOON_S) == 0


@pytest.mark.no_retry
def test_a_command_ends_with_a_driver_that_is_lost(driver: Driver) -> None:
    driver.link.close()
    assert driver.status.result(SOON_S) == 1


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (WorkerRefused("enough"), "memory-3 is refused by the driver at 127.0.0.1:\\d+: enough"),
        (StartWorker(role="engine", index=0, threads=1, name="x"), "the driver asks memory-3 for engine-0, threads 1"),
        (StartWorker(role="memory", index=3, threads=0, name="x"), "for memory-3, threads 0"),
        (StartWorker(role="memory", index=3, threads=10**9, name="x"), "threads 1000000000"),
    ],
)
def test_orders_that_a_command_does_not_take(order: Any, words: str, driver: Driver) -> None:
    driver.link.send(order)
    with pytest.raises(ValueError, match=words):
        driver.status.result(SOON_S)


def test_a_worker_is_ended_by_order_and_its_end_is_told(driver: Driver) -> None:
    driver.link.send(StartWorker(role="memory", index=3, threads=1, name="memory-3-x"))
    name, sock, keys = driver.listener.accept_any(SOON_S)
    assert name == "memory-3-x"
    with EncryptedSocket(sock.detach(), keys):
        began = driver.link.recv(SOON_S)
        assert isinstance(began, WorkerStarted)
        driver.link.send(KillWorker())
        assert driver.link.recv(SOON_S) == WorkerExited(exit_reason="was killed by SIGKILL")
    assert driver.status.result(SOON_S) == 1


@pytest.mark.no_retry
@pytest.mark.long(but=["9", "15"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_command_that_is_killed(how: signal.Signals, launch: Open) -> None:
    """Its worker goes with it, and the driver hears of it."""
    launcher = launch()
    processes = [subprocess.Popen([*command_of(launcher), role], cwd=ROOT) for role in ("memory", "memory", "compute")]
    try:
        handle = launcher.start("memory", 0, 1)
        theirs = [p for p in processes if str(handle.pid) in _children(p.pid)]
        assert len(theirs) == 1
        theirs[0].send_signal(how)
        theirs[0].wait(SOON_S)
        wait_until(lambda: gone(handle.pid))
        wait_until(lambda: handle.exit_reason() is not None)
        assert handle.exit_reason() == "on 127.0.0.1 is lost, with the command that looked after it"
        handle.join(1.0)
        launcher.close()
        assert [p.wait(SOON_S) for p in processes if p not in theirs] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_all_options_of_it_are_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    hosts = tmp_path / "h.yaml"
    hosts.write_text(TWO_HOSTS)
    flags = ["--launcher", "static", "--driver", "d@10.0.0.1:7000", "--cluster", str(hosts)]
    assert main(["generate", "m", *flags, "--print-config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["launcher"], printed["driver_address"], printed["hosts"]) == ("static", "10.0.0.1:7000", str(hosts))
    assert printed["driver_name"] == "d"
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
