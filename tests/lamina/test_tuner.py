"""pipeline="auto": which number of batches is chosen, from made-up times of rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import FakeWire, continuation, run

from lamina.config import make_config
from lamina.engine.engine import Engine
from lamina.engine.rounds.steps import Round
from lamina.engine.rounds.tuner import TIE, Tuner
from lamina.protocol.control import StepDone
from lamina.request import SamplingParams

Cost = Callable[[int], float]
MANY = 100


class Load:
    """Serves rounds to a tuner, one behind the other."""

    def __init__(self, most: int) -> None:
        self.tuner = Tuner(most)
        self.now = 0.0
        self.tried: list[int] = []

    def serve(self, cost: Cost, rounds: int = MANY, rows: int = 8, tokens: int = 800, steady: bool = True) -> int:
        """The choices that were made on the way."""
        choices = 0
        for _ in range(rounds):
            n = self.tuner.n
            self.tried.append(n)
            self.now += cost(n)
            choices += self.tuner.observe(Round(set(), n, rows, 0, tokens, steady), self.now)
        return choices


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_the_number_with_the_shortest_rounds_stays(seconds: list[float]) -> None:
    load = Load(len(seconds))
    assert load.serve(lambda n: seconds[n - 1]) == 1
    assert set(load.tried) == set(range(1, len(seconds) + 1))
    within = [n for n, s in enumerate(seconds, 1) if s <= min(seconds) * (1 + TIE)]
    assert load.tuner.n == within[0], "the fewest of those that are as good as the best"
    assert len(set(load.tried[-MANY // 4 :])) == 1


def test_the_reason_says_what_was_measured() -> None:
    load = Load(2)
    assert "nothing has been measured" in load.tuner.reason
    load.serve(lambda n: 0.0951 / n)
    assert load.tuner.reason == "2 batches: a token of 8 sequences takes 95.1 ms with 1, 47.5 ms with 2"


def test_rounds_that_were_held_up_do_not_decide() -> None:
    load, calls = Load(3), iter(range(MANY))
    load.serve(lambda n: [0.10, 0.05, 0.07][n - 1] * (20 if n == 2 and next(calls) % 4 == 0 else 1))
    assert load.tuner.n == 2


def test_a_choice_holds_until_the_load_is_another() -> None:
    load = Load(2)
    assert load.serve(lambda n: 0.1 / n) == 1
    assert load.serve(lambda n: 0.1 * n, rows=12, tokens=1500) == 0
    assert load.tuner.n == 2
    assert load.serve(lambda n: 0.1 * n, rows=20, tokens=1500) == 1
    assert load.tuner.n == 1
    assert load.serve(lambda n: 0.1 / n, rows=20, tokens=6000) == 1
    assert load.tuner.n == 2


def test_trials_of_different_loads_are_not_compared() -> None:
    load = Load(2)
    load.serve(lambda n: 0.1, rounds=12, rows=16)
    assert load.tuner.n == 2
    assert load.serve(lambda n: 0.02 * n, rows=4) == 1
    assert load.tuner.n == 1


def test_prompts_and_pauses_are_not_measured() -> None:
    load = Load(2)
    assert load.serve(lambda n: 0.1, steady=False) == 0
    assert set(load.tried) == {1}


def test_no_batch_is_empty() -> None:
    load = Load(4)
    load.serve(lambda n: 1.0 / n, rows=2)
    assert load.tuner.n == 2


class TimedWire(FakeWire):
    """Rounds take time by their number of steps."""

    def __init__(self, cost: Cost) -> None:
        super().__init__(num_blocks=256)
        self.cost, self.now = cost, 0.0
        self.sizes: list[int] = []

    def wait(self) -> StepDone:
        if not self.done:
            new = self.flight.popleft()
            self.now += self.cost(len(new.steps))
            self.sizes.append(len(new.steps))
            self.done += [self._execute(s) for s in new.steps]
        return self.done.pop(0)


@pytest.mark.parametrize(
    ("best", "cost"), [(1, lambda n: 0.1 * n), (2, lambda n: abs(n - 2.0) + 1), (3, lambda n: 1 / n)]
)
def test_the_engine_follows_and_loses_no_token(best: int, cost: Cost, caplog: pytest.LogCaptureFixture) -> None:
    wire = TimedWire(cost)
    config = make_config({"pipeline": "auto:3", "max_num_seqs": 6, "prefill_chunk": 64, "enable_prefix_caching": False})
    engine = Engine(wire, config, clock=lambda: wire.now)
    prompts = [[i, 5, 7 + i] for i in range(6)]
    ids = [engine.add(p, SamplingParams(max_tokens=90, ignore_eos=True)) for p in prompts]
    with caplog.at_level("INFO", logger="lamina"):
        done = run(engine)
    assert [done[i].outputs[0].token_ids for i in ids] == [continuation(p, 90) for p in prompts]
    assert engine.info.summary["pipeline"].startswith(f"{best} batch")
    assert engine.info.summary["pipeline"] in caplog.text
    assert wire.sizes[-20:-3] == [best] * 17
    assert engine.free_blocks == (256,)
    assert wire.tables.free_blocks == (256,)
