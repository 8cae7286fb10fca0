"""The times that are promised to the prompts of a running engine: which are refused, what is learned, what is given
back.
"""

from __future__ import annotations

import pytest
from scheduled import make, with_prefill
from test_conducted_prefill import Hand

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.request import OverloadedError
from lamina.scheduler.conductor import ConductorConfig, PromptInfo
from lamina.scheduler.conductor.latency_model import StepLatencyEstimator
from lamina.scheduler.conductor.overload import SloLimits
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.slo_admission import KnownKv, SloAdmission

PLENTY = 1000.0


def promising(
    clock: Hand,
    workers: int = 1,
    places: int = 100,
    overload: str = "predictive",
    known: KnownKv | None = None,
    **limits: float,
) -> SloAdmission:
    promises = SloAdmission(workers, places, clock, known=known)
    promises.set_config(ConductorConfig(overload=overload, limits=SloLimits(**limits)))
    return promises


def computed(promises: SloAdmission, clock: Hand, sequence: Sequence, seconds: float) -> None:
    promises.reserve(sequence)
    since = promises.on_prefill_started(sequence)
    clock.now += seconds
    _drawn(sequence)
    promises.on_prefill_done(sequence, since)


def _drawn(sequence: Sequence) -> None:
    sequence.num_output_placeholders += 1
    sequence.append(7)


def taken(promises: SloAdmission, sequence: Sequence, room: float = PLENTY) -> bool:
    if promises.check_admission([sequence], lambda length: room) is not None:
        return False
    promises.reserve(sequence)
    return True


def test_a_prompt_that_comes_too_late_is_refused_and_told_when_to_come() -> None:
    clock = Hand()
    promises = promising(clock, ttft_s=5.0)
    for number in range(10):
        computed(promises, clock, one := make(number, 50, 5), 2.0)
        promises.remove(one)
    assert [taken(promises, make(number, 50, 5)) for number in range(20, 24)] == [True, True, False, False]
    refusal = promises.check_admission([make(30, 50, 5)], lambda length: PLENTY)
    assert refusal is not None
    assert "first token would come after 6 s" in str(OverloadedError(refusal))
    assert refusal.ttft_s == pytest.approx(6.0, rel=0.1)
    assert refusal.retry_after_s == pytest.approx(1.0, rel=0.5)
    counts = promises.counts()
    assert counts is not None
    assert (counts.prompts, counts.actual_ttft_s) == (10, 20.0)


def test_what_was_computed_before_there_were_limits_teaches_nothing() -> None:
    clock = Hand()
    promises, unused = SloAdmission(1, 100, clock), SloAdmission(1, 100, clock)
    for number in range(5):
        computed(promises, clock, one := make(number, 1, 5), 0.5)
        promises.remove(one)
    for each in (promises, unused):
        each.set_config(ConductorConfig(limits=SloLimits(ttft_s=1.0)))
    long = PromptInfo(30000)
    assert promises.conductor.choose(long, clock.now).ttft_s == unused.conductor.choose(long, clock.now).ttft_s


def test_nobody_is_refused_by_a_law_that_is_wrong_where_nobody_waits() -> None:
    clock = Hand()
    promises = promising(clock, ttft_s=1.0)
    for number in range(3):
        computed(promises, clock, one := make(number, 50, 5), 30.0)
        promises.remove(one)
    first = make(10, 50, 5)
    assert taken(promises, first)
    assert not taken(promises, make(11, 50, 5))
    promises.remove(first)
    assert taken(promises, make(12, 50, 5))


def test_no_room_for_kv_is_a_wait() -> None:
    """Prompts take nothing, completions 10 s, and there are 4 places: who comes next waits for the first to end."""
    clock = Hand()
    promises = promising(clock, ttft_s=6.0)
    for number in range(4):
        computed(promises, clock, one := make(number, 50, 5), 0.001)
        clock.now += 10.0
        one.finish("length")
        promises.remove(one)
    for number in range(10, 14):
        computed(promises, clock, make(number, 50, 5), 0.001)
    assert taken(promises, make(20, 50, 5), room=4.0)  # 2.5 s
    assert taken(promises, make(21, 50, 5), room=4.0)  # 5
    assert not taken(promises, make(22, 50, 5), room=4.0)
    assert taken(promises, make(23, 50, 5), room=40.0)


@pytest.mark.parametrize("overload", ["baseline", "early", "predictive"])
def test_decoding_that_slows_down_refuses_when_its_rule_looks(overload: str) -> None:
    clock = Hand()
    promises = promising(clock, overload=overload, tbt_s=0.05)
    decoding = [make(number, 50, 5) for number in range(4)]
    for sequence in decoding:
        computed(promises, clock, sequence, 0.1)
    for _ in range(16):
        promises.on_round_done(4, 200.0, 0.2)
    late = make(10, 50, 5)
    assert taken(promises, late) == (overload == "baseline")
    promises.reserve(late)
    _drawn(late)
    refusal = promises.check_decode_admission(late)
    assert refusal is not None
    assert refusal.reason == "tbt"
    counts = promises.counts()
    assert counts is not None
    assert counts.rejected_after_prefill_tokens == 50
    for sequence in [*decoding, late]:
        promises.remove(sequence)
    assert taken(promises, make(11, 50, 5))


def test_prompts_that_a_step_of_compute_workers_ends_share_its_time() -> None:
    clock = Hand()
    promises = promising(clock, workers=0, ttft_s=100.0)
    for number in range(0, 40, 2):
        pair = [make(number, 30, 5), make(number + 1, 60, 5)]
        for sequence in pair:
            promises.reserve(sequence)
            promises.on_inline_prefill_started(sequence)
        clock.now += 0.9
        for sequence in pair:
            _drawn(sequence)
        promises.on_inline_sampled(pair)
        for sequence in pair:
            promises.remove(sequence)
    law = promises.conductor.prefill_latency.model
    assert law.seconds(30) == pytest.approx(0.3, rel=0.1)
    assert law.seconds(60) == pytest.approx(0.6, rel=0.1)
    assert promises.conductor.num_waiting == promises.conductor.decode_load_model.num_running == 0


def test_a_prefix_that_is_there_is_not_waited_for() -> None:
    clock, cached = Hand(), [0]
    known = KnownKv(cached_tokens_of=lambda sequence: cached[0])
    promises = promising(clock, workers=0, known=known, ttft_s=1.0)
    promises.conductor.prefill_latency.model = promises.conductor.prefill_latency.model._replace(b=0.01)
    assert taken(promises, make(0, 80, 5))
    assert not taken(promises, make(1, 80, 5))
    cached[0] = 70
    assert taken(promises, make(2, 80, 5))


def test_what_is_rolled_back_is_expected_anew() -> None:
    clock = Hand()
    promises = promising(clock, workers=2, ttft_s=100.0)
    for number in range(4):
        promises.reserve(make(number, 50, 5))
    promises.reset_prefill()
    assert promises.conductor.num_waiting == 4


def test_the_law_of_a_step_is_learned() -> None:
    fit = StepLatencyEstimator()
    for rows in range(1, 65):
        fit.observe(rows, 100.0 * rows, 0.01 + 0.001 * rows + 1e-6 * 100 * rows)
    assert fit.model.seconds(128, 12800) == pytest.approx(0.01 + 0.128 + 0.0128, rel=0.05)


def test_completions_of_one_request_do_not_wait_for_each_other() -> None:
    """Nor does a prompt that fills the pool wait where none is before it: an idle server would refuse it for ever."""
    clock = Hand()
    promises = promising(clock, places=4, ttft_s=2.0)
    computed(promises, clock, one := make(0, 50, 5), 0.001)
    clock.now += 20.0
    one.finish("length")
    promises.remove(one)
    promises.check_admission([make(number, 50, 5) for number in range(1, 9)], lambda length: PLENTY)
    assert taken(promises, make(20, 50, 5), room=0.5)
    assert not taken(promises, make(21, 50, 5), room=0.5)


@pytest.mark.parametrize("workers", [0, 2])
def test_completions_of_one_request_are_booked_as_one_prompt(workers: int) -> None:
    """One computes the prompt, and the others continue from it; if it is lost, the next one computes it."""
    clock = Hand()
    known = KnownKv(shared_tokens_of=lambda sequence: len(sequence.prompt) - 1)
    promises = promising(clock, workers=workers, known=known, ttft_s=100.0)
    promises.conductor.prefill_latency.model = promises.conductor.prefill_latency.model._replace(b=0.01)

    def queues() -> float:
        ways = (promises.conductor.choose(PromptInfo(1), 0.0, {w}) for w in range(max(1, workers)))
        return sum(way.queue_s for way in ways)

    each = [make(1, 50, 5) for _ in range(4)]
    for sequence in each:
        promises.reserve(sequence)
    own = 0.0 if workers else 0.03
    assert queues() == pytest.approx(0.5 + own)
    assert [promises.has_reservation(s) for s in each] == [True, False, False, False]
    assert promises.conductor.num_waiting == 4, "all will decode"
    promises.remove(each[0])
    assert [promises.has_reservation(s) for s in each] == [False, True, False, False]
    assert queues() == pytest.approx(0.5 + own * 2 / 3)
    since = promises.on_prefill_started(each[1])
    clock.now += 0.5
    _drawn(each[1])
    promises.on_prefill_done(each[1], since)
    for sequence in each[2:]:
        promises.on_decode_without_prefill(sequence)
    assert promises.conductor.num_waiting == 0
    assert promises.conductor.decode_load_model.num_running == 3
    counts = promises.counts()
    assert counts is not None
    assert counts.prompts == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_completion_that_is_computed_before_who_it_shares_with_keeps_its_worker(workers: int) -> None:
    """A preempted completion may have room sooner than the one that it shares with, whatever becomes of that one."""
    clock = Hand()
    known = KnownKv(shared_tokens_of=lambda sequence: len(sequence.prompt) - 1)
    promises = promising(clock, workers=workers, known=known, ttft_s=100.0)
    prefill = PrefillDispatcher(workers, 8, 1, promises)
    first, second = make(1, 50, 5), make(1, 50, 5)
    for sequence in (first, second):
        promises.reserve(sequence)
    if workers:
        prefill.assign(second)
    promises.on_inline_prefill_started(second)
    second.finish("abort")
    promises.remove(first)
    _drawn(second)
    if workers:
        promises.on_prefill_done(second, clock.now)
    promises.on_inline_sampled([second])
    assert promises.conductor.num_waiting == 0


def test_completions_that_share_nothing_are_booked_each() -> None:
    promises = promising(Hand(), workers=1, ttft_s=100.0)
    each = [make(1, 50, 5) for _ in range(3)]
    for sequence in each:
        promises.reserve(sequence)
    assert all(promises.has_reservation(s) for s in each)


def test_a_loss_leaves_no_promise_of_who_has_ended() -> None:
    ledger, clock = BlockTables([0], [100], 4), Hand()
    promises = promising(clock, workers=2, ttft_s=100.0)
    scheduler = Scheduler(
        ledger,
        max_num_seqs=8,
        prefill_chunk=8,
        num_batches=1,
        features=with_prefill(PrefillDispatcher(2, 8, 1, promises)),
    )
    for number in range(3):
        scheduler.add(make(number, 50, 5))
    scheduler.schedule()
    assert promises.conductor.num_waiting == 3
    (batch,) = scheduler.batches
    batch.running[0].finish("abort")
    scheduler.roll_back([], lambda keep: keep.length)
    assert promises.conductor.num_waiting == 2
    assert sum(promises.has_reservation(s) for s in scheduler.waiting) == 2
