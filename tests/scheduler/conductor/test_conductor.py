"""The Conductor's state: queues, who has which pages, transfers from one sender, refusals.

Covers: lamina/scheduler/conductor/queues.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from conducted import LAW, RATE, conductor, prompt

from lamina.scheduler.conductor import Conductor, ConductorConfig, PromptInfo
from lamina.scheduler.conductor.latency_model import PrefillPipelineShape, TransferLatency
from lamina.scheduler.conductor.overload import SloLimits
from lamina.scheduler.conductor.queues import PrefillQueue, QueuedPrompt
from lamina.scheduler.conductor.routing import NO_WORKER
from lamina.scheduler.prefix_index import PREFILL

BLOCKS = range(1, 17)
LONG = prompt(16 * 512, *BLOCKS)


def computed(one: Conductor, request: int, known: PromptInfo, now_s: float) -> int:
    """Let it be computed at once; returns by whom."""
    choice = one.choose(known, now_s)
    one.reserve(request, known, choice, now_s)
    one.on_prefill_started(request, now_s)
    one.on_prefill_done(request, now_s, choice.prefill_s, choice.prefix)
    return choice.worker


def sendable(one: Conductor) -> list[int]:
    """The pages of LONG that each worker can send."""
    return one.prefix_index.match(one.places, LONG.keys, ready=True)


def test_a_busy_holder_gives_copies_and_both_serve_then() -> None:
    one = conductor()
    holder = computed(one, 0, LONG, 0.0)
    assert one.choose(LONG, 0.0)[:2] == (holder, 16 * 512 - 1)  # the last token draws
    other = prompt(40_000, *range(100, 179))
    one.reserve(1, other, one.choose(other, 0.0)._replace(worker=holder), 0.0)
    choice = one.choose(LONG, 0.0)
    assert (choice.worker, choice.source, choice.transferred_tokens) == (1 - holder, holder, 16 * 512 - 1)
    one.reserve(2, LONG, choice, 0.0)
    assert sendable(one)[1 - holder] == 0
    one.on_pages_received(2)
    assert sendable(one) == [16, 16]
    assert one.prefix_index.num_replicas(PREFILL) == 16


def test_one_sender_sends_one_after_the_other() -> None:
    one = conductor(workers=3)
    holder = computed(one, 0, LONG, 0.0)
    one.reserve(1, prompt(90_000), one.choose(prompt(90_000), 0.0)._replace(worker=holder), 0.0)
    first = one.choose(LONG, 0.0)
    one.reserve(2, LONG, first, 0.0)
    second = one.choose(LONG, 0.0)
    assert first.transfer_s == pytest.approx((16 * 512 - 1) / RATE)
    if second.source != NO_WORKER:
        assert second.transfer_s == pytest.approx(2 * first.transfer_s)
    assert one.choose(LONG, 10.0).transfer_s in (0.0, pytest.approx(first.transfer_s))


def test_a_queue_is_what_was_booked_less_what_was_done() -> None:
    one, seconds = conductor(workers=1), LAW.seconds(10_000)
    known = prompt(10_000)
    for number in range(3):
        choice = one.choose(known, 0.0)
        assert choice.queue_s == pytest.approx(number * seconds)
        one.reserve(number, known, choice, 0.0)
    one.on_prefill_started(0, 0.0)
    assert one.choose(known, 1.0).queue_s == pytest.approx(3 * seconds - 1.0)
    assert one.choose(known, 50.0).queue_s == pytest.approx(2 * seconds)  # the first is late: done at any moment
    one.on_prefill_done(0, 50.0, seconds, 0)
    one.on_cancelled(2, 50.0)
    assert one.choose(known, 50.0).queue_s == pytest.approx(seconds)
    assert one.num_waiting == 1


def test_what_was_cancelled_is_found_by_nobody() -> None:
    one = conductor()
    one.reserve(0, LONG, one.choose(LONG, 0.0), 0.0)
    assert max(one.prefix_index.match(one.places, LONG.keys)) == 16
    assert max(sendable(one)) == 0
    one.on_cancelled(0, 0.0)
    assert one.prefix_index.match(one.places, LONG.keys) == [0, 0]


def test_what_was_given_up_is_found_by_nobody() -> None:
    one = conductor(workers=1, pages=20)
    computed(one, 0, LONG, 0.0)
    one.reserve(1, prompt(8 * 512, *range(50, 58)), one.choose(prompt(8 * 512, *range(50, 58)), 0.0), 0.0)
    assert one.choose(LONG, 0.0).prefix == 12 * 512, "the end of a prefix goes before its beginning"
    one.prefix_index.clear(one.places[0])
    assert one.choose(LONG, 0.0).prefix == 0
    assert one.prefix_index.num_pages(one.places[0]) == 0


def test_a_prompt_waits_for_its_transfer() -> None:
    line = PrefillQueue()
    line.add(QueuedPrompt(0, 100, 1.0, ready_s=0.0), 0.0)
    line.add(QueuedPrompt(1, 100, 1.0, ready_s=5.0), 0.0)
    assert line.queue_s(0.0) == 6.0
    line.on_started(0, 0.0)
    line.remove(0, 0.5)
    assert line.queue_s(0.5) == 5.5
    assert list(line.completions()) == [(6.0, 100)]
    with pytest.raises(KeyError):
        line.remove(0, 0.5)


def test_the_law_of_transfers_has_a_part_that_each_costs() -> None:
    """A rate alone, whatever it is, is off by 2 for short or for long ones."""
    one, rng, real = conductor(), random.Random(1), TransferLatency(0.05, 1 / 5000)
    assert one.transfer_latency is not None
    for _ in range(60):
        tokens = rng.choice([32, 250, 8192])
        one.record_transfer(tokens, real.seconds(tokens) * rng.uniform(0.95, 1.05))
    for tokens in (32, 1024, 8192):
        assert one.transfer_latency.model.seconds(tokens) == pytest.approx(real.seconds(tokens), rel=0.1)
    law = one.transfer_latency.model
    one.record_transfer(8192, 0.0)
    assert one.transfer_latency.model == law, "nothing was waited for: it says nothing"
    one.record_transfer(8192, 0.1, ahead_s=10.0)
    assert one.transfer_latency.model == law, "most of it was hidden behind another prompt"
    one.record_transfer(8192, 4.0, ahead_s=10.0)
    high = one.transfer_latency.model.seconds(8192)
    assert high > law.seconds(8192), "even the rest of it is more than was expected"
    one.record_transfer(8192, 0.1, ahead_s=0.3)
    assert one.transfer_latency.model.seconds(8192) < high, "nor did it take that long with what was hidden"


def test_transfers_of_one_size_tell_what_a_token_costs() -> None:
    one = conductor()
    assert one.transfer_latency is not None
    for _ in range(2000):
        one.record_transfer(1024, 0.5)
    assert one.transfer_latency.model.seconds(8192) > 4 * one.transfer_latency.model.seconds(1024)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_way_has_one_price_when_it_is_chosen_and_when_it_is_booked(stages: int) -> None:
    """Queues, transfers and the way through the stages, none of which need be the longest."""
    rng, fetched, filled = random.Random(2), 0, 0
    for _ in range(300):
        one = conductor(3, policy="auto")
        one.staged = PrefillPipelineShape(stages, 512)
        one.prefix_index.add(one.places[0], LONG.keys)
        for number in range(rng.randrange(4)):
            other = prompt(rng.randint(600, 60_000))
            choice = one.choose(other, 0.0)._replace(worker=rng.randrange(3))
            one.reserve(number, other, choice, 0.0)
        assert one.transfer_latency is not None
        one.transfer_latency.model = TransferLatency(rng.choice([0.0, 0.3]), rng.choice([1e-6, 1e-4]))
        choice = one.choose(LONG, 0.0)
        one.reserve("it", LONG, choice, 0.0)
        (due_s,) = [p.due_s for line in one.queues for p in line.prompts if p.request == "it"]
        assert choice.ttft_s == pytest.approx(due_s), choice
        fetched, filled = fetched + (choice.transferred_tokens > 0), filled + (choice.fill_s > choice.queue_s)
    assert fetched > 20
    assert (filled > 20) == (stages > 1)


def test_limits_refuse_with_what_was_expected() -> None:
    one = conductor(workers=1, limits=SloLimits(ttft_s=5.0))
    known = prompt(10_000)
    taken = 0
    while (refusal := one.check_admission(known, choice := one.choose(known, 0.0), 0.0)) is None:
        one.reserve(taken, known, choice, 0.0)
        taken += 1
    assert taken == 2  # 2.2 s each
    assert (refusal.reason, refusal.ttft_s) == ("ttft", choice.ttft_s)
    assert refusal.retry_after_s == pytest.approx(choice.ttft_s - 5.0)
    one.on_cancelled(0, 0.0)
    assert one.check_admission(known, one.choose(known, 0.0), 0.0) is None


def fill(one: Conductor, count: int, since_s: float) -> None:
    for number in range(count):
        one.decode_load_model.join(1000 + number, number % one.decode_load_model.num_instances, 8000, since_s)


def test_prediction_is_not_the_length_of_a_queue() -> None:
    """Decoding is at its limit now. Early refuses; predictive knows that most of it will have ended by then, and that
    prompts which are computed already will be there.
    """
    known, limits = prompt(40_000), SloLimits(tbt_s=0.05)
    early, predictive = (conductor(limits=limits, overload=o, decode_s=12.0) for o in ("early", "predictive"))
    for one in (early, predictive):
        fill(one, 40, since_s=-5.0)
        assert one.decode_load_model.tbt_s() > 0.05
    assert LAW.seconds(40_000) > 7.0  # by then those that decode now have ended
    refusal = early.check_admission(known, early.choose(known, 0.0), 0.0)
    assert refusal is not None
    assert refusal.reason == "tbt"
    assert predictive.check_admission(known, predictive.choose(known, 0.0), 0.0) is None
    waiting = prompt(500)
    for number in range(70):  # short prompts, that will decode then
        predictive.reserve(number, waiting, predictive.choose(waiting, 0.0)._replace(worker=0), 0.0)
    refusal = predictive.check_admission(known, predictive.choose(known, 0.0)._replace(worker=1), 0.0)
    assert refusal is not None
    assert refusal.tbt_s > 0.05


def test_decoding_slows_down_after_prefill_began() -> None:
    """Nothing waits, so a queue's length says nothing; what decodes takes longer, as measured."""
    one = conductor(limits=SloLimits(tbt_s=0.05), overload="predictive")
    fill(one, 4, since_s=0.0)
    known = prompt(1000)
    assert one.check_admission(known, one.choose(known, 0.0), 0.0) is None
    one.decode_load_model.latency = one.decode_load_model.latency._replace(a=0.2)
    assert one.check_admission(known, one.choose(known, 0.0), 0.0) is not None


def test_baseline_looks_when_the_prompt_is_computed() -> None:
    one = conductor(limits=SloLimits(tbt_s=0.05), overload="baseline")
    fill(one, 60, since_s=0.0)
    assert one.check_admission(LONG, one.choose(LONG, 0.0), 0.0) is None
    refusal = one.check_decode_admission(LONG.tokens, 2.0)
    assert refusal is not None
    assert (refusal.reason, refusal.ttft_s) == ("tbt", 2.0)


@pytest.mark.parametrize("policy", ["auto", "mooncake", "cache-aware"])
def test_a_decision_takes_about_a_millisecond(policy: str) -> None:
    """100 workers, a prompt of 126k tokens: CPU time of this thread, the best of many, as others share the core. It is
    compared with 20,000 lookups, which take 0.5 to 1 ms.
    """
    one, rng = conductor(100, instances=8, limits=SloLimits(30.0, 0.1), policy=policy), random.Random(1)
    known = prompt(126_000, *range(247))
    for worker in range(100):
        pages = known.keys[: rng.randrange(248)]
        one.prefix_index.add(one.places[worker], pages)
        other = prompt(rng.randint(1000, 9000))
        one.reserve(worker, other, one.choose(other, 0.0)._replace(worker=worker), 0.0)
    fill(one, 200, 0.0)

    def decide() -> None:
        choice = one.choose(known, 0.0)
        one.check_admission(known, choice, 0.0)

    table = dict.fromkeys(range(20_000))
    lookups = min(_cpu_s(lambda: [table[i] for i in range(20_000)]) for _ in range(100))
    assert min(_cpu_s(decide) for _ in range(100)) < 2 * lookups


def _cpu_s(work: Callable[[], None]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"overload": "late"}, "--slo overload= must be one of baseline, early, predictive"),
        ({"threshold": 0.9}, "--prefill-policy mooncake:threshold= must be at least 1"),
    ],
)
def test_rules_that_are_none(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ConductorConfig(**wrong)  # type: ignore[arg-type]
