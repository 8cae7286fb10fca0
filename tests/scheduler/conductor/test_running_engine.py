"""The engine that serves and the simulation get the same input and do the same: on one clock, by the same laws.

Covers: lamina/scheduler/conductor/overload.py.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import pytest
from conducted import LAW, RATE, STEP, conductor, even, played, timed_engine, zipf

from lamina.request import OverloadedError, RequestOutput, SamplingParams
from lamina.scheduler.conductor import ConductorConfig, PromptInfo, routing
from lamina.scheduler.conductor.latency_model import PrefillLatencyEstimator, TransferLatency, TransferLatencyEstimator
from lamina.scheduler.conductor.overload import DecodeLoadModel, SloLimits
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.conducted_run import TracedPrompt
from lamina.tools.plan.simulator.lossless import RoundLoad, SimulatedPool, StepLoad

CHUNK = 1024
NO_TRANSFER = 0.0


class Served(NamedTuple):
    """The requests of a trace: the seconds to its first token (infinite if it was refused), and the limit."""

    ttft_s: list[float]
    refused: list[str]


def step_s(load: RoundLoad) -> float:
    return STEP.seconds(load.rows, sum(step.stored for step in load.steps) - load.rows)


def chunk_s(load: StepLoad) -> float:
    """Takes the law of whole prompts: l^2 - p^2 of a chunk is twice its pairs less its rows."""
    return LAW.b * load.rows + LAW.c * (2 * load.pairs - load.rows)


def served(
    arrivals: list[TracedPrompt],
    rules: ConductorConfig,
    workers: int,
    decode_s: float,
    kept: int = 0,
    tokens_per_s: float = NO_TRANSFER,
    wrong: float = 1.0,
) -> Served:
    """Serves a trace by an engine with prefill workers, each of which takes LAW, and steps that take STEP. ``wrong``:
    transfers are first thought to take so many times as long.
    """
    clock = VirtualClock()
    pool = SimulatedPool(
        layers=1, blocks=1 << 16, block=128, longest=1 << 16, most=1 << 10, chunk=CHUNK, prefill=workers
    )
    engine, wire = timed_engine(pool, clock, step_s, chunk_s, kept)
    engine.slo_admission.set_config(rules)
    one = engine.slo_admission.conductor
    one.transfer_latency, wire.tokens_per_s = moves_at(tokens_per_s / wrong), tokens_per_s or math.inf
    one.prefill_latency, one.decode_load_model = PrefillLatencyEstimator(LAW), DecodeLoadModel(1, STEP, decode_s)
    numbers, came = dict[int, int](), Served([math.inf] * len(arrivals), [""] * len(arrivals))

    def arrive(number: int) -> None:
        arrival = arrivals[number]
        params = SamplingParams(max_tokens=arrival.answer, ignore_eos=True, temperature=0)
        try:
            numbers[engine.add(tokens_of(arrival.prompt), params)] = number
        except OverloadedError as e:
            came.refused[number] = e.refusal.reason

    for number, arrival in enumerate(arrivals):
        clock.later(arrival.at_s, lambda n=number: arrive(n))  # type: ignore[misc]
    while engine.has_work or clock.advance():
        for output in engine.step() if engine.has_work else []:
            _note(output, numbers[output.request_id], came)
    engine.release_idle_blocks()
    if wrong != 1.0:
        assert one.transfer_latency is not None
        assert one.transfer_latency.model.seconds(8192) == pytest.approx(8192 / tokens_per_s, rel=0.25)
    assert (
        engine.slo_admission.conductor.num_waiting == engine.slo_admission.conductor.decode_load_model.num_running == 0
    )
    return came


def moves_at(tokens_per_s: float) -> TransferLatencyEstimator | None:
    return TransferLatencyEstimator(TransferLatency.at_rate(tokens_per_s)) if tokens_per_s else None


def tokens_of(prompt: PromptInfo) -> list[int]:
    """Makes so many tokens; those of a page are the digits of its key."""
    pages = ([byte // 8**n % 8 for byte in key for n in range(3)] * prompt.page for key in prompt.keys)
    tokens = [token for page in pages for token in page[: prompt.page]]
    return [*tokens, *[0] * (prompt.tokens - len(tokens))]


def _note(output: RequestOutput, number: int, came: Served) -> None:
    times = output.times
    if output.outputs[0].finish_reason == "error":
        came.refused[number] = "tbt after prefill"
    elif math.isinf(came.ttft_s[number]):
        assert times.first_token_s is not None
        came.ttft_s[number] = times.first_token_s - times.arrival_s


def simulated(
    arrivals: list[TracedPrompt],
    workers: int,
    decode_s: float,
    pages: int = 1,
    tokens_per_s: float = NO_TRANSFER,
    **rules: object,
) -> Served:
    one = conductor(workers, pages=pages, instances=1, decode_s=decode_s, **rules)  # type: ignore[arg-type]
    one.transfer_latency = moves_at(tokens_per_s)
    requests = played(one, arrivals, instances=1).requests
    decoded = [not r.refused for r in requests]
    return Served([r.ttft_s if d else math.inf for r, d in zip(requests, decoded, strict=True)],
                  [r.refused for r in requests])  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("limits", "overload", "answer"),
    [
        (SloLimits(), "predictive", 4),
        (SloLimits(ttft_s=6.0), "predictive", 4),
        (SloLimits(ttft_s=20.0, tbt_s=0.03), "baseline", 300),
        (SloLimits(ttft_s=20.0, tbt_s=0.03), "early", 300),
        (SloLimits(ttft_s=20.0, tbt_s=0.03), "predictive", 300),
    ],
)
def test_an_engine_serves_as_simulated(limits: SloLimits, overload: str, answer: int) -> None:
    """But for the chunk and the step at whose end it looks at what has come."""
    arrivals, rules = even(150, 1.2, 8000, answer), ConductorConfig(overload=overload, limits=limits)
    live = served(arrivals, rules, 2, decode_s=8.0)
    expected = simulated(arrivals, 2, 8.0, policy="auto", overload=overload, limits=limits)
    both = [(a, b) for a, b in zip(live.ttft_s, expected.ttft_s, strict=True) if a < math.inf and b < math.inf]
    assert len(both) > 50
    assert statistics.fmean(a for a, _ in both) == pytest.approx(statistics.fmean(b for _, b in both), rel=0.03)
    for reason in {*live.refused, *expected.refused}:
        assert live.refused.count(reason) == pytest.approx(expected.refused.count(reason), rel=0.05, abs=2)
    assert (limits != SloLimits()) == any(live.refused)


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "tokens_per_s"),
    [("auto", NO_TRANSFER), ("auto", RATE), ("mooncake", RATE), ("cache-aware", RATE)],
)
def test_an_engine_finds_prompts_where_the_simulation_does(policy: str, tokens_per_s: float) -> None:
    """Documents of 8,192 tokens, some of them hot, and questions of 2,048: computed where the document is; where it is
    not it is computed again, or comes from there.
    """
    arrivals, pages, rules = zipf(150, 2.0), 600, ConductorConfig(policy=policy)
    live = served(arrivals, rules, 3, 1.0, pages * 4, tokens_per_s)
    expected = simulated(arrivals, 3, 1.0, pages, tokens_per_s, policy=policy)
    without = served(arrivals, rules, 3, decode_s=1.0)
    assert statistics.fmean(live.ttft_s) == pytest.approx(statistics.fmean(expected.ttft_s), rel=0.1)
    assert statistics.fmean(live.ttft_s) < 0.2 * statistics.fmean(without.ttft_s)


def test_one_mutant_of_the_conductor_changes_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that serves and the simulation have no choice of their own."""
    arrivals, rules = even(60, 1.2, 8000, 4), ConductorConfig()

    def means() -> tuple[float, float]:
        live, expected = served(arrivals, rules, 2, decode_s=8.0), simulated(arrivals, 2, 8.0, policy="auto")
        return statistics.fmean(live.ttft_s), statistics.fmean(expected.ttft_s)

    right = means()
    monkeypatch.setitem(routing.POLICIES, "auto", lambda asked: routing.auto(asked)._replace(worker=0))
    wrong = means()
    assert wrong[0] == pytest.approx(wrong[1], rel=0.03)
    assert min(wrong) > 3 * max(right)


@pytest.mark.long
@pytest.mark.parametrize("wrong", [1 / 3, 3.0])
def test_an_engine_finds_out_what_transfers_take(wrong: float) -> None:
    """From what its workers waited for, and from when they had asked."""
    arrivals, rules = zipf(150, 2.0), ConductorConfig(policy="auto")
    right, off = (served(arrivals, rules, 3, 1.0, 2400, RATE, wrong=w) for w in (1.0, wrong))
    assert statistics.fmean(off.ttft_s) == pytest.approx(statistics.fmean(right.ttft_s), rel=0.1)
