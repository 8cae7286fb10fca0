"""perf/gpu/network.py over the stand-in of the driver: the same kernels, graphs and NICs, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from time import monotonic
from types import ModuleType
from typing import Any

import cuda_stand_in
import pytest
import torch
from wiring import ROOT

from lamina.netstack.cuda.driver import Driver

native = pytest.importorskip("soft_nic._native", reason="its native module is not built")


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "perf"))
    with cuda_stand_in.scheme_of(cuda_stand_in.STAND_IN):
        from gpu import network

        yield network


def test_every_row(suite: ModuleType) -> None:
    found = suite.network(count=40, rounds=4)
    assert found["graph"]["from index"] + 2 * 40 > 0xFFFF, "across the end of the 16-bit indices"
    assert found["graph"]["laps of the ring"] == 10
    for size in ("64 B", "4096 B", "16384 B"):
        row = found[size]
        assert row["host/device"] == pytest.approx(row["host_us"] / row["device_us"])
    assert len(found["steps"]) == 6
    for size in ("64 B", "16384 B"):
        row = found[f"{size} during products"]
        assert min(row["us"], row["quiet_us"], row["gflop/s alone"]) > 0.0


def test_products_that_fail_are_told(suite: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with suite.GpuProducts(cpu) as products:
        done = products.done
        assert done > 0
        assert products.rate(lambda: None)[1] >= 0.0
    assert products.running.done()
    monkeypatch.setattr(suite, "START_S", 0.5)
    monkeypatch.setattr(torch, "mm", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), suite.GpuProducts(cpu):
        pass


def test_a_wrong_byte_and_a_failed_kernel_are_noticed(suite: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def send_beside(side: Any) -> None:
        at = side.mail.address
        rest = at, at + 8, suite.TIMEOUT_NS, at + 40
        side.driver.launch(side.stream.number, "mlx5_send", side.channel, at + 4097, *rest)

    monkeypatch.setattr(suite, "TIMEOUT_NS", 300_000_000)
    with closing(Driver()) as driver:
        with monkeypatch.context() as patch:
            patch.setattr(suite.Side, "send", send_beside)
            with pytest.raises(RuntimeError, match="replay"):
                suite.replays(driver, 8)
        with pytest.raises(RuntimeError, match="status 4"):
            suite.device_driven(driver, suite.ROOM + 1, 1)


def test_a_step_of_a_graph_sends_two_and_takes_what_is_due(suite: ModuleType) -> None:
    """The layers of a step do so over ``cuda``: the same kernels, over a NIC."""
    with closing(Driver()) as driver, suite.pair(driver) as (a, b):
        at, to = a.mail.address, b.mail.address
        a.mail.view[:32] = (3000).to_bytes(8, "little") + (5).to_bytes(8, "little") + b"a tag".ljust(16, b"\0")
        a.mail.view[4096:7096], a.mail.view[8192:8197] = b"k" * 3000, b"value"
        b.mail.view[:8], b.mail.view[8:24] = (3005).to_bytes(8, "little"), b"a tag".ljust(16, b"\0")
        with a.stream.capture() as sends, b.stream.capture() as takes:
            words = at, at + 16, suite.TIMEOUT_NS, at + 960
            driver.launch(a.stream.number, "mlx5_send_two", a.channel, at + 4096, at + 8192, *words)
            words = to, to + 8, to + 512, suite.TIMEOUT_NS, to + 40
            driver.launch(b.stream.number, "mlx5_receive_due", b.channel, to + 4096, *words)
        with closing(sends), closing(takes):
            for n in range(20):
                b.mail.view[4096:7101] = bytes(3005)
                takes.replay(b.stream)
                sends.replay(a.stream)
                for side in (a, b):
                    side.stream.synchronize()
                assert (a.mail.view[960], b.status, n) == (0, 0, n)
                assert b.mail.view[4096:7101] == b"k" * 3000 + b"value"
        b.mail.view[:8] = (3004).to_bytes(8, "little")
        driver.launch(
            a.stream.number, "mlx5_send_two", a.channel, at + 4096, at + 8192, at, at + 16, suite.TIMEOUT_NS, at + 960
        )
        driver.launch(b.stream.number, "mlx5_receive_due", b.channel, to + 4096, *words)
        b.stream.synchronize()
        assert b.status == native.FAULT, "another message than was due"


def test_a_kernel_that_waits_hears_of_its_failed_queue(suite: ModuleType) -> None:
    """The answer to a message that the NIC could not deliver never comes: not after the timeout, but at once."""
    with closing(Driver()) as driver, suite.pair(driver) as (a, b):
        for sender, receiver in ((a, b), (b, a)):
            sender.set(8)
            sender.send()
            receiver.receive()
            receiver.stream.synchronize()
        channel = suite.CHANNEL.unpack(driver.read(a.channel, suite.CHANNEL.nbytes))
        wrong = {"peer.key": channel["peer.key"] ^ 1}
        driver.write(a.channel, suite.CHANNEL.pack(channel | wrong))
        start = monotonic()
        a.set(8)
        a.send()
        a.receive()
        a.stream.synchronize()
        assert a.status == native.FAILED
        assert monotonic() - start < suite.TIMEOUT_S / 2
