"""perf/bench_decode.py: whose time a turn takes, and who may be left out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "perf"))
    return pytest.importorskip("bench_decode")


class Ahead:
    """A clock, and an engine that is one step ahead of its reports."""

    has_work = True

    def __init__(self, seconds: list[float]) -> None:
        self.now = self.under_way_until = 0.0
        self._seconds = iter(seconds)

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def step(self) -> list[Any]:
        self.now = max(self.now, self.under_way_until)
        self.under_way_until = self.now + next(self._seconds)
        return [object()]


def test_a_turn_of_lamina_takes_nothing_of_the_next_ones(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = Ahead([1.0, 1.0, 2.0, 1.0, 2.0])
    monkeypatch.setattr(bench, "time", ahead)
    player = bench.DecodeLamina.__new__(bench.DecodeLamina)
    player.engine, player.batch = ahead, 1
    assert player.turn(3) == [1.0, 1.0, 2.0]
    assert ahead.now >= ahead.under_way_until


class Steady:
    """A player of a given speed."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.prompts_s = seconds, 9.0 * seconds
        self.llm = SimpleNamespace(
            stats=dict[str, dict[str, float]],
            engine=SimpleNamespace(worker_info=SimpleNamespace(summary={"convert_s": 0.0})),
        )

    def turn(self, steps: int) -> list[float]:
        return [self._seconds] * steps


def test_whoever_else_is_left_out_the_rest_is_compared(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REST_S", 0.0)
    players = {"lamina shm": Steady(1.0), "vllm": Steady(2.0)}
    found = bench.run_rounds(players, 1, 4)
    assert found["speed_of_lamina_shm"] == {"vllm": 2.0}
    assert found["prompts_s"] == {"lamina shm": 9.0, "vllm": 18.0}
    assert found["disaggregation_tax"] is found["cost_of_deterministic"] is None
    players["lamina loopback"] = Steady(0.5)
    assert bench.run_rounds(players, 1, 4)["disaggregation_tax"] == 1.0


def test_who_is_compared_takes_part(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_decode.py", "--without", "vllm,lamina shm"])
    with pytest.raises(SystemExit, match="^--without lamina shm: all others are compared with it"):
        bench.main()


def test_filters_of_nothing_sampled_are_refused(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_decode.py", "--top-p", "0.9"])
    with pytest.raises(SystemExit, match="give --temperature too"):
        bench.main()


def test_sampling_costs_what_it_takes_beyond_greedy(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REST_S", 0.0)
    players = {"lamina shm": Steady(1.5), "lamina greedy": Steady(1.0)}
    assert bench.run_rounds(players, 1, 4)["cost_of_sampling"] == 0.5
    assert bench.run_rounds({"lamina shm": Steady(1.5)}, 1, 4)["cost_of_sampling"] is None
