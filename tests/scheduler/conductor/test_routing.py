"""The choice of a prefill worker: Algorithm 1 against a literal transcription, tables by hand, laws of its prices."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import pytest
from baseline_policies import BASELINE_POLICIES
from conducted import LAW, RATE, algorithm_1, asked

from lamina.scheduler.conductor.latency_model import LatencyFit, PrefillLatency, PrefillLatencyEstimator
from lamina.scheduler.conductor.routing import (
    MEMORY,
    NO_WORKER,
    POLICIES,
    WorkerMatch,
    auto,
    cache_aware,
    load_balance,
    mooncake,
)


def test_algorithm_1_to_the_letter_on_ten_thousand_states() -> None:
    rng, moves, refusals = random.Random(1), 0, 0
    for _ in range(10_000):
        tokens = rng.randint(1, 30_000)
        some = [
            (rng.choice([0.0, rng.random() * 9]), rng.choice([0, rng.randrange(tokens)]))
            for _ in range(1 + rng.randrange(8))
        ]
        question = asked(some, tokens, rng.choice([1.0, 1.5, 4.0]))
        slo_ttft = rng.choice([math.inf, 2.0])
        choice = mooncake(question)
        expected = algorithm_1(question, slo_ttft)
        if expected is None:
            assert choice.ttft_s > slo_ttft
            refusals += 1
        else:
            assert (choice.worker, choice.ttft_s, choice.transferred_tokens, choice.ttft_s <= slo_ttft) == expected
            moves += choice.transferred_tokens > 0
    assert moves > 1000
    assert refusals > 500


def test_a_table_by_hand() -> None:
    # The holder has nothing to do: local.
    assert (c := mooncake(asked([(0.0, 0), (0.0, 8000)]))).worker == 1
    assert c.source == NO_WORKER
    # A remote match at the threshold is not fetched, one just above it is.
    busy = 100.0
    at, above = mooncake(asked([(0.0, 4000), (busy, 6000)])), mooncake(asked([(0.0, 4000), (busy, 6001)]))
    assert (at.worker, at.transferred_tokens, at.prefix) == (0, 0, 4000)
    assert (above.worker, above.transferred_tokens, above.prefix, above.source) == (0, 2001, 6001, 1)
    assert above.ttft_s == 2001 / RATE + LAW.seconds(10_000, 6001)
    # With no match of its own, a worker takes any remote page.
    assert mooncake(asked([(0.0, 0), (busy, 1)])).transferred_tokens == 1
    # A busy holder loses to an idle worker, and its pages are copied there.
    assert (c := mooncake(asked([(0.0, 0), (2.0, 9000)]))).worker == 0
    assert c.transferred_tokens == 9000
    # It wins where the others are as busy.
    assert mooncake(asked([(2.0, 0), (2.0, 9000)])).worker == 1
    # Of equal workers the first.
    assert mooncake(asked([(1.0, 0), (1.0, 0)])).worker == 0


def test_auto_prices_both_ways_where_algorithm_1_does_not() -> None:
    slow = asked([(0.0, 0), (5.0, 9000)])._replace(transfer_s=lambda source, worker, tokens: 60.0)
    assert mooncake(slow).worker == 1  # it would fetch to worker 0 for 60 s, at any price
    assert auto(slow).worker == 0
    assert auto(slow).transferred_tokens == 0
    hidden = asked([(1.0, 0), (9.0, 9000)])
    assert auto(hidden).ttft_s == pytest.approx(1.0 + LAW.seconds(10_000, 9000))  # 0.29 s come in that second


def test_auto_is_never_dearer_than_any_other_way() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        question = asked([(rng.random() * 5, rng.randrange(9000)) for _ in range(4)])
        assert auto(question).ttft_s <= min(mooncake(question).ttft_s, cache_aware(question).ttft_s) + 1e-12


def test_the_others() -> None:
    question = asked([(3.0, 0), (2.0, 0), (3.5, 9000)])
    assert load_balance(question).worker == 1
    assert cache_aware(question).worker == 2
    assert cache_aware(question).transferred_tokens == 0
    assert [POLICIES["random"](question._replace(random=lambda x=x: x)).worker for x in (0.0, 0.5, 0.99)] == [0, 1, 2]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("prefixes", "waiting", "stored", "by_sglang", "by_production_stack"),
    [
        ((0, 3100, 0), (9, 9, 0), (5, 5, 1), 1, 2),  # a third of it, and all but 6,900
        ((0, 8000, 0), (9, 73, 0), (5, 5, 9), 2, 1),  # one is busy, and has it
        ((0, 8000, 0), (9, 64, 0), (5, 5, 9), 1, 1),
        ((0, 3000, 0), (9, 9, 8), (5, 6, 7), 0, 2),  # no worker has enough
        ((0, 0, 0), (200, 130, 131), (5, 6, 7), 1, 1),
    ],
)
def test_rules_of_others(
    prefixes: tuple[int, ...],
    waiting: tuple[int, ...],
    stored: tuple[int, ...],
    by_sglang: int,
    by_production_stack: int,
) -> None:
    each = zip(prefixes, waiting, strict=True)
    workers = [WorkerMatch(w, 0.0, prefix, prefix, prompts) for w, (prefix, prompts) in enumerate(each)]
    question = asked([])._replace(workers=workers, num_pages=stored.__getitem__)
    assert [BASELINE_POLICIES[name](question).worker for name in ("sglang", "production-stack")] == [
        by_sglang,
        by_production_stack,
    ]
    assert not any(rule(question).transferred_tokens for rule in BASELINE_POLICIES.values())


def test_pages_that_are_still_computed_are_no_source() -> None:
    question = asked([(0.0, 0), (0.0, 0)])
    busy = question._replace(workers=[WorkerMatch(0, 0.0, 0, 0), WorkerMatch(1, 9.0, 8000, 0)])
    assert mooncake(busy).worker == 0
    assert mooncake(busy).transferred_tokens == 0


def fitted(measured: Iterable[tuple[Sequence[float], float]]) -> list[float]:
    fit = LatencyFit(3)
    for features, seconds in measured:
        fit.add(features, seconds, seconds)
    return fit.coefficients()


def test_a_law_is_found_again() -> None:
    rng, law = random.Random(3), (0.02, 0.3, 3e-3)
    some = [(1.0, x := rng.uniform(0.1, 60.0), x * x) for _ in range(50)]
    assert fitted((f, sum(a * b for a, b in zip(law, f, strict=True))) for f in some) == pytest.approx(law, rel=1e-6)


def test_no_law_has_a_negative_part() -> None:
    rng = random.Random(4)
    for _ in range(300):
        some = [((1.0, x := rng.uniform(0.01, 9.0), x * x), 0.001 + rng.random()) for _ in range(5)]
        assert min(fitted(some)) >= 0
        assert max(fitted(some)) > 0


def test_features_that_depend_on_each_other_share_no_law() -> None:
    """One size alone does not tell a fixed part from one that grows: the first of them has all."""
    assert fitted([((1.0, 2.0, 4.0), 0.5)] * 3) == pytest.approx([0.5, 0.0, 0.0])
    assert LatencyFit(3).coefficients() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("wrong", [1 / 3, 3.0])
def test_an_estimate_that_is_wrong_by_3_is_right_soon(wrong: float) -> None:
    fit, rng = PrefillLatencyEstimator(PrefillLatency(0.0, LAW.b * wrong, LAW.c * wrong)), random.Random(5)
    for _ in range(60):
        tokens = rng.randint(1000, 40_000)
        prefix = rng.randrange(tokens)
        fit.observe(tokens, prefix, LAW.seconds(tokens, prefix) * rng.uniform(0.95, 1.05))
    for tokens, prefix in ((2000, 0), (20_000, 5000), (40_000, 30_000)):
        assert fit.model.seconds(tokens, prefix) == pytest.approx(LAW.seconds(tokens, prefix), rel=0.15)


def test_one_stall_does_not_spoil_a_law() -> None:
    fit = PrefillLatencyEstimator(LAW)
    for _ in range(50):
        fit.observe(8000, 0, LAW.seconds(8000))
    fit.observe(8000, 0, 1000.0)
    assert fit.model.seconds(8000) < 1.5 * LAW.seconds(8000)


def test_a_law_of_uneven_workers_tells_the_mean() -> None:
    """Half of the prompts take half of the time, the others twice as long: queues are sums, so the mean counts."""
    fit, rng = PrefillLatencyEstimator(LAW), random.Random(6)
    found = []
    for _ in range(400):
        tokens = rng.randint(2000, 20_000)
        fit.observe(tokens, 0, LAW.seconds(tokens) * rng.choice([0.5, 2.0]))
        found.append(fit.model.seconds(10_000) / LAW.seconds(10_000))
    assert sum(found[100:]) / 300 == pytest.approx(1.25, abs=0.12)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(("stored_s", "source"), [(0.1, MEMORY), (100.0, NO_WORKER)])
def test_what_memory_workers_have_stored_is_taken_where_that_is_faster(
    policy: str, stored_s: float, source: int
) -> None:
    """Algorithm 1 takes the longest prefix whatever it costs, as it takes those of other workers."""
    query = asked([(0.0, 0), (0.0, 0)])._replace(num_stored_tokens=9000, stored_s=lambda tokens: stored_s)
    choice = POLICIES[policy](query)
    if policy != "mooncake":
        assert choice.source == source
    assert (choice.prefix, choice.transferred_tokens) == ((9000, 9000) if choice.source == MEMORY else (0, 0))
    other = asked([(0.0, 9500), (0.0, 0)])._replace(num_stored_tokens=9000, stored_s=lambda tokens: stored_s)
    assert auto(other).source == NO_WORKER, "its worker has more"
