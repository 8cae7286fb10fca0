"""The error budget's statistics, by simulation: a bad policy is caught soon, a good one is hardly ever blamed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from scipy.stats import beta

from lamina.kv.error_budget import MOST_KL, ErrorWatch, chance, mean_at_least
from lamina.protocol.options.sparsity import ErrorBudget

RUNS = 300
Token = Callable[[random.Random], tuple[bool, float]]


def alarms(budget: ErrorBudget, token: Token, tokens: int) -> int:
    """Of RUNS runs of so many tokens."""
    count = 0
    for seed in range(RUNS):
        draw, watch = random.Random(seed), ErrorWatch(budget)
        for _ in range(tokens):
            different, kl = token(draw)
            if watch.add(different=different, kl=kl):
                count += 1
                break
    return count


def rates(top1: float, kl: float = 0.0) -> Token:
    """KL as it is: mostly next to nothing, now and then a lot."""
    return lambda draw: (draw.random() < top1, min(MOST_KL, draw.expovariate(1.0)) * (draw.random() < kl / 0.632))


@pytest.mark.parametrize("top1", [0.02, 0.05, 0.1, 0.3])
def test_ten_points_too_many_are_caught_within_200_tokens_in_99_of_100_runs(top1: float) -> None:
    assert alarms(ErrorBudget(top1=top1, kl=0.9), rates(top1 + 0.1), 200) >= 0.99 * RUNS


@pytest.mark.parametrize("top1", [0.02, 0.05, 0.1, 0.3])
def test_half_of_the_budget_raises_an_alarm_in_one_run_of_100_at_most(top1: float) -> None:
    """Over 2,000 tokens, at which one has looked 80 times."""
    assert alarms(ErrorBudget(top1=top1, kl=0.05), rates(top1 / 2, 0.025), 2000) <= 0.01 * RUNS


def test_a_kl_that_is_too_large_is_caught_too() -> None:
    budget = ErrorBudget(top1=0.5, kl=0.05)
    assert alarms(budget, rates(0.0, 0.4), 200) >= 0.99 * RUNS
    assert alarms(budget, rates(0.0, 0.025), 2000) <= 0.01 * RUNS


def test_without_a_correction_for_looks_half_of_the_budget_would_be_blamed_too_often() -> None:
    """What the correction is for: the same looks, each at the whole risk."""
    count = 0
    for seed in range(RUNS):
        draw, hits = random.Random(seed), 0
        for token in range(1, 3001):
            hits += draw.random() < 0.05
            if token % 25 == 0 and chance(hits, token, 0.05) < 0.01:
                count += 1
                break
    assert count > 0.02 * RUNS


@pytest.mark.parametrize(("hits", "tries"), [(1, 10), (10, 10), (37, 200), (3, 5000)])
@pytest.mark.parametrize("risk", [0.05, 1e-5])
def test_chances_bound_rates_as_clopper_and_pearson_say(hits: int, tries: int, risk: float) -> None:
    least, most = beta.ppf(risk, hits, tries - hits + 1), beta.ppf(1 - risk, hits + 1, tries - hits)
    assert chance(hits, tries, least) == pytest.approx(risk, rel=1e-6)
    if hits < tries:
        assert chance(tries - hits, tries, 1.0 - most) == pytest.approx(risk, rel=1e-6)


def test_the_bound_of_a_mean_holds_and_comes_closer() -> None:
    wrong, bounds = 0, list[float]()
    for seed in range(RUNS):
        draw = random.Random(seed)
        for count in (50, 5000):
            x = [draw.random() ** 3 for _ in range(count)]  # mean 1/4
            mean = sum(x) / count
            variance = sum((y - mean) ** 2 for y in x) / (count - 1)
            bounds.append(mean_at_least(mean, variance, count, 1.0, 0.05))
            wrong += bounds[-1] > 0.25
        if seed == 20:
            assert bounds[-1] > 0.22 > bounds[-2]
            break
    assert wrong <= 2


def test_one_token_cannot_decide_and_nonsense_counts_as_the_worst() -> None:
    watch = ErrorWatch(ErrorBudget(top1=0.5, kl=0.05))
    for _ in range(24):
        watch.add(different=False, kl=0.0)
    assert not watch.add(different=False, kl=1e9)
    assert watch.kl == MOST_KL / 25
    for _ in range(50):
        watch.add(different=False, kl=math.nan)
    assert "nats of KL" in watch.over
    assert watch.add(different=False, kl=0.0), "it stays so"
