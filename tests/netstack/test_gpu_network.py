"""perf/gpu/network.py over the stand-in of the driver: the same kernels, graphs and NICs, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import cuda_stand_in
import pytest
from wiring import ROOT

from lamina.netstack.cuda.driver import Driver

pytest.importorskip("lamina.netstack.nic_model._native", reason="its native module is not built")


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
