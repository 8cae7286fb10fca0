"""Rounds that are skipped leave the same behind as rounds that are run: ledger, positions, plans, times."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lamina.config.flat_options import make_config
from lamina.config.partition import KvShards
from lamina.protocol.control import RunRound
from lamina.protocol.step_plan import StepPlan
from lamina.request import SamplingParams
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.leap import FastForwardEngine
from lamina.tools.plan.simulator.lossless import RoundLoad, SimulatedExecutor, fast_forward, simulated_ready

BLOCK = 4
LANES = {1: [KvShards()], 2: [KvShards((True, False)), KvShards((False, True))]}


class Told(SimulatedExecutor):
    """Keeps every plan."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.plans: dict[int, list[StepPlan]] = {}  # by round

    def submit(self, new: RunRound) -> None:
        self.plans[new.round] = [step.plan for step in new.steps]
        super().submit(new)


class World:
    """An engine whose rounds take times that depend on all that they read. ``leaps``: whether it skips rounds."""

    def __init__(self, seed: int, windows: tuple[int, ...] = (0,), *, leaps: bool = False, **more: Any) -> None:
        rng = random.Random(seed)
        lanes = rng.choice((1, 1, 2))
        groups = [(window, own) for window in windows for own in LANES[lanes]]
        ready = simulated_ready(num_layers=3, num_blocks=rng.choice((30, 60, 400)), block_size=BLOCK, max_len=200)
        ready = msgspec.structs.replace(
            ready, windows=[w for w, _ in groups], kv_shards=[own for _, own in groups], holders=[[0]] * len(groups),
            num_blocks=ready.num_blocks * len(groups), stripe=rng.choice((0, 2)) if lanes == 2 else 0,
        )  # fmt: skip
        options: dict[str, Any] = {
            "transport": "shm", "block_size": BLOCK, "pipeline": rng.randint(1, 4), "max_num_seqs": rng.choice((3, 9)),
            "prefill_chunk": 8, "enable_prefix_caching": False,
            **rng.choice(({}, {"prefill_workers": 2}, {"enable_prefix_caching": True})),
        }  # fmt: skip
        self.clock, self.skipped, self.leaps = VirtualClock(), 0, leaps
        self.wire = Told(self.clock, ready, seconds)
        self.engine = FastForwardEngine(self.wire, make_config({**options, **more}), self.clock)
        asks = ((rng.choice((0.0, rng.uniform(0, 40))), rng.randint(1, 24), rng.randint(1, 70)) for _ in range(8))
        self.left = sorted(asks)
        self.gaps: list[tuple[int, int, float]] = []  # request, tokens, when
        self.lengths: dict[int, int] = {}

    @property
    def coming(self) -> float:
        return self.left[0][0] if self.left else float("inf")

    def let_come(self) -> None:
        """All whose time has come."""
        while self.left and self.coming <= self.clock.now:
            _, prompt, answer = self.left.pop(0)
            same = [3] * 8 + list(range(prompt))
            params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0)
            self.engine.add([t % 8 for t in same[:prompt]], params)

    def step(self) -> bool:
        """Whether there is more to do."""
        if not self.engine.has_work and self.left:
            self.clock.now = max(self.clock.now, self.coming)
        self.let_come()
        if not self.engine.has_work:
            return False
        for output in self.engine.step():
            self.note(output.request_id, len(output.outputs[0].token_ids), self.clock.now)
        if self.leaps:
            self.leap()
        return True

    def leap(self) -> None:
        times = fast_forward(self.engine, self.wire, self.coming)
        self.skipped += len(times)
        if times:
            for sequence in self.engine.scheduler.running:
                had = self.lengths[sequence.request_id]
                for i, when in enumerate(times):
                    self.note(sequence.request_id, had + i + 1, when)

    def note(self, request: int, length: int, when: float) -> None:
        self.lengths[request] = length
        self.gaps.append((request, length, when))

    def state(self) -> dict[str, Any]:
        """All that the next rounds depend on."""
        scheduler, ledger = self.engine.scheduler, self.engine._accounting
        ledger.check_integrity()
        groups = range(len(ledger.windows))
        return {
            "now": self.clock.now,
            "positions": [
                (s.id, s.num_computed_tokens, s.num_output_placeholders, s.tokens) for s in scheduler.running
            ],
            "waiting": [s.tokens for s in scheduler.waiting],
            "ledger": {s: (ledger._sequences[s], [ledger.block_table(g, s) for g in groups]) for s in ledger.sequences},
            "free": [list(pool._free) for pool in ledger._pools],
            "last plans": {b: (p.step, p.ops, p.rows) for b, p in ledger._last.items()},
            "in flight": [
                (
                    sorted((s.plan.batch, s.plan, s.tokens) for s in r.unfinished_steps),
                    r.rows,
                    r.tokens,
                    r.is_decode_only,
                )
                for r in scheduler._in_flight
            ],
            "steps": {k: s.plan for k, s in self.engine._in_flight.items()},
            "numbers": (scheduler._next_round, self.engine._next_round),
            "wire": (self.wire._flights, self.wire._free_at, self.wire.decoding),
            "load": [b.load for b in scheduler.batches],
        }


def seconds(load: RoundLoad) -> float:
    return 0.1 + sum(0.01 * s.rows + 1e-4 * s.stored + 1e-3 * s.prompt for s in load.steps)


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.data())
def test_a_leap_is_so_many_rounds(seed: int, data: st.DataObject) -> None:
    """At the first place behind ``begin`` steps at which one can leap; both then go on to their ends."""
    one, other = World(seed), World(seed)
    begin = data.draw(st.integers(0, 60))
    for _ in range(begin):
        assert one.step() == other.step()
    while one.step():
        other.step()
        before = one.engine._next_round
        one.leap()
        rounds = one.engine._next_round - before
        if rounds:
            event("leaps")
            while other.engine._next_round < one.engine._next_round or len(other.engine.scheduler._in_flight) > 1:
                other.step()
            one.let_come()
            other.let_come()  # it may have come between two steps of the last round
            assert one.state() == other.state()
            assert all(one.wire.plans[n] == other.wire.plans[n] for n in one.wire.plans)
            break
    while one.step():
        other.step()
    assert sorted(one.gaps) == sorted(other.gaps)


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_who_leaps_wherever_it_can_has_the_same_times(seed: int) -> None:
    one, other = World(seed, leaps=True), World(seed)
    while one.step():
        pass
    while other.step():
        pass
    assert sorted(one.gaps) == sorted(other.gaps)
    assert one.wire.decoding == other.wire.decoding
    assert one.engine.scheduler.num_preemptions == other.engine.scheduler.num_preemptions
    assert one.skipped + len(one.wire.plans) == len(other.wire.plans)
    assert one.wire.plans.items() <= other.wire.plans.items()


@pytest.mark.parametrize("seed", range(12))
def test_groups_with_a_window_do_not_leap(seed: int) -> None:
    world = World(seed, windows=(0, 6), leaps=True)
    while world.step():
        pass
    assert world.skipped == 0


def crowd(*prompts: int, blocks: int = 99, most: int = 2) -> tuple[FastForwardEngine, SimulatedExecutor, list[int]]:
    """Two that decode, and two that wait in line."""
    clock = VirtualClock()
    wire = SimulatedExecutor(
        clock, simulated_ready(num_layers=3, num_blocks=blocks, block_size=BLOCK, max_len=99), seconds
    )
    options = {"transport": "shm", "block_size": BLOCK, "max_num_seqs": most, "enable_prefix_caching": False}
    engine = FastForwardEngine(wire, make_config(options), clock)
    params = SamplingParams(max_tokens=50, ignore_eos=True, temperature=0)
    asked = [engine.add([0] * prompt, params) for prompt in prompts or (4, 4, 4, 4)]
    while not engine.scheduler.rounds_alike(1):
        engine.step()
    return engine, wire, asked


@pytest.mark.parametrize("number", [0, 1])
def test_who_was_cancelled_is_no_part_of_a_leap(number: int) -> None:
    engine, wire, asked = crowd()
    engine.cancel(asked[number])
    assert fast_forward(engine, wire) == []


def test_behind_a_long_one_that_is_cancelled_somebody_may_come() -> None:
    engine, wire, asked = crowd(4, 4, 97, 4, blocks=28, most=9)
    assert engine.scheduler.num_running == 2
    engine.cancel(asked[2])
    assert fast_forward(engine, wire) == []


MATTERS: tuple[dict[str, Any], ...] = (
    {"logprobs": 1}, {"stop_token_ids": [1], "min_tokens": 40}, {"frequency_penalty": 0.5}, {"logit_bias": {2: 1.0}},
    {},
)  # fmt: skip


@pytest.mark.parametrize("more", MATTERS, ids=lambda x: next(iter(x), "none"))
def test_a_sequence_whose_tokens_matter_does_not_leap(more: dict[str, Any]) -> None:
    engine, wire, asked = crowd()
    for request in asked:
        engine.cancel(request)
    engine.add([0] * 4, SamplingParams(max_tokens=50, ignore_eos=True, temperature=0, **more))
    for _ in range(6):
        engine.step()
    assert bool(fast_forward(engine, wire)) == (not more)


def test_a_leap_ends_where_somebody_comes() -> None:
    engine, wire, _ = crowd()
    now = wire.clock.now
    times = fast_forward(engine, wire, until=now + 1.0)
    assert times[-1] == wire.clock.now < now + 1.0 <= wire.next_event_s
    assert len(times) < 20


def test_most_rounds_of_long_answers_are_skipped() -> None:
    found = []
    for seed in range(30):
        world = World(seed, leaps=True)
        while world.step():
            pass
        found.append(world.skipped / len(world.wire.decoding))
    assert sum(found) / len(found) > 0.4
