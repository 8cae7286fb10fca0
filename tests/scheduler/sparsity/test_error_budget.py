"""The error budget's statistics, by simulation: a bad policy is caught soon, a good one is hardly ever blamed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from lamina.config.sparsity import ErrorBudget
from lamina.scheduler.sparsity.error_budget import MAX_KL, MIN_TOKENS, CompletionErrors, ErrorMonitor, SequentialTest

RUNS = 200
ANSWER = 12  # tokens of a completion
Shown = list[tuple[bool, float]]  # by the tokens of a completion
Completion = Callable[[random.Random], Shown]


class HastyWatch(ErrorMonitor):
    """Takes what it has seen of a completion for all that there will be."""

    def _check(self) -> str:
        rich = self._top1.log_wealth((by.tokens, by.num_top1_changed) for by in self._open) > math.log(200.0)
        return "hasty" * (rich and self.top1 > self._budget.top1)


def alarms(
    budget: ErrorBudget,
    completion: Completion,
    tokens: int,
    at_once: int = 1,
    *,
    part: int = 1000,
    runs: int = RUNS,
    kind: type[ErrorMonitor] = ErrorMonitor,
) -> int:
    """Counts the alarms of so many runs of so many tokens, of ``at_once`` completions that begin together, and of later
    ones. ``part``: so many tokens of a completion are a witness by themselves.
    """
    count = 0
    for seed in range(runs):
        draw, watch = random.Random(seed), kind(budget)
        slots: list[tuple[Shown, CompletionErrors]] = [([], CompletionErrors(0)) for _ in range(at_once)]
        for number in range(tokens):
            left, by = slots[number % at_once]
            if not left:
                left = completion(draw)
            if by.tokens == by.max_tokens:
                by = CompletionErrors(min(part, len(left)))
            slots[number % at_once] = left, by
            different, kl = left.pop(0)
            if watch.add(by, top1_changed=different, kl=kl):
                count += 1
                break
    return count


def alike(top1: float, kl: float = 0.0, answer: int = ANSWER) -> Completion:
    """Each token by itself. KL as it is: mostly next to nothing, now and then a lot."""

    def token(draw: random.Random) -> tuple[bool, float]:
        return draw.random() < top1, min(MAX_KL, draw.expovariate(1.0)) * (draw.random() < kl / 0.632)

    return lambda draw: [token(draw) for _ in range(answer)]


def clumps(share: float, top1: float) -> Completion:
    """A share of completions, of 100 tokens, has wrong tokens, so many, the others none."""
    return lambda draw: alike(top1 if draw.random() < share else 0.0, answer=100)(draw)


def at_first(completion: Completion) -> Completion:
    """The same with all wrong tokens before all others."""
    return lambda draw: sorted(completion(draw), reverse=True)


def short_ones(draw: random.Random) -> Shown:
    """Half of all completions have CLUMP tokens, of which a tenth is wrong; none is in the others, which take long."""
    return alike(0.1, answer=MIN_TOKENS)(draw) if draw.random() < 0.5 else [(False, 0.0)] * 400


@pytest.mark.parametrize("top1", [0.02, 0.05, 0.1, 0.3])
def test_ten_points_too_many_are_caught_within_200_tokens_in_99_of_100_runs(top1: float) -> None:
    assert alarms(ErrorBudget(top1=top1, kl=0.9), alike(top1 + 0.1), 200) >= 0.99 * RUNS


@pytest.mark.long(but=["0.02"])
@pytest.mark.parametrize("top1", [0.02, 0.05, 0.1, 0.3])
def test_half_of_the_budget_raises_an_alarm_in_one_run_of_100_at_most(top1: float) -> None:
    assert alarms(ErrorBudget(top1=top1, kl=0.05), alike(top1 / 2, 0.025), 1000) <= 0.01 * RUNS


def test_a_kl_that_is_too_large_is_caught_too() -> None:
    budget = ErrorBudget(top1=0.5, kl=0.05)
    assert alarms(budget, alike(0.0, 0.4), 200) >= 0.99 * RUNS
    assert alarms(budget, alike(0.0, 0.025), 1000) <= 0.01 * RUNS


@pytest.mark.long
def test_half_of_the_budget_in_clumps_raises_no_alarm_either() -> None:
    """One completion in twelve is bad all along."""
    budget = ErrorBudget(top1=0.1)
    assert alarms(budget, clumps(1 / 12, 0.6), 1000) <= 0.01 * RUNS
    assert alarms(budget, clumps(1 / 12, 0.6), 1000, part=MIN_TOKENS) > 0.05 * RUNS, "parts of them are no witnesses"
    assert alarms(budget, clumps(0.8, 0.6), 1000) >= 0.9 * RUNS


FIRST = at_first(alike(0.05, answer=100))


@pytest.mark.long(but=["short"])
@pytest.mark.parametrize(
    "completion", [FIRST, at_first(clumps(1 / 12, 0.6)), short_ones], ids=["alike", "clumps", "short"]
)
def test_half_of_the_budget_raises_none_wherever_it_lies_however_many_go_on_at_once(completion: Completion) -> None:
    assert alarms(ErrorBudget(top1=0.1), completion, 1600, 8, runs=100) <= 1


def test_who_took_what_is_seen_in_the_midst_for_all_would_raise_many() -> None:
    assert alarms(ErrorBudget(top1=0.1), FIRST, 400, 8, runs=20, kind=HastyWatch) > 10


def test_who_bets_is_rich_as_seldom_as_is_said() -> None:
    """Ever, in 100 completions that are all wrong or all right: ten times as rich in one run of ten at most."""
    rich = 0
    for seed in range(RUNS):
        draw, bet, most = random.Random(seed), SequentialTest(0.2), 0.0
        for _ in range(100):
            bet.add_completion(MIN_TOKENS, MIN_TOKENS * (draw.random() < 0.2))
            most = max(most, bet.log_wealth([]))
        rich += most > math.log(10.0)
    assert 0 < rich <= 0.1 * RUNS


def test_one_that_goes_on_counts_by_the_least_that_it_can_come_to() -> None:
    """So whatever its tokens to come are, one is no poorer at its end."""
    bet = SequentialTest(0.1)
    bet.add_completion(50, 20.0)
    before = bet.log_wealth([])
    assert bet.log_wealth([(100, 5.0)]) == before, "who goes on with nothing to show takes nothing away"
    assert bet.log_wealth([(100, 5.0), (100, 90.0)]) > before, "nor does it hide who began behind it"
    for count, total in ((100, 40.0), (60, 40.0), (41, 40.0), (100, 70.0)):
        assert bet.log_wealth([(count, total)]) >= bet.log_wealth([(100, 40.0)]) > before


def test_one_that_gave_way_counts_for_nothing_and_one_that_ended_early_for_what_it_was() -> None:
    budget = ErrorBudget(top1=0.1)
    for whole in (True, False):
        watch, first, last = ErrorMonitor(budget), [CompletionErrors(1000) for _ in range(3)], CompletionErrors(1)
        for by in first:
            assert not any(watch.add(by, top1_changed=True, kl=0.0) for _ in range(50)), "they may become right"
        for by in first:
            by.end(whole=whole)
        assert watch.add(last, top1_changed=False, kl=0.0) == whole


def test_one_token_cannot_decide_and_nonsense_counts_as_the_worst() -> None:
    watch = ErrorMonitor(ErrorBudget(top1=0.5, kl=0.05))
    for number in range(24):
        watch.add(CompletionErrors(1), top1_changed=False, kl=0.0 if number else 1e9)
    assert watch.kl == MAX_KL / 24
    assert not watch.alarm
    for by in (CompletionErrors(MIN_TOKENS), CompletionErrors(MIN_TOKENS), CompletionErrors(MIN_TOKENS)):
        for _ in range(MIN_TOKENS):
            watch.add(by, top1_changed=False, kl=math.nan)
    assert "nats of KL" in watch.alarm
    assert watch.add(CompletionErrors(1), top1_changed=False, kl=0.0), "it stays so"


def test_one_completion_cannot_decide() -> None:
    watch, by = ErrorMonitor(ErrorBudget(top1=0.1, kl=0.1)), CompletionErrors(1000)
    assert not any(watch.add(by, top1_changed=True, kl=9.0) for _ in range(1000))
    assert (watch.tokens, watch.top1, watch.kl) == (1000, 1.0, MAX_KL)
