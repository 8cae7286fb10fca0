"""perf/pingpong.py: the transports that take part, the reasons why others do not, and the plots."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import queue
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from wiring import ROOT, SOON_S, open_or_skip

SCRIPT = ROOT / "perf" / "pingpong.py"


def run(*flags: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({"PATH": path} if path else {})
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False, timeout=100, env=env
    )


def script(name: str) -> ModuleType:
    """A module of perf/."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / "perf" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_what_is_missing_is_named_and_left_out(tmp_path: Path) -> None:
    done = run("--dry-run", path=str(tmp_path))
    assert done.returncode == 0
    for what in ("mpirun, mpicxx", "ucx_perftest", "g++"):
        assert f"left out: needs {what}" in done.stderr
    assert "Open MPI" not in done.stdout
    assert "lamina shm put" in done.stdout


@pytest.mark.slow
def test_a_turn_of_three() -> None:
    open_or_skip("shm")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    flags = [
        "--only",
        "lamina tcp copy",
        "--only",
        "TCP socket, Python",
        "--sizes",
        "64,5000",
        "--rounds",
        "1",
        "--count",
        "20",
    ]
    done = run(*flags, "--cores", f"{cores[0]},{cores[1]}")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout[done.stdout.index("{") :])
    assert all(row["us"] > 0 and row["ratio"] == pytest.approx(row["us"] / row["other_us"]) for row in figures.values())
    assert "lamina tcp copy, Python, 64 B, against TCP socket, Python" in figures


@pytest.mark.long
def test_rows_of_nics_and_gpus_are_left_out_by_name() -> None:
    done = run("--dry-run")
    assert done.returncode == 0
    for name in (
        "ib_write_lat",
        "ib_write_lat, no BlueFlame",
        "ib_write_bw",
        "lamina gin graph",
        "lamina mlx5 graph",
        "NCCL send/recv",
    ):
        assert f"{name}: left out: needs " in done.stderr or name in done.stdout.splitlines()


def over_nics() -> ModuleType:
    sys.path.insert(0, str(ROOT / "perf"))
    return importlib.import_module("transports.over_nics")


@pytest.mark.long
def test_the_paper_s_figure_says_what_is_missing() -> None:
    nics = over_nics()
    missing = nics.lacks_for_figure(nics.OVER_NICS)
    if not missing:
        pytest.skip("nothing is missing here: two GPUs and a NIC")
    done = run("--figure-13")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --figure-13 is drawn where two GPUs and a NIC are; missing here: ")
    assert done.stderr.count("\n") == 1
    for need in missing.values():
        assert all(part in done.stderr for part in need.split("; "))


def test_the_paper_s_figure_is_drawn_where_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure's one command draws it, whatever its competitors measure."""
    nics, pingpong = over_nics(), importlib.import_module("pingpong")

    def times(course: Any) -> dict[int, tuple[float, float]]:
        return {nbytes: (5.0 + nbytes / 1e4, 9.0 + nbytes / 1e4) for nbytes in course.sizes}

    here = [replace(competitor, run=times, missing=str) for competitor in nics.OVER_NICS]
    monkeypatch.setattr(pingpong, "EVERYBODY", here)
    for module in (pingpong, importlib.import_module("common")):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["pingpong.py", "--figure-13", "--write"])
    assert pingpong.main() == 0
    row = json.loads((tmp_path / "pingpong.jsonl").read_text())
    assert sorted(row["one_way_us"]) == sorted(nics.FIGURE_13)
    assert row["paper"] == nics.PAPER
    for what in ("latency", "bandwidth"):
        tree = ElementTree.fromstring((tmp_path / f"pingpong_gpu_{what}.svg").read_text())
        assert {*nics.FIGURE_13} <= {element.text for element in tree.iter()}


LATENCY = """---------------------------------------------------------------------------------------
 #bytes #iterations t_min[usec] t_max[usec] t_typical[usec] t_avg[usec] t_stdev[usec] 99% percentile[usec] 99.9% ...
 64      1000          0.76           1.83         0.79     \t       0.80        \t0.04   \t\t0.93    \t\t1.83
---------------------------------------------------------------------------------------
"""
BANDWIDTH = """ #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    1000             11035.65            1000.00\t\t   0.176555
"""


def test_perftest_is_read_by_its_columns() -> None:
    nics = over_nics()
    assert (nics.typical_us(LATENCY), nics.late_of(LATENCY)) == (0.79, 0.93)
    assert nics.average_us(BANDWIDTH) == pytest.approx(1000.0)
    assert math.isnan(nics.late_of(BANDWIDTH))
    for way, text in (
        (nics.typical_us, LATENCY.replace("0.79", "inf")),
        (nics.average_us, BANDWIDTH.replace("1000.00", "0.00")),
    ):
        with pytest.raises(nics.NoClockError, match="did not find the rate of its clock"):
            way(text)
    with pytest.raises(RuntimeError, match="no figures"):
        nics.typical_us("Couldn't connect to 127.0.0.1:18515")


PROGRAM = f"""#!{sys.executable}
import os, socket, sys
word = os.environ.get("MLX5_SHUT_UP_BF", "0").encode()
port = int(sys.argv[sys.argv.index("-p") + 1])
if sys.argv[-1] != "127.0.0.1":
    with socket.create_server(("127.0.0.1", port)) as door:
        door.accept()[0].sendall(word)
    sys.exit()
with socket.create_connection(("127.0.0.1", port)) as sock:
    words = word + sock.recv(1)
print({LATENCY!r}.replace("0.79", words.decode()))
"""


@pytest.mark.parametrize(("row", "words"), [("ib_write_lat", "00"), ("ib_write_lat, no BlueFlame", "11")])
def test_perftest_rings_by_a_doorbell_where_it_is_told_to(
    row: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides: the difference of the two rows is what BlueFlame gives on this host."""
    program = tmp_path / "ib_write_lat"
    program.write_text(PROGRAM)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("MLX5_SHUT_UP_BF", raising=False)
    nics = over_nics()
    port = SimpleNamespace(device="mlx5_0", number=1, gid_index=lambda _: 3)
    monkeypatch.setattr(nics, "chosen_port", lambda: (port, None))
    (competitor,) = [c for c in nics.OVER_NICS if c.name == row]
    core = min(os.sched_getaffinity(0))
    course = SimpleNamespace(sizes=[8], rounds=lambda _: 5, cores=(core, core), limit_s=SOON_S)
    assert competitor.run(course) == {8: (float(words), 0.93)}


def test_a_port_of_another_maker_has_no_row_without_blueflame(monkeypatch: pytest.MonkeyPatch) -> None:
    nics = over_nics()
    monkeypatch.setattr(nics, "chosen_port", lambda: (SimpleNamespace(device="rxe0"), None))
    assert nics.needs_connectx() == "a port of a ConnectX, which rxe0 is not"
    monkeypatch.setattr(nics, "mellanox", lambda _: ["rxe0"])
    assert nics.needs_connectx() == ""


@pytest.mark.long
def test_send_and_receive_of_a_process_group() -> None:
    """NCCL's row, by gloo and the CPU's clock."""
    line = [sys.executable, str(ROOT / "perf/transports/group_rounds.py"), "gloo", "2", "8:5", "5000:5"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["8", "5000"]
    assert all(0 < float(half) <= float(late) for _, half, late in rows)


class Desk:
    """torch.distributed for two threads; ``said``: by rank, what it does."""

    def __init__(self) -> None:
        self._ways = [queue.SimpleQueue[torch.Tensor]() for _ in range(2)]  # by whom it is for
        self.said: tuple[list[str], list[str]] = [], []

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self.said[1 - to].append("send")
        self._ways[to].put(tensor.clone())

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._ways[1 - source].get(timeout=SOON_S))
        self.said[1 - source].append("recv")


def test_no_round_waits_for_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round waits for neither side: what the other one compares meanwhile would be NCCL's time in the row."""
    sys.path.insert(0, str(ROOT / "perf"))
    module, desk, here = importlib.import_module("transports.group_rounds"), Desk(), threading.local()

    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        desk.said[here.rank].append("compare")
        return bool((a == b).all())

    def play(rank: int) -> list[float]:
        here.rank = rank
        times: list[float] = module.ping_pong(rank, torch.device("cpu"), 100, 2, 7)
        return times

    monkeypatch.setattr(module, "dist", desk)
    monkeypatch.setattr(module.torch, "equal", equal)
    monkeypatch.setattr(module, "MOST_ROUNDS", 4)
    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(play, range(2))
    assert len(first) == 8, "two batches of 4, behind one to warm up"
    for said, turn in zip(desk.said, (["send", "recv"], ["recv", "send"]), strict=True):
        assert said == 3 * (5 * turn + 5 * ["compare"])


def test_a_message_that_differs_is_told() -> None:
    sys.path.insert(0, str(ROOT / "perf"))
    batch = importlib.import_module("transports.group_rounds").RoundBatch(0, torch.device("cpu"), 10, 3)
    for n, came in enumerate(batch.came):
        came.copy_(batch.payloads[n % 3])
    batch.check()
    with pytest.raises(ValueError, match="message 0 differs"):
        batch.check()


def test_a_process_that_says_nothing_is_not_waited_for() -> None:
    """Neither one that begins a line."""
    sys.path.insert(0, str(ROOT / "perf"))
    line_of = importlib.import_module("common").line_of
    words = "print('first', flush=True); print('half a', end='', flush=True); input(); print(' line')"
    with subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert line_of(process, SOON_S) == "first"
            with pytest.raises(RuntimeError, match="no line within 0.05 s"):
                line_of(process, 0.05)
        finally:
            process.kill()
    with (
        subprocess.Popen(["true"], stdout=subprocess.PIPE) as process,
        pytest.raises(RuntimeError, match="ended before it printed a line"),
    ):
        line_of(process, SOON_S)


def test_nobody_is_one_line() -> None:
    done = run("--only", "pigeon")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --only 'pigeon' matches no competitor")


def test_a_plot_is_well_formed_and_in_its_frame() -> None:
    module = script("transports/loglog")
    lines = [module.Curve("a < b", [(8, 0.5), (1 << 20, 300.0)], True), module.Curve("c", [(8, 2.0)])]
    tree = ElementTree.fromstring(module.draw("title", "x", "y", lines))
    assert [e.text for e in tree.iter() if e.text in ("a < b", "c", "title")] == ["title", "a < b", "c"]
    axis = module.Axis([8, 1 << 20], 2, 100, 500)
    assert (axis.place(8), axis.place(1 << 20)) == pytest.approx((100, 500))
    assert axis.ticks(4) == [16.0, 256.0, 4096.0, 65536.0, 1048576.0]
    with pytest.raises(ValueError, match="nothing"):
        module.draw("t", "x", "y", [])


LATE = """
import pathlib, socket, sys, time
mark = pathlib.Path(sys.argv[1])
if not mark.exists():
    mark.write_text(sys.argv[-1])
    sys.exit("the port is taken")
with socket.create_server(("127.0.0.1", int(sys.argv[-1]))):
    time.sleep(60)
"""


def test_a_server_whose_port_was_taken_gets_another(tmp_path: Path) -> None:
    mark = tmp_path / "first"
    with script("transports/competitors").listening_server(
        [sys.executable, "-c", LATE, str(mark)], dict(os.environ)
    ) as port:
        socket.create_connection(("127.0.0.1", port), 10.0).close()
    assert mark.exists()


def test_a_server_that_somebody_else_stands_in_for_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    competitors = script("transports/competitors")
    monkeypatch.setattr(competitors, "LISTEN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other, subprocess.Popen(["sleep", "60"]) as idle:
        try:
            assert not competitors.listens(idle, other.getsockname()[1])
        finally:
            idle.kill()
