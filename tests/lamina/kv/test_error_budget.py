"""The error budget's statistics, by simulation: a bad policy is caught soon, a good one is hardly ever blamed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from lamina.kv.error_budget import CLUMP, MOST_KL, Bet, ErrorWatch, Witness
from lamina.protocol.options.sparsity import ErrorBudget

RUNS = 200
ANSWER = 12  # tokens of each completion
Token = Callable[[random.Random], tuple[bool, float]]


def alarms(
    budget: ErrorBudget,
    completion: Callable[[random.Random], Token],
    tokens: int,
    answer: int = ANSWER,
    together: int = 1000,
) -> int:
    """Of RUNS runs of so many tokens, of completions of ``answer`` tokens, ``together`` of which are one witness."""
    count = 0
    for seed in range(RUNS):
        draw, watch = random.Random(seed), ErrorWatch(budget)
        for number in range(tokens):
            if not number % answer:
                by, token = Witness(), completion(draw)
            elif not number % answer % together:
                by = Witness()
            different, kl = token(draw)
            if watch.add(by, different=different, kl=kl):
                count += 1
                break
    return count


def alike(top1: float, kl: float = 0.0) -> Callable[[random.Random], Token]:
    """Each token by itself. KL as it is: mostly next to nothing, now and then a lot."""

    def token(draw: random.Random) -> tuple[bool, float]:
        return draw.random() < top1, min(MOST_KL, draw.expovariate(1.0)) * (draw.random() < kl / 0.632)

    return lambda _: token


def clumps(share: float, top1: float) -> Callable[[random.Random], Token]:
    """A share of completions has wrong tokens, so many, the others none."""
    return lambda draw: alike(top1 if draw.random() < share else 0.0)(draw)


@pytest.mark.parametrize("top1", [0.02, 0.05, 0.1, 0.3])
def test_ten_points_too_many_are_caught_within_200_tokens_in_99_of_100_runs(top1: float) -> None:
    assert alarms(ErrorBudget(top1=top1, kl=0.9), alike(top1 + 0.1), 200) >= 0.99 * RUNS


@pytest.mark.parametrize("top1", [0.02, 0.05, 0.1, 0.3])
def test_half_of_the_budget_raises_an_alarm_in_one_run_of_100_at_most(top1: float) -> None:
    assert alarms(ErrorBudget(top1=top1, kl=0.05), alike(top1 / 2, 0.025), 1000) <= 0.01 * RUNS


def test_a_kl_that_is_too_large_is_caught_too() -> None:
    budget = ErrorBudget(top1=0.5, kl=0.05)
    assert alarms(budget, alike(0.0, 0.4), 200) >= 0.99 * RUNS
    assert alarms(budget, alike(0.0, 0.025), 1000) <= 0.01 * RUNS


def test_half_of_the_budget_in_clumps_raises_no_alarm_either() -> None:
    """Where one completion in twelve is bad all along."""
    budget = ErrorBudget(top1=0.1)
    assert alarms(budget, clumps(1 / 12, 0.6), 1000, 100) <= 0.01 * RUNS
    assert alarms(budget, clumps(1 / 12, 0.6), 1000, 100, CLUMP) > 0.05 * RUNS, "parts of them are no witnesses"
    assert alarms(budget, clumps(0.8, 0.6), 1000, 100) >= 0.9 * RUNS


def test_who_bets_is_rich_as_seldom_as_is_said() -> None:
    """Ever, in 100 completions that are all wrong or all right: ten times as rich in one run of ten at most."""
    rich = 0
    for seed in range(RUNS):
        draw, bet, most = random.Random(seed), Bet(0.2), 0.0
        for _ in range(100):
            wrong = draw.random() < 0.2
            for number in range(CLUMP):
                bet.add(number, float(wrong * number), wrong)
            most = max(most, bet.gain)
        rich += most > math.log(10.0)
    assert 0 < rich <= 0.1 * RUNS


def test_one_token_cannot_decide_and_nonsense_counts_as_the_worst() -> None:
    watch = ErrorWatch(ErrorBudget(top1=0.5, kl=0.05))
    for number in range(24):
        watch.add(Witness(), different=False, kl=0.0 if number else 1e9)
    assert watch.kl == MOST_KL / 24
    assert not watch.over
    for by in (Witness(), Witness(), Witness()):
        for _ in range(CLUMP):
            watch.add(by, different=False, kl=math.nan)
    assert "nats of KL" in watch.over
    assert watch.add(Witness(), different=False, kl=0.0), "it stays so"


def test_one_completion_cannot_decide() -> None:
    watch, by = ErrorWatch(ErrorBudget(top1=0.1, kl=0.1)), Witness()
    assert not any(watch.add(by, different=True, kl=9.0) for _ in range(1000))
    assert (watch.tokens, watch.top1, watch.kl) == (1000, 1.0, MOST_KL)
