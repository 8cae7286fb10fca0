"""``python -m lamina.netstack bench``: every pattern between real processes, its figures, and its refusals.

Covers: netstack/bench/command.py, netstack/bench/floods.py, netstack/bench/job.py,
netstack/bench/machine_facts.py, netstack/bench/native_loops.py, netstack/bench/patterns.py, netstack/bench/runs.py,
netstack/bench/server.py.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wiring import KEY, ROOT, SOON_S, connect, open_or_skip, spoil_payloads

from lamina import netstack
from lamina.netstack.bench import command as bench
from lamina.netstack.bench import runs
from lamina.netstack.bench.floods import in_pairs
from lamina.netstack.bench.job import Job, Measured, Payloads, check_bytes, parse_size
from lamina.netstack.bench.machine_facts import RDMA_KNOBS, machine
from lamina.netstack.bench.patterns import DRIVERS, PATTERNS, WINDOWED, client_of, server_of
from lamina.netstack.host import native_module

FIGURES = {"p50_us", "p99_us", "p999_us", "max_us", "msg/s", "GB/s", "CPU %"}


def command(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "lamina.netstack", "bench", *flags]
    return subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=90, env=os.environ | (env or {})
    )


def test_rounds_that_a_peer_names_take_no_memory() -> None:
    """A job is a peer's word: who does not lead keeps no times of it."""
    with closing(open_or_skip("shm")) as fabric:
        _, b = connect(fabric)
        for both in (False, True):
            with pytest.raises(netstack.ChannelError):
                native_module.flood(b, b"abc", 0, 1 << 40, 2, False, both, 0.01)  # type: ignore[arg-type]


@pytest.mark.long(but=["shm"])
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_every_pattern_between_processes(scheme: str, tmp_path: Path) -> None:
    open_or_skip(scheme)
    done = command(
        "--transport", scheme, "--pattern", ",".join(PATTERNS), "--sizes", "8,1000,32/8/64x2", "--driver",
        "python,native", "--count", "40", "--warm-up", "5", "--rate", "2000,4000", "--window", "6", "--json",
        "--samples", str(tmp_path / "samples"),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    samples = [json.loads(line)["samples_us"] for line in (tmp_path / "samples").read_text().splitlines()]
    assert len(rows) == len(samples) == 3 * (len(PATTERNS) + 1 + len(DRIVERS["native"]))
    for row, each in zip(rows, samples, strict=True):
        assert row.keys() >= FIGURES | {"transport", "driver", "pattern", "size"}
        assert 0 < row["p50_us"] <= row["p99_us"] <= row["p999_us"] <= row["max_us"]
        pairs = 2 if row["pattern"] == "pairs" else 1
        assert row["peers"] == (2 if row["pattern"] in ("fan", "incast", "pairs") else 1)
        assert row["msg/s"] > 0
        assert row["verified"] is True
        assert (len(each), max(each)) == (pairs * row["rounds"], pytest.approx(row["max_us"], abs=0.002))
        assert sum(row["histogram_us"].values()) == pairs * row["rounds"]
        assert row["client"]["kernel"] == os.uname().release
        assert [server["kernel"] for server in row["server"]] == 2 * [os.uname().release]
        assert row.get("window") == (6 if row["pattern"] in WINDOWED else None)
    assert {row["size"] for row in rows} == {8, 1000, 8192}
    assert {row.get("offered/s") for row in rows} == {None, 2000.0, 4000.0}


def test_pairs_are_busy_until_the_last_is_done_and_count_together() -> None:
    slow = threading.Event()

    def play(pair: int, first: int, rounds: int) -> list[float]:
        if first and pair == 0:
            slow.wait(SOON_S)
        if first and pair == 1:
            threading.Timer(0.2, slow.set).start()
        assert first or rounds == 3
        return [1.0] * rounds

    measured = in_pairs(Job("pairs", warm_up=3, rounds=5), 2, play)
    assert len(measured.samples) == 10
    assert measured.busy_s >= 2 * 0.2


@pytest.mark.parametrize("during", [0, 3])
def test_a_pair_that_fails_is_what_is_told(during: int) -> None:
    def play(pair: int, first: int, rounds: int) -> list[float]:
        if pair == 1 and first == during:
            raise netstack.ChannelError("pair 1 is gone")
        return [1.0] * rounds

    with pytest.raises(netstack.ChannelError, match="pair 1 is gone"):
        in_pairs(Job("pairs", warm_up=3, rounds=5), 3, play)


def test_two_processes_that_only_share_a_key() -> None:
    key = {"LAMINA_CLUSTER_KEY": KEY.hex()}
    line = [sys.executable, "-m", "lamina.netstack", "bench", "--listen", "127.0.0.1:0", "--cores", "none"]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | key) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            refused = command("--connect", url, "--sizes", "8", env={"LAMINA_CLUSTER_KEY": "ab" * 32})
            assert refused.returncode == 1
            assert "keys differ" in refused.stderr
            done = command("--connect", url.removeprefix("tcp://"), "--sizes", "64", "--count", "20", "--json", env=key)
            assert (done.returncode, done.stderr) == (0, "")
            assert json.loads(done.stdout)["size"] == 64
            assert server.wait(SOON_S) == 0  # it has the message that no job follows
        finally:
            server.kill()


@pytest.mark.no_retry
def test_a_killed_client_leaves_no_server() -> None:
    """Its servers watch a pipe that only the client holds."""
    line = [
        sys.executable,
        "-m",
        "lamina.netstack",
        "bench",
        "--transport",
        "tcp",
        "--sizes",
        "8",
        "--count",
        "10000000",
    ]
    line += ["--volume", "1024MiB", "--cores", "none"]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        client.stdout.readline()  # the table's head
        children: list[str] = []
        while not children:
            children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
        pidfds = [os.pidfd_open(int(child)) for child in children]
        client.kill()
    for fd in pidfds:
        assert select.select([fd], [], [], SOON_S)[0], "a server outlived its client"
        os.close(fd)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--transport", "pigeon"], "unknown --transport 'pigeon'; choose from loopback, shm"),
        (["--pattern", "ping"], "unknown --pattern 'ping'"),
        (["--sizes", "64,many"], "--sizes: 'many'"),
        (["--sizes", "0"], "--sizes: '0'"),
        (["--sizes", "2048MiB"], "1 GiB"),
        (["--count", "0"], "--count"),
        (["--rate", "-1"], "--rate"),
        (["--rate", "5,many"], "--rate must be numbers above 0, separated by commas, not '5,many'"),
        (["--window", "1025"], "--window must be 1 to 1024"),
        (["--pattern", "stream", "--window", "64", "--sizes", "32MiB"], "--window 64: messages of 33554432 B"),
        (["--cores", "12345"], "--cores: 12345 is not among"),
        (["--cores", "a"], "--cores must be"),
        (["--samples", "/nowhere/x"], "--samples /nowhere/x: No such file or directory; name a file"),
        (["--driver", "native", "--pattern", "fan"], "--driver native has no pattern fan"),
        (["--device", "gpu"], "unknown --device 'gpu'; choose from cpu, cuda"),
        (["--device", "cuda", "--transport", "shm"], "kernels for --transport cuda, mlx5, gin, not shm"),
        (["--device", "cuda", "--pattern", "pair"], "--device cuda has no pattern pair; choose from rtt"),
        (["--device", "cuda", "--driver", "native"], "--driver native is of --device cpu"),
        (["--listen"], "LAMINA_CLUSTER_KEY"),
        (["--connect", "127.0.0.1:1", "--listen"], "exclude"),
        (["--transport", "loopback"], "one process"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(flags) == 2
    out, err = capfd.readouterr()
    assert err.startswith("error: ")
    assert text in err
    assert err.count("\n") == 1
    assert "\n" not in out.strip()  # at most the head of a table


def test_nobody_there_is_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_CLUSTER_KEY", KEY.hex())
    assert bench.main(["--connect", "127.0.0.1:1", "--json"]) == 1
    assert "refused" in capfd.readouterr().err.lower()


def test_dry_run_measures_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--transport", "tcp", "--sizes", "64/8/128x4", "--dry-run"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["sizes"] == [{"name": "64/8/128x4", "query": 65536, "kv": 16384}]


def test_sizes() -> None:
    assert [parse_size(text).query for text in ("8", "8B", "16KiB", "1mib", "64/8/128")] == [
        8,
        8,
        16384,
        1 << 20,
        16384,
    ]
    assert parse_size("16KiB").kv == parse_size("64/8/128").kv == 4096  # both are 64 heads on 8


@given(samples=st.lists(st.floats(0, 1e3), min_size=1, max_size=50), share=st.floats(0.001, 1.0))
def test_percentiles_are_samples_that_the_share_does_not_exceed(samples: list[float], share: float) -> None:
    ordered = sorted(samples)
    value = runs.percentile(ordered, share)
    needed = math.ceil(share * len(ordered) - 1e-9)
    assert sum(s <= value for s in ordered) >= needed
    assert sum(s < value for s in ordered) < max(needed, 1)


def test_rates_follow_from_the_samples() -> None:
    job = Job("pair", query=1000, kv=500, rounds=4)
    figures = runs.summary(Measured([1e-6, 3e-6, 2e-6, 4e-6], 10e-6), job, 1)
    assert (figures["p50_us"], figures["max_us"]) == pytest.approx((2.0, 4.0))
    assert figures["msg/s"] == pytest.approx(3 * 4 / 10e-6)
    assert figures["GB/s"] == pytest.approx(2500 * 4 / 10e-6 / 1e9)


def test_a_window_counts_all_of_its_messages() -> None:
    measured = Measured([2e-6, 2e-6], 4e-6)
    for pattern, messages in (("stream", 8), ("both", 16), ("incast", 24), ("pairs", 24)):
        job = Job(pattern, query=1000, rounds=2, window=8)
        figures = runs.summary(measured, job, 3 if pattern in ("incast", "pairs") else 1)
        assert figures["msg/s"] == pytest.approx(messages / 2e-6)
        assert figures["GB/s"] == pytest.approx(messages * 1000 / 2e-6 / 1e9)


@given(samples=st.lists(st.floats(1e-9, 1e3), max_size=50))
def test_a_histogram_has_each_sample_between_two_powers_of_two(samples: list[float]) -> None:
    bins = runs.histogram(samples)
    assert sum(bins.values()) == len(samples)
    edges = [int(edge) for edge in bins]
    assert edges == sorted(edges)
    for edge in edges:
        inside = [s for s in samples if (edge / 2 < 1e6 * s or edge == 1) and 1e6 * s <= edge]
        assert len(inside) == bins[str(edge)]


def test_facts_of_a_machine_are_those_of_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RDMA_KNOBS:
        monkeypatch.delenv(name, raising=False)
    switch = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    nic, gpu = f"{switch}/0000:02:00.0", f"{switch}/0000:03:00.0"
    far = "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0"
    files = {
        "proc/cpuinfo": "processor: 0\nmodel name\t: Fast CPU 9000\n",
        "sys/devices/system/cpu/cpu3/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/cpu3/node0/distance": "10 32\n",
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
        f"{nic}/numa_node": "1\n",
        f"{nic}/current_link_speed": "32.0 GT/s PCIe\n",
        f"{nic}/current_link_width": "16\n",
        f"{nic}/net/eth4/mtu": "9000\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
        f"{nic}/vendor": "0x15b3\n",
        f"{nic}/class": "0x020000\n",
        f"{gpu}/vendor": "0x10de\n",
        f"{gpu}/class": "0x030200\n",
        f"{gpu}/numa_node": "1\n",
        f"{far}/vendor": "0x10de\n",
        f"{far}/class": "0x030200\n",
        f"{far}/numa_node": "0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sys/class/infiniband/mlx5_0/device").symlink_to(tmp_path / nic)
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    for device in (nic, gpu, far):
        (tmp_path / "sys/bus/pci/devices" / Path(device).name).symlink_to(tmp_path / device)
    facts = machine([3], root=tmp_path)
    assert facts.pop("clock_step_ns") > 0
    bridges = "0000:00:01.0/0000:01:00.0"
    there = {"numa": "1", "numa_distance": "32"}
    port = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link": "Ethernet", "mtu": "9000"}
    assert facts == {
        "kernel": os.uname().release, "cpu": "Fast CPU 9000", "governor": "powersave", "numa": "node0", "clock": "tsc",
        "gpus": [
            {"address": "0000:03:00.0", "pcie_path": f"{bridges}/0000:03:00.0"} | there,
            {"address": "0000:81:00.0", "pcie_path": "0000:80:01.0/0000:81:00.0", "numa": "0", "numa_distance": "10"},
        ],
        "rdma": [
            {"device": "mlx5_0", "pcie": "32.0 GT/s PCIe x16", "pcie_path": f"{bridges}/0000:02:00.0"} | port | there
            | {"shared_with_gpus": {"0000:03:00.0": 2, "0000:81:00.0": 0}}
        ],
    }  # fmt: skip
    assert machine([3], root=tmp_path / "none").keys() == {"kernel", "clock_step_ns"}
    monkeypatch.setenv("LAMINA_RDMA_TRAFFIC_CLASS", "106")
    assert machine([3], root=tmp_path / "none")["rdma_knobs"] == {"LAMINA_RDMA_TRAFFIC_CLASS": "106"}


CHECKED = [(pattern, "native") for pattern in DRIVERS["native"]]
CHECKED += [(pattern, "python") for pattern in PATTERNS if pattern not in ("pair", "rate")]


@pytest.mark.long(but=["client-put_lat-native"])
@pytest.mark.parametrize(("pattern", "driver"), CHECKED)
@pytest.mark.parametrize("wrong_side", ["client", "server"])
def test_a_wrong_payload_is_noticed_on_either_side(
    pattern: str, driver: str, wrong_side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = open_or_skip("shm")
    job = Job(pattern, driver, query=100, rounds=9, window=4)
    a, b = connect(fabric, geometry=job.geometry())
    spoil_payloads(monkeypatch, wrong_side)
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(client_of(job), fabric, [a], job, 1.0)
        with pytest.raises((ValueError, netstack.ChannelError)):
            server_of(job)(fabric, b, job)
        b.close()
        with pytest.raises((ValueError, netstack.ChannelError)):
            client.result(SOON_S)
    fabric.close()


def test_a_short_or_changed_payload_is_told_from_the_right_one() -> None:
    payload = Payloads(64)[0]
    check_bytes(memoryview(payload), 0, payload)
    for bad in (payload[:-1], payload + b"x", bytes(64), Payloads(64)[1]):
        with pytest.raises(ValueError, match="differs"):
            check_bytes(memoryview(bad), 0, payload)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{}", b'{"pattern": 1, "query": "x"}', b'{"pattern": "rtt", "rounds": -1}', b'{"a": 1}', b"\xff",
        b'{"pattern": "rtt", "driver": ["device"]}', b'{"pattern": "pair", "driver": "device"}',
    ],
)  # fmt: skip
def test_what_is_no_job_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        server_of(Job.unpack(text))


def test_jobs_cross_the_wire_unchanged() -> None:
    job = Job("pair", query=5, kv=7, warm_up=1, rounds=2)
    assert Job.unpack(job.pack()) == job
    assert Job.unpack(replace(job, driver="native").pack()).driver == "native"
