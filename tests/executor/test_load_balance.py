"""Memory workers' parts of the work follow what their attention reads a second, and no noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lamina.executor import load_balance
from lamina.executor.load_balance import (
    BYTES_PER_LAYER_CALL,
    COOLDOWN_S,
    IMBALANCE_THRESHOLD,
    INTERVAL_S,
    MIN_WEIGHT,
    NUM_INTERVALS,
    LoadBalancer,
    imbalance,
    rebalanced_weights,
    weights_of,
)

Speeds = Callable[[float], Sequence[float]]  # seconds -> of each worker, bytes a second
HALF_AN_HOUR = 1800.0
LOOK_S = 1.2


class Attending:
    """Memory workers that attend in turns of so many bytes, together; each by its part. ``noise`` holds for a stretch,
    at its bounds as often as between them.
    """

    def __init__(self, speeds: Speeds, seed: int = 0, *, noise: float = 0.1, bytes_of_turn: float = 40e6) -> None:
        self.now = 0.0
        self.speeds, self.noise, self.bytes_of_turn = speeds, noise, bytes_of_turn
        self.rng = random.Random(seed)
        count = len(speeds(0.0))
        self.weights = [1.0] * count
        self.shares = LoadBalancer(1, lambda: self.now)
        self.counters = [dict.fromkeys(("stored_bytes", "attend_s", "turns"), 0.0) for _ in range(count)]
        self.changes: list[tuple[float, list[float]]] = []
        self._noisy_until, self._errors = 0.0, [1.0] * count

    def run(self, until_s: float, *, turns_s: float = 20.0) -> None:
        while self.now < until_s:
            self.now += LOOK_S
            if self.now >= self._noisy_until:
                draw = (
                    (lambda: self.rng.choice((-1, 1))) if self.rng.random() < 0.5 else (lambda: self.rng.uniform(-1, 1))
                )
                self._errors = [1.0 + self.noise * draw() for _ in self.weights]
                self._noisy_until += INTERVAL_S
            for i, (speed, error) in enumerate(zip(self.speeds(self.now), self._errors, strict=True)):
                nbytes = turns_s * LOOK_S * self.bytes_of_turn * self.weights[i] / sum(self.weights)
                self.counters[i]["stored_bytes"] += nbytes
                self.counters[i]["attend_s"] += nbytes / (speed * error)
                self.counters[i]["turns"] += turns_s * LOOK_S
            if (wanted := self.shares.rebalance(self.weights, self.counters)) is not None:
                self.changes.append((self.now, wanted))
                self.weights = wanted


@pytest.mark.parametrize("count", [2, 3, 8])
def test_noise_of_a_tenth_moves_nothing(count: int) -> None:
    for seed in range(20):
        pools = Attending(lambda now: [1e9] * count, seed)
        pools.run(HALF_AN_HOUR)
        assert pools.changes == [], seed


@pytest.mark.long(but=["0.5-2", "0.5-3", "0.5-8"])
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("part", [0.5, 0.25, 0.12])
def test_one_that_is_throttled_loses_a_part_once_and_has_it_back_once(count: int, part: float) -> None:
    """Throttled for ten minutes, in half an hour, under noise."""
    for seed in range(10):
        pools = Attending(lambda now: [1e9] * (count - 1) + [1e9 * (part if 600 < now < 1200 else 1.0)], seed)
        pools.run(HALF_AN_HOUR)
        (lost_at, lost), (back_at, back) = pools.changes
        assert 600 < lost_at < 600 + (NUM_INTERVALS + 2) * (INTERVAL_S + LOOK_S), "soon"
        assert max(lost[:-1]) == 1.0
        assert part / 1.3 < lost[-1] < part * 1.3, lost
        assert 1200 < back_at < 1500, "of a part that noise has made larger, not every stretch says so"
        assert min(back) >= 0.8, back


@pytest.mark.long(but=["0.95", "0.85", "0.75", "0.65", "0.45"])
@pytest.mark.parametrize("speed", [0.95, 0.85, 0.75, 0.65, 0.45, 0.35, 0.33, 0.25, 0.15, 0.11, 0.05])
def test_no_speed_makes_parts_go_to_and_fro(speed: float) -> None:
    """Wherever it lies between two parts."""
    for seed in range(10):
        pools = Attending(lambda now: [1e9, speed * 1e9], seed)
        pools.run(HALF_AN_HOUR)
        assert len(pools.changes) <= 1, pools.changes


def test_a_stretch_or_two_say_nothing() -> None:
    pools = Attending(lambda now: [1e9, 1e9 if now % 60 > 20 else 2e8], noise=0.0)
    pools.run(HALF_AN_HOUR)
    assert pools.changes == []


def test_behind_a_change_there_is_rest() -> None:
    pools = Attending(lambda now: [1e9, 1e9 if now > 50 else 4e8], noise=0.0)
    pools.run(HALF_AN_HOUR)
    (first, _), (second, _) = pools.changes
    assert first < 50
    assert first + COOLDOWN_S <= second < first + COOLDOWN_S + INTERVAL_S + LOOK_S


@pytest.mark.parametrize(
    "options",
    [{"bytes_of_turn": 1.9 * BYTES_PER_LAYER_CALL}, {"turns_s": 1.0}, {"turns_s": 0.0}],
    ids=["calls, not memory", "hardly ever", "never"],
)
def test_who_reads_little_keeps_its_part(options: dict[str, Any]) -> None:
    turns = {"turns_s": options.pop("turns_s")} if "turns_s" in options else {}
    pools = Attending(lambda now: [1e9, 5e8], noise=0.0, **options)
    pools.run(HALF_AN_HOUR, **turns)
    assert pools.changes == []


def test_one_in_the_place_of_another_begins_anew() -> None:
    pools = Attending(lambda now: [1e9, 5e8], noise=0.0)
    pools.run(14.0)
    pools.counters[1] = dict.fromkeys(pools.counters[1], 0.0)
    pools.run(14.0 + NUM_INTERVALS * INTERVAL_S)
    assert pools.changes == []
    pools.run(14.0 + (NUM_INTERVALS + 2) * (INTERVAL_S + LOOK_S))
    assert [weights for _, weights in pools.changes] == [[1.0, 0.5]]


def test_a_rank_is_as_fast_as_its_slowest() -> None:
    """Memory worker w is rank w mod 2's: 0 and 1 have the same tokens, of other heads; so have 2 and 3."""
    pools = Attending(lambda now: [1e9, 1e9, 1e9, 5e8], noise=0.0)
    pools.shares = LoadBalancer(2, lambda: pools.now)
    pools.run(60.0)
    assert [weights for _, weights in pools.changes] == [[1.0, 1.0, 0.5, 0.5]]


def test_apart_is_by_part() -> None:
    assert imbalance([10.0, 10.0], [1.0, 1.0]) == 1.0
    assert imbalance([10.0, 5.0], [2.0, 1.0]) == 1.0
    assert imbalance([10.0, 5.0], [1.0, 1.0]) == 2.0
    assert imbalance([10.0, 10.0], [2.0, 1.0]) == 2.0
    assert imbalance([10.0, 0.1], [1.0, MIN_WEIGHT]) == 1.0, "it can have no less"
    assert 1.1 / 0.9 < IMBALANCE_THRESHOLD < 0.9 / (0.5 * 1.1), "no noise of a tenth, and any half in spite of it"


@pytest.mark.parametrize(("rate", "weight"), [(0.96, 1.0), (0.94, 0.9), (0.36, 0.4), (0.34, 0.34), (0.14, 0.14)])
def test_small_parts_are_finer(rate: float, weight: float) -> None:
    assert weights_of([rate * 7e9, 7e9]) == [weight, 1.0]


def test_stretches_are_cut_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_balance, "INTERVAL_S", 50.0)
    pools = Attending(lambda now: [1e9, 5e8], noise=0.0)
    pools.run(249.0)
    assert pools.changes == []
    pools.run(260.0)
    assert len(pools.changes) == 1


@pytest.mark.parametrize(
    ("speeds", "weights", "parts"),
    [
        ([1.0, 0.5], [1.0, 1.0], [1.0, 0.5]),
        ([1.0, 0.95], [1.0, 0.5], [1.0, 1.0]),
        ([1.0, 0.9, 0.5], [1.0, 1.0, 1.0], [1.0, 1.0, 0.6]),
        ([1.0, 0.31, 0.15], [1.0, 0.3, 0.3], [1.0, 0.3, 0.15]),
        ([1.0, 0.5, 0.5], [1.0, 1.0, 1.0], [1.0, 0.5, 0.5]),
        ([0.5, 1.0, 0.02], [2.0, 2.0, 2.0], [0.5, 1.0, MIN_WEIGHT]),
    ],
)
def test_who_is_as_fast_as_most_keeps_its_part(speeds: list[float], weights: list[float], parts: list[float]) -> None:
    assert rebalanced_weights(speeds, weights) == parts
