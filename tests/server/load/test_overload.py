"""The short form of perf/bench_serve_load.py: overload is refused, and clients that leave take all their state with
them.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from running import ROOT, Running

pytestmark = pytest.mark.timeout(300)  # starting a server on a busy machine takes its time


@pytest.fixture
def load(server: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "perf"))
    import bench_serve_load

    yield bench_serve_load.ServerLoad(server.url, "tiny", input_len=16, output_len=8, vocab=2000)
    del sys.modules["bench_serve_load"]


@pytest.mark.long
def test_overload_is_refused_and_goodput_stays(load: Any, server: Running) -> None:
    import bench_serve_load

    async def work() -> tuple[dict[str, float], dict[str, float]]:
        peak = await load.peak(8, 3.0)
        return peak, await load.overload(max(8.0, 4 * peak["requests_per_s"]), 40, 3.0)

    with bench_serve_load.probing(server.url) as health:
        peak, overload = asyncio.run(work())
    assert peak["failed"] == overload["failed"] == health["not_200"] == 0
    assert overload["refused"] > 0
    assert overload["served"] + overload["refused"] + overload["not_sent"] == overload["offered"]
    assert overload["tokens_per_s"] >= 0.2 * peak["tokens_per_s"], "0.9 is held on a machine of its own, in minutes"
    assert health["count"] >= 10
    assert health["p99_ms"] < 2000, "200 on a machine of its own"


@pytest.mark.no_retry
def test_nothing_is_left_of_clients_that_leave(load: Any) -> None:
    found = asyncio.run(load.mixture(80, 8))
    assert found["failed"] == found["kv_blocks_left"] == 0
    assert found["left"] > 5
    assert found["wrong"] > 1
    assert found["served"] > 20
    assert sum(found[k] for k in ("served", "left", "wrong", "refused")) == 80
