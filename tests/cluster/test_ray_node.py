"""Orders to a host, over a program that stands in for Ray's: it says that it has started, or does not, and waits.

Covers: lamina/executor/hosts/ray_cluster.py.
"""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running import alive, eventually

from lamina.executor.hosts import ray_node
from lamina.utils.proc import start_time_of

ADDRESS = "fd00::1"
RAY = """
import json, os, pathlib, signal, subprocess, sys, time
words = sys.argv[1:]
if "--with-child" in words:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print("child", child.pid, flush=True)
if "--stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--bytes" in words:
    os.write(2, b"\\xff ")
report = {"words": words, "environment": dict(os.environ), "session": os.getsid(0), "stdin": sys.stdin.read()}
pathlib.Path(os.environ["REPORT"]).write_text(json.dumps(report))
if "--wordless" not in words:
    print("x" * 400, "no luck" if "--end" in words else "Ray runtime started", file=sys.stderr, flush=True)
if "--slow" in words:
    told, may_end = (pathlib.Path(os.environ["REPORT"] + word) for word in ("-told", "-may-end"))
    signal.signal(signal.SIGTERM, lambda *_: told.touch())
    while not may_end.exists():
        time.sleep(0.01)
elif "--end" not in words:
    signal.pause()
"""


@pytest.fixture(autouse=True)
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "ray" / "scripts"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "scripts.py").write_text(RAY)
    variables = {"PYTHONPATH": tmp_path, "XDG_STATE_HOME": tmp_path / "state", "REPORT": tmp_path / "report"}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/no/such/file")
    yield
    if (pid := ray_node.running_pid(ray_node.folder_of(ADDRESS))) is not None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def order(*arguments: str, timeout_s: float = 60.0) -> dict[str, Any]:
    more = {"token": "secret", "timeout_s": timeout_s, "head": "", "call": "one"}
    return {"address": ADDRESS, "arguments": list(arguments), **more}


def test_what_is_up_is_found_and_ended_once(tmp_path: Path) -> None:
    answer = ray_node.up(order("--head", "--port", "1"))
    pid = answer["pid"]
    begun = ["--head", "--port", "1"]
    assert answer == {"pid": pid, "fresh": True, "arguments": begun}
    assert ray_node.up(order("--other")) == {"pid": pid, "fresh": False, "arguments": begun}
    assert ray_node.status(order()) == {"pid": pid}
    assert ray_node.status({**order(), "address": "fd00::2"}) == {"pid": 0}
    report = json.loads((tmp_path / "report").read_text())
    assert report["words"] == ["start", "--block", "--head", "--port", "1"]
    assert (report["session"], report["stdin"]) == (pid, ""), "a session of its own, and nothing to read"
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness", "RAY_AUTH_TOKEN_PATH")
    assert [report["environment"].get(name) for name in names] == ["token", "secret", "0", "0", None]
    folder = tmp_path / "state" / "lamina" / "hosts" / "fd00__1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "log").read_text().endswith("Ray runtime started\n")
    assert ray_node.down({**order(), "call": "another"}) == {"ended": False}, "what another call has started stays"
    assert ray_node.down(order()) == {"ended": True}
    assert not alive([pid])
    assert not (folder / "pid").exists()
    assert ray_node.down(order()) == {"ended": False}
    assert ray_node.status(order()) == {"pid": 0}
    assert ray_node.up(order())["fresh"]


@pytest.mark.parametrize(("word", "said"), [("--end", "x" * 400 + " no luck;"), ("--wordless", "it printed nothing;")])
def test_a_start_that_fails_says_why_and_where_to_read_on(word: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ray_node.NodeError) as refused:
        ray_node.up(order("--end", word))
    log = tmp_path / "state" / "lamina" / "hosts" / "fd00__1" / "log"
    assert str(refused.value) == f"Ray did not start: {said} see {log}"
    assert ray_node.status(order()) == {"pid": 0}


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ray_node.NodeError, match="Ray did not start"):
        ray_node.up(order("--wordless", timeout_s=0.0))
    assert ray_node.status(order()) == {"pid": 0}


def test_who_does_not_heed_a_signal_is_killed_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "END_S", 0.2)
    pid = ray_node.up(order("--stubborn", "--with-child"))["pid"]
    child = int((ray_node.folder_of(ADDRESS) / "log").read_text().split()[1])
    assert len(alive([pid, child])) == 2
    assert ray_node.down(order()) == {"ended": True}
    assert not (ray_node.folder_of(ADDRESS) / "pid").exists()
    assert eventually(lambda: not alive([pid, child]), 10.0)


def test_who_ends_before_the_signal_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(pid: int, number: int) -> None:
        os.killpg(pid, signal.SIGKILL)
        assert eventually(lambda: not start_time_of(pid), 10.0)
        raise ProcessLookupError

    ray_node.up(order())
    with monkeypatch.context() as patch:
        patch.setattr(ray_node.os, "kill", late)
        assert ray_node.down(order()) == {"ended": True}
    assert not (ray_node.folder_of(ADDRESS) / "pid").exists()


def test_a_start_needs_nothing_of_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a token's path nor what stands in stdin; what Ray says may be no text, and who asked be forgotten."""
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    own, (there, here) = os.dup(0), os.pipe()
    try:
        os.dup2(there, 0)
        os.write(here, b"an order")
        os.close(here)
        pid = ray_node.up(order("--bytes"))["pid"]
    finally:
        os.dup2(own, 0)
        for number in (own, there):
            os.close(number)
    assert json.loads((tmp_path / "report").read_text())["stdin"] == ""
    (ray_node.folder_of(ADDRESS) / "order").unlink()
    assert ray_node.up(order()) == {"pid": pid, "fresh": False, "arguments": []}


def test_a_process_has_a_birth_while_it_runs_whatever_its_name(tmp_path: Path) -> None:
    odd = tmp_path / "a) S (b"
    odd.symlink_to(sys.executable)
    with subprocess.Popen([odd, "-c", "input()"], stdin=subprocess.PIPE) as process:
        said = Path(f"/proc/{process.pid}/stat")
        assert eventually(lambda: "(a) S (b)" in said.read_text(), 10.0)
        assert start_time_of(process.pid) == said.read_text().split("(a) S (b) ")[1].split()[19]
        process.kill()
        assert eventually(lambda: said.read_text().split("(a) S (b) ")[1][0] == "Z", 10.0)
        assert start_time_of(process.pid) == "", "its remains are not it"
    assert start_time_of(process.pid) == ""


def test_the_head_says_what_ray_has_free_and_which_process_has_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of Ray stands in for its own."""
    from lamina.executor.hosts import ray_cluster

    pid, joined_to = ray_node.up(order())["pid"], list[str]()
    free = {"lamina_memory": 2.0}

    @contextmanager
    def joined(address: str) -> Iterator[str]:
        joined_to.append(address)
        yield "client"

    monkeypatch.setattr(ray_cluster, "joined", joined)
    monkeypatch.setattr(ray_cluster, "hosts_of", lambda client: [SimpleNamespace(address=client, resources=free)])
    actors = ["lamina/h1:7/memory-0/ab", "lamina/h1:7/compute-0/cd", "of/others", "lamina/h0:9/memory-0/ef"]
    named = [{"name": name, "namespace": "x"} for name in actors]
    util = SimpleNamespace(list_named_actors=lambda all_namespaces: named)
    monkeypatch.setitem(sys.modules, "ray.util", util)  # type: ignore[arg-type]
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "of somebody else")
    serves = {"h0:9": ["memory-0"], "h1:7": ["compute-0", "memory-0"]}
    told = ray_node.status({**order(), "head": "10.0.0.1:6379"})
    assert told == {"pid": pid, "hosts": {"client": free}, "serves": serves}
    assert joined_to == ["10.0.0.1:6379"]
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == ("token", "secret")


def test_an_error_of_ray_is_told_whole() -> None:
    from lamina.executor.hosts.ray_cluster import error_text

    assert error_text(RuntimeError(f"the first line\n  {'x' * 400} is the reason\n")).endswith("x is the reason")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ({"order": "status"}, {"pid": 0}),
        ({"order": "down"}, {"ended": False}),
        (
            {"order": "up", "arguments": ["--end", "--wordless"]},
            {"error": "Ray did not start: it printed nothing; see LOG"},
        ),
    ],
)
def test_an_order_is_a_line_and_so_is_the_answer(
    text: dict[str, Any], answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({**order(), **text})))
    assert ray_node.main() == 0
    said = capsys.readouterr().out
    assert json.loads(said.replace(str(ray_node.folder_of(ADDRESS) / "log"), "LOG")) == answer
    assert said.count("\n") == 1


def test_a_start_waits_for_an_end_that_is_under_way(tmp_path: Path) -> None:
    """Else it would find what is about to go, or its own would be forgotten when the end is written down."""
    old = ray_node.up(order("--slow"))["pid"]
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(ray_node.down, order())]
        try:
            assert eventually((tmp_path / "report-told").exists, 10.0)
            ends.append(pool.submit(ray_node.down, order()))
            start = pool.submit(ray_node.up, {**order(), "call": "two"})
            assert not eventually(lambda: start.done() or ends[1].done(), 0.3)
        finally:
            (tmp_path / "report-may-end").touch()
        assert [end.result(30.0) for end in ends] == [{"ended": True}] * 2
        assert start.result(30.0)["fresh"]
    assert not alive([old])
    assert ray_node.running_pid(ray_node.folder_of(ADDRESS)) == start.result()["pid"], (
        "the second end is of the first call alone"
    )


def test_an_end_does_not_wait_for_a_start_that_is_under_way() -> None:
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(ray_node.up, order("--wordless", timeout_s=100.0))
        assert eventually(lambda: ray_node.running_pid(ray_node.folder_of(ADDRESS)) is not None, 10.0)
        assert ray_node.down({**order(), "call": "another"}) == {"ended": False}
        assert not start.done()
        assert ray_node.down(order()) == {"ended": True}
        with pytest.raises(ray_node.NodeError, match="Ray did not start: an order to end it came before"):
            start.result(30.0)
    assert ray_node.running_pid(ray_node.folder_of(ADDRESS)) is None


def test_an_end_is_seen_while_it_is_waited_for() -> None:
    """A worker that ends by the signal is not killed: ``down`` is back long before END_S."""
    ray_node.up(order())
    done = threading.Event()
    thread = threading.Thread(target=lambda: (ray_node.down(order()), done.set()))
    thread.start()
    assert done.wait(ray_node.END_S / 2)
    thread.join()
