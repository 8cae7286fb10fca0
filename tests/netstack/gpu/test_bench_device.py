"""``python -m lamina.netstack bench --device cuda`` over the stand-in of the CUDA driver.

Covers: netstack/bench/device.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import cuda_stand_in
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wiring import ROOT, SOON_S, connect, open_or_skip, send, spoil_payloads

from lamina import netstack
from lamina.netstack import Channel, Fabric
from lamina.netstack.bench import command as bench
from lamina.netstack.bench import device as bench_device
from lamina.netstack.bench.device import KernelMessage, kernel_launches
from lamina.netstack.bench.job import PAYLOADS, SLOTS, Job
from lamina.netstack.bench.patterns import client_of, server_of
from lamina.netstack.cuda.driver import Driver


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with cuda_stand_in.scheme_of(cuda_stand_in.STAND_IN) as scheme:
        fabric = open_or_skip(scheme)
        yield fabric
        fabric.close()


def run(fabric: Fabric, a: Channel, b: Channel, job: Job) -> list[float]:
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(server_of(job), fabric, b, job)
        samples = client_of(job)(fabric, [a], job, 1.0).samples
        server.result(SOON_S)
    return samples


def test_round_trips_between_processes() -> None:
    line = [sys.executable, "-m", "lamina.netstack", "bench", "--device", "cuda", "--sizes", "8,5000", "--json"]
    with cuda_stand_in.scheme_of(cuda_stand_in.STAND_IN):
        done = subprocess.run(
            [*line, "--count", "30", "--warm-up", "3"],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=90, env=os.environ,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    assert [(row["transport"], row["driver"], row["size"]) for row in rows] == [
        ("cuda", driver, size) for driver in ("device", "kernel") for size in (8, 5000)
    ]
    assert all(0 < row["p50_us"] <= row["max_us"] and row["verified"] for row in rows)


def test_without_a_gpu_it_is_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_LIBCUDA", "/nowhere/libcuda.so.1")
    assert bench.main(["--device", "cuda", "--json"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: transport 'cuda' cannot be used here: /nowhere/libcuda.so.1 does not load")
    assert err.count("\n") == 1


@pytest.mark.parametrize("driver", ["device", "kernel"])
def test_the_calls_of_the_host_go_on_where_the_kernels_ended(fabric: Fabric, driver: str) -> None:
    job = Job("rtt", driver, query=100, warm_up=1, rounds=2 * SLOTS)
    a, b = connect(fabric, geometry=job.geometry())
    for _ in range(2):
        for n in range(SLOTS + 1):
            for sender, receiver in ((a, b), (b, a)):
                send(sender, bytes([n]) * n)
                arrival = receiver.wait_signal(timeout_s=SOON_S)
                assert arrival.data == bytes([n]) * n
                receiver.release(arrival)
        assert len(run(fabric, a, b, job)) == job.rounds


@given(query=st.integers(1, 1 << 30), warm_up=st.integers(0, 3000), rounds=st.integers(1, 3000))
def test_launches_of_the_kernel_count_every_round_and_keep_few_messages(query: int, warm_up: int, rounds: int) -> None:
    launches = kernel_launches(Job("rtt", "kernel", query=query, warm_up=warm_up, rounds=rounds))
    assert sum(launch.rounds - launch.skipped for launch in launches) == rounds
    assert sum(launch.skipped for launch in launches) >= max(1, warm_up)
    assert all(launch.skipped >= 1 for launch in launches), "each begins with a wait for the other side's launch"
    assert max(launch.rounds for launch in launches) * query <= max(bench_device.KEPT_BYTES, PAYLOADS * query) + query
    held, number = dict[tuple[str, int], int](), 0
    for launch in launches[:50]:
        assert launch.first == number
        for n in range(launch.rounds):
            for place in (("target", n), ("slot", number % SLOTS)):
                assert held.get(place) != number % PAYLOADS, "old bytes would pass for new ones"
                held[place] = number % PAYLOADS
            number += 1


def test_memory_of_the_kernel_is_bounded(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    job, room = Job("rtt", "kernel", query=1000, warm_up=7, rounds=40), 9000
    a, b = connect(fabric, geometry=job.geometry())
    real, asked = Driver.allocate, list[int]()

    def counted(self: Driver, data: bytes, nbytes: int = 0) -> int:
        asked.append(max(len(data), nbytes))
        return real(self, data, nbytes)

    monkeypatch.setattr(bench_device, "KEPT_BYTES", room)
    monkeypatch.setattr(Driver, "allocate", counted)
    assert len(run(fabric, a, b, job)) == job.rounds
    assert len(asked) == 6, "payloads, what came, and the clock, of two sides"
    assert sorted(asked)[-2:] == [room + 1000, room + 1000]


@pytest.mark.parametrize("slow_side", ["client", "server"])
def test_the_clock_runs_between_the_kernels_alone(
    fabric: Fabric, slow_side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of the client's host is not in it, however long it takes; what delays the answer is."""
    job = Job("rtt", "device", query=64, rounds=4)
    a, b = connect(fabric, geometry=job.geometry())
    real, client = KernelMessage.check, threading.current_thread()

    def slow(self: KernelMessage, n: int, payload: bytes, peer: str) -> float:
        if (threading.current_thread() is client) == (slow_side == "client"):
            threading.Event().wait(0.2)
        return real(self, n, payload, peer)

    monkeypatch.setattr(KernelMessage, "check", slow)
    assert [s > 0.1 for s in run(fabric, a, b, job)[1:]] == [slow_side == "server"] * 3


@pytest.mark.parametrize("driver", ["device", "kernel"])
@pytest.mark.parametrize("wrong_side", ["client", "server"])
def test_a_wrong_payload_is_noticed_on_either_side(
    fabric: Fabric, driver: str, wrong_side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("rtt", driver, query=100, rounds=9)
    a, b = connect(fabric, geometry=job.geometry())
    monkeypatch.setattr(bench_device, "TIMEOUT_NS", 500_000_000)
    spoil_payloads(monkeypatch, wrong_side)
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(client_of(job), fabric, [a], job, 1.0)
        with pytest.raises(ValueError, match="differs"):
            server_of(job)(fabric, b, job)
        b.close()
        # The kernel of all rounds has every answer before the server compares: its client misses the outcome instead.
        ends = pytest.raises((ValueError, netstack.ChannelError)) if driver == "device" else nullcontext()
        with ends:
            client.result(SOON_S)
