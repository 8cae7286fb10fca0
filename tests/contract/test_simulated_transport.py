"""The contract of channels, of those that simulated processes have: the suite of all transports, on a virtual clock."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import test_transports as contract
from simulation.whole.baton import Baton, LongLife
from simulation.whole.network import SimFabric

from lamina.tools.plan.simulator.clock import VirtualClock

REAL = (  # of a real process, seconds of a real clock, and kernels
    "test_a_signal_handler_can_end_a_wait", "test_a_closed_channel_holds_no_descriptor", "test_stats_count_payloads",
    "test_a_fabric_is_closed_at_once_whichever_peers_its_kernels_wait_for",
)  # fmt: skip
GIVEN = {"pair", "fabric", "transport"}  # what a test may ask for here


def cases() -> Iterator[Any]:
    for name, test in vars(contract).items():
        if not name.startswith("test_") or name in REAL:
            continue
        marks = [
            m.args for m in getattr(test, "pytestmark", []) if m.name == "parametrize" and m.args[0] != "transport"
        ]
        wanted = set(inspect.signature(test).parameters) - {names for names, _ in marks}
        if wanted and wanted <= GIVEN:
            for values in product(*(values for _, values in marks)):
                more = dict(zip((names for names, _ in marks), values, strict=True))
                yield pytest.param(test, wanted, more, id="-".join([name, *map(str, values)]))


@pytest.mark.parametrize(("test", "wanted", "more"), list(cases()))
def test_the_contract_holds(
    test: Callable[..., None], wanted: set[str], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    baton = Baton(VirtualClock(), rng)

    class Task(contract.Task):
        """On a thread that waits for the baton."""

        def __init__(self, call: Callable[[], Any]) -> None:
            self._call, self._result, self._error, self._done = call, None, None, False
            baton.start(self._run, "task", LongLife())

        def _run(self) -> None:
            super()._run()
            self._done = True

        def until_asleep(self) -> Task:
            baton.sleep(0.01)
            return self

        def join(self, timeout_s: float = contract.LONG_S / 2) -> Any:
            assert baton.wait(lambda: self._done, timeout_s), f"still waiting after {timeout_s} s"
            if self._error is not None:
                raise self._error
            return self._result

    def open_simulated(scheme: str, key: bytes = contract.KEY, gpu: int | None = None) -> SimFabric:
        return SimFabric(key, baton, lambda: rng.uniform(0.0, 0.005), None)

    @contextmanager
    def same(transport: str) -> Iterator[str]:
        yield transport

    monkeypatch.setattr(contract, "Task", Task)
    monkeypatch.setattr(contract, "time", SimpleNamespace(monotonic=baton.clock, sleep=baton.sleep))
    monkeypatch.setattr(contract, "open_or_skip", open_simulated)
    monkeypatch.setattr(contract, "scheme_of", same)
    fabric = open_simulated("")
    try:
        if "pair" in wanted:
            more["pair"] = contract.connect(fabric, fabric.listen())
        if "fabric" in wanted:
            more["fabric"] = fabric
        if "transport" in wanted:
            more["transport"] = "loopback"
        test(**more)
    finally:
        fabric.close()
        baton.cut()


def test_the_suite_is_there() -> None:
    assert len(list(cases())) > 35
