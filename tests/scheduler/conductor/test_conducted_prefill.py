"""The Conductor in the running engine's scheduler: who gets a prompt, what is learned, what is taken back.

Covers: lamina/scheduler/prefill_dispatch.py.
"""

from __future__ import annotations

import pytest
from scheduled import make, with_prefill

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.scheduler.conductor import ConductorConfig, routing
from lamina.scheduler.conductor.overload import SloLimits
from lamina.scheduler.feature import Loss
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import ScheduledStep
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.slo_admission import KnownKv, SloAdmission


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def new(number: int, tokens: int) -> Sequence:
    sequence = make(number, tokens, 5)
    sequence.id = number
    return sequence


def given(prefill: PrefillDispatcher, number: int, tokens: int) -> tuple[Sequence, int]:
    sequence = new(number, tokens)
    prefill.on_arrival(sequence)
    prefill.assign(sequence)
    assert sequence.transfer.on_side_worker
    return sequence, prefill.slo_admission.reserve(sequence)


def chunk(prefill: PrefillDispatcher, sequence: Sequence) -> ScheduledStep:
    grant = prefill.next_grant(sequence)
    assert grant is not None
    return prefill.begin_chunk(sequence, grant)


def test_a_prompt_goes_where_it_is_done_first() -> None:
    prefill = PrefillDispatcher(3, 8, 1)
    waiting = [new(number, tokens) for number, tokens in enumerate((30, 10, 20, 5, 6))]
    for sequence in waiting:
        prefill.on_arrival(sequence)
    assert [prefill.slo_admission.reserve(s) for s in waiting] == [0, 1, 2, 1, 1], "at their arrival, whoever has room"
    for sequence in waiting[:4]:
        assert prefill.can_accept(sequence)
        prefill.assign(sequence)
    assert prefill.waits_for_own_worker(waiting[4])
    assert not prefill.can_accept(waiting[4])
    for number in (5, 6, 7):
        given(prefill, number, 100)
    assert not prefill.waits_for_own_worker(waiting[4]), "nobody has room for whoever is behind it"


def test_what_prompts_take_is_learned_and_counts() -> None:
    """Prompts of one length take 2 s: a queue that is half done is shorter than one that has just begun."""
    clock = Hand()
    prefill = PrefillDispatcher(2, 100, 1, SloAdmission(2, clock=clock))
    for number in range(12):
        sequence, worker = given(prefill, number, 50)
        step = chunk(prefill, sequence)
        clock.now += 2.0
        assert worker is not None
        prefill.on_chunk_stored(step, worker)
    assert prefill.slo_admission.conductor.prefill_latency.model.seconds(50) == pytest.approx(2.0, rel=0.1)
    first, second = given(prefill, 20, 50), given(prefill, 21, 50)
    assert {first[1], second[1]} == {0, 1}
    chunk(prefill, first[0])
    clock.now += 1.5
    chunk(prefill, second[0])
    assert given(prefill, 22, 50)[1] == first[1]


def test_a_prompt_counts_from_the_end_of_the_one_before() -> None:
    clock = Hand()
    prefill = PrefillDispatcher(1, 100, 1, SloAdmission(1, clock=clock))
    (one, _), (two, _) = given(prefill, 0, 50), given(prefill, 1, 50)
    steps = [chunk(prefill, one), chunk(prefill, two)]  # both in flight
    for step in steps:
        clock.now += 3.0
        prefill.on_chunk_stored(step, 0)
    took_s = prefill.slo_admission.conductor.prefill_latency.model.seconds(50)
    assert took_s == pytest.approx(3.0), "and not the 6 s since the second was sent"
    assert prefill.slo_admission.conductor.num_waiting == 0


def test_what_is_dropped_counts_no_more_and_what_is_rolled_back_waits_anew() -> None:
    prefill = PrefillDispatcher(2, 8, 1)
    (long, at), _ = given(prefill, 0, 80), given(prefill, 1, 8)
    prefill.remove(long)
    assert not long.transfer.on_side_worker
    (short, to) = given(prefill, 2, 5)
    assert to == at
    prefill.roll_back(Loss([], lambda keep: 0))
    assert prefill.slo_admission.conductor.num_waiting == 2
    prefill.remove(short)
    assert prefill.slo_admission.conductor.num_waiting == 1
    assert given(prefill, 4, 80)[1] == 1, "the other one has still to compute the prompt of 8 tokens"


def test_the_engine_has_no_policy_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant that test_pools sees in the simulation is seen here."""
    monkeypatch.setitem(routing.POLICIES, "auto", lambda asked: routing.auto(asked)._replace(worker=0))
    prefill = PrefillDispatcher(3, 8, 1)
    assert [given(prefill, n, 10)[1] for n in range(3)] == [0, 0, 0]


def test_a_short_rest_behind_what_memory_workers_have_is_computed_there() -> None:
    """One chunk at most, and as far as it leaves those that decode what they are promised."""
    cached = [79]
    prefill = PrefillDispatcher(2, 8, 1, SloAdmission(2, known=KnownKv(cached_tokens_of=lambda sequence: cached[0])))
    prompt = make(0, 80, 5)
    assert [prefill.is_for_prefill_worker(prompt, known) for known in (0, 71, 72, 79)] == [True, True, False, False]
    assert prefill.is_for_prefill_worker(make(1, 8, 5)), "nothing is there"
    promises = prefill.slo_admission
    promises.set_config(ConductorConfig(limits=SloLimits(tbt_s=0.05)))
    for _ in range(8):
        promises.on_round_done(10, 0.0, 0.1)
    assert prefill.is_for_prefill_worker(prompt, 72)
    assert not prefill.is_for_prefill_worker(prompt, 79), "its last row alone is no chunk"
    prefill.on_arrival(prompt)
    assert promises.conductor.num_waiting == 0
    cached[0] = 0
    prefill.on_arrival(prompt)
    assert promises.conductor.num_waiting == 1
    prefill.skip(prompt)
    assert (promises.conductor.num_waiting, promises.conductor.decode_load_model.num_running) == (0, 1)
    prefill.remove(prompt)
    assert promises.conductor.decode_load_model.num_running == 0


def test_completions_whose_worker_is_full_hold_nobody_back() -> None:
    promises = SloAdmission(2, known=KnownKv(shared_tokens_of=lambda sequence: 79))
    prefill = PrefillDispatcher(2, 8, 1, promises)
    scheduler = Scheduler(BlockTables([0], [999], 4), max_num_seqs=16, prefill_chunk=8, features=with_prefill(prefill))
    completions, other = [make(0, 80, 5) for _ in range(4)], make(1, 80, 5)
    for sequence in (*completions, other):
        scheduler.add(sequence)
    scheduler.schedule()
    assert [s.transfer.on_side_worker for s in (*completions, other)] == [True, True, False, False, True]
    assert [promises.reserve(s) for s in (*completions[:2], other)] == [0, 0, 1], "the last one is idle"
