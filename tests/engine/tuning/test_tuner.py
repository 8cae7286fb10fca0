"""plan="auto": laws that are measured on a started engine, and the number of batches that is chosen by them.

Covers: lamina/engine/tuning/profiling.py, lamina/engine/tuning/round_time_model.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
from engine_api import make_engine, run
from fake_executor import FakeWire, continuation
from rotation_plan import rotation

from lamina.engine.engine import Engine
from lamina.engine.tuning.profiling import tune_num_batches
from lamina.engine.tuning.round_time_model import RoundMeasurement, RoundTimeModel, fit_round_times
from lamina.engine.tuning.tuner import Tuner, choose_num_batches, round_seconds
from lamina.protocol.control import RunRound, StepDone
from lamina.protocol.step_plan import StepPlan
from lamina.request import SamplingParams
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.scheduler_output import Round, ScheduledStep

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
LAYERS, MOST = 4, 4
STEP = ScheduledStep(StepPlan(step=0, ops=[], rows=[]), [], [])
Times = Callable[[int, int], tuple[float, float]]  # rows and tokens of a step -> its slices, its attention


def told(stage: str, done: int, total: int) -> None:
    assert done < total, stage


class TimedWire(FakeWire):
    """A round takes as long as the rotation does, with the times of its own steps; counters as workers have them."""

    def __init__(self, times: Times, network_s: float = 0.0, beside: float = 1.0, blocks: int = 256) -> None:
        super().__init__(num_blocks=blocks)
        self.times, self.network_s, self.beside, self.now = times, network_s, beside, 0.0
        self.sizes: list[int] = []
        self.replicas = 1
        self.spent = {"compute-0": dict.fromkeys(("slice_s", "sample_s"), 0.0), "memory-0": {"attend_s": 0.0}}

    def wait(self) -> StepDone:
        if not self.done:
            new = self.flight.popleft()
            self.now += self._seconds(new)
            self.done += [self.execute(s) for s in new.steps]
        return self.done.pop(0)

    def _seconds(self, new: RunRound) -> float:
        steps = [s.plan for s in new.steps if s.plan.rows]
        if not steps:
            return 0.0
        self.sizes.append(len(steps))
        each = [self.times(p.num_rows, sum(r.first + r.count for r in p.rows)) for p in steps]
        slices, attention = (sum(x) / len(each) / LAYERS for x in zip(*each, strict=True))
        self.spent["compute-0"]["slice_s"] += sum(x for x, _ in each)
        self.spent["memory-0"]["attend_s"] += sum(x for _, x in each)
        return self.beside ** (len(each) > 1) * token_s(
            len(each), slices, attention, self.network_s / LAYERS, self.replicas
        )

    def stats(self) -> dict[str, dict[str, float]]:
        return {worker: dict(values) for worker, values in self.spent.items()}


def token_s(n: int, slice_s: float, attention_s: float, network_s: float, replicas: int) -> float:
    """Returns the seconds for a token of all batches, once all are under way."""
    events = rotation(n, [slice_s] * LAYERS, [attention_s] * LAYERS, 12, network_s, replicas).events
    starts = {e.token: e.start for e in events if e.slice == 0 and e.batch == n - 1}
    return (starts[11] - starts[3]) / 8


def engine_of(wire: TimedWire, **options: int | str) -> Engine:
    base = {"max_num_seqs": 8, "prefill_chunk": 64, "enable_prefix_caching": False}
    wire.replicas = int(options.get("replicas", 1))
    engine = make_engine(wire, clock=lambda: wire.now, **{**base, **options})
    tune_num_batches(engine, told, clock=lambda: wire.now)
    return engine


def tokens_per_s(wire: TimedWire, engine: Engine, rows: int = 8, answer: int = 60) -> float:
    prompts = [[i, 5, 7 + i] for i in range(rows)]
    ids = [engine.add(p, SamplingParams(max_tokens=answer, ignore_eos=True)) for p in prompts]
    begun = wire.now
    done = run(engine)
    assert [done[i].outputs[0].token_ids for i in ids] == [continuation(p, answer) for p in prompts]
    assert engine.free_blocks == (256,)
    assert wire.tables.free_blocks == (256,)
    return rows * answer / (wire.now - begun)


@pytest.mark.long(but=["0.0-0.25", "0.2-0.5"])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("network_s", [0.0, 0.2])
def test_within_5_percent_of_a_sweeps_best(ratio: float, network_s: float) -> None:
    """t_m : t_a = 1:4 to 4:1 on devices whose times are known; all numbers of batches are also tried by hand."""

    def times(rows: int, tokens: int) -> tuple[float, float]:
        return 0.8 * ratio + 0.01 * rows, 0.4 + 0.05 * rows + 1e-4 * tokens

    sweep = {}
    for n in range(1, MOST + 1):
        wire = TimedWire(times, network_s)
        sweep[n] = tokens_per_s(wire, engine_of(wire, pipeline=n))
    wire = TimedWire(times, network_s)
    planned = tokens_per_s(wire, engine_of(wire, plan=f"auto:{MOST}"))
    assert planned >= 0.95 * max(sweep.values()), sweep
    assert min(sweep.values()) < 0.85 * max(sweep.values()), "another number would have been seen"


@pytest.mark.parametrize(("ratio", "best"), [(0.05, 2), (0.6, 3), (0.74, 4), (3.0, 3)])
def test_the_fewest_that_are_as_good_as_the_best(ratio: float, best: int) -> None:
    seconds = round_seconds(RoundTimeModel((ratio, 0.0), (0.0, 0.125, 0.0), 0.0, 3, {}), MOST, 8, 800)
    assert choose_num_batches(seconds) == best


def test_one_batch_where_two_would_only_read_the_weights_again() -> None:
    assert choose_num_batches(round_seconds(RoundTimeModel((1.0, 0.0), (0.1, 0.0, 0.0), 0.0, 1, {}), 2, 8, 800)) == 1
    assert choose_num_batches(round_seconds(RoundTimeModel((0.1, 0.1), (0.1, 0.1, 0.0), 0.0, 1, {}), 2, 8, 800)) == 2
    assert choose_num_batches(round_seconds(RoundTimeModel((0.1, 0.1), (0.1, 0.1, 0.0), 0.0, 1, {}), 4, 1, 800)) == 1, (
        "no batch is empty"
    )


def test_laws_are_found_again() -> None:
    laws = RoundTimeModel((0.3, 0.01), (0.1, 0.02, 1e-4), 0.05, 3, {})
    shapes = [(1, 8.0), (4, 32.0), (16, 128.0), (4, 2048.0)]
    measured = [
        RoundMeasurement(r, t, laws.slices_s(r), laws.attention_s(r, t), laws.seconds(1, r, t)) for r, t in shapes
    ]
    again = fit_round_times(measured, 3)
    assert [*again.slices, *again.attention, again.between_s] == pytest.approx(
        [*laws.slices, *laws.attention, laws.between_s]
    )


def test_pools_that_share_cores_do_not_take_turns() -> None:
    """Two batches are nearly twice as fast by the laws alone: a measurement of both says that they are slower."""

    def times(rows: int, tokens: int) -> tuple[float, float]:
        return 0.1 * rows, 0.1 * rows

    apart, together = TimedWire(times), TimedWire(times, beside=2.1)
    for wire in (apart, together):
        tokens_per_s(wire, engine_of(wire, plan="auto"))
    assert (apart.sizes[-20], together.sizes[-20]) == (2, 1)


def test_the_choice_follows_the_load() -> None:
    chosen = list[int]()
    tuner = Tuner(2, chosen.append)
    tuner.on_step_done(STEP, Round(set(), 1, 8, 0, 4000, is_decode_only=True))
    assert not chosen, "nothing is measured yet"
    tuner.use(RoundTimeModel((1.0, 0.0), (0.0, 0.0, 1e-3), 0.0, 1, {}))
    assert "until requests come; measured at the start: slices 1000.00 ms" in tuner.reason
    tuner.on_step_done(STEP, None)
    assert chosen == [1], "the round goes on"
    done = lambda tokens, decodes=True: tuner.on_step_done(  # noqa: E731
        STEP, Round(set(), 1, 8, 0, tokens, is_decode_only=decodes)
    )
    done(200)
    assert chosen == [1, 1]
    done(300)
    assert chosen == [1, 1], "nothing else is better now"
    done(90000, decodes=False)
    assert chosen == [1, 1], "prompts say nothing of decoding"
    done(4000)
    assert chosen == [1, 1, 2]
    assert tuner.reason.startswith(
        "2 batches: a token of 8 sequences, 4000 tokens long together, takes 5000.0 ms with 1"
    )
    done(1000)
    assert chosen == [1, 1, 2], "as good as the best, so no pause for a change"


def test_the_reason_is_told_and_nothing_stays(caplog: pytest.LogCaptureFixture) -> None:
    wire = TimedWire(lambda rows, tokens: (0.1 * rows, 0.1 * rows))
    engine = engine_of(wire, plan="auto", enable_prefix_caching=True)
    assert engine.scheduler.features[PrefixCache].num_retained == 0, "nobody finds the KV of what was made up"
    assert wire.tables.free_blocks == (256,)
    with caplog.at_level("INFO", logger="lamina"):
        engine.add([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
        run(engine)
    tuner = engine.feature(Tuner)
    reason = tuner.reason if tuner else ""
    assert re.match(
        r"1 batch: a token of 1 sequence, \d+ tokens long together, takes 2\d\d\.\d ms with 1; measured", reason
    )
    assert reason in caplog.text


def test_sequences_that_are_too_short_are_said() -> None:
    wire = TimedWire(lambda rows, tokens: (0.1, 0.1))
    wire.ready = msgspec.structs.replace(wire.ready, max_model_len=16)
    with pytest.raises(
        ValueError, match=r"--pipeline auto measures with sequences of 24 tokens, and --max-model-len is 16"
    ):
        engine_of(wire, plan="auto")


def test_small_pools_and_few_sequences_are_measured_too() -> None:
    wire = TimedWire(lambda rows, tokens: (0.1 * rows, 0.1 * rows), blocks=12)
    tuner = engine_of(wire, plan="auto", max_num_seqs=2).feature(Tuner)
    assert tuner
    assert tuner.reason.startswith("1 batch until")
