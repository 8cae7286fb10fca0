"""The Conductor in simulated pools: what the policies come to, what overload does, and public traces.

Covers: lamina/scheduler/conductor/latency_model.py, lamina/tools/plan/simulate.py,
lamina/tools/plan/simulator/conducted_run.py, lamina/tools/plan/simulator/decode_instance.py,
lamina/tools/plan/simulator/simulation_report.py.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from conducted import LAW, MOVES, RATE, STEP, conductor, even, played, prompt, zipf

from lamina.cli import launch
from lamina.scheduler.conductor import routing
from lamina.scheduler.conductor.latency_model import PrefillLatency, TransferLatency, TransferLatencyEstimator
from lamina.scheduler.conductor.overload import SloLimits
from lamina.scheduler.conductor.routing import POLICIES
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.conducted_run import SimulatedPools, SimulatedPoolSpec, TracedPrompt
from lamina.tools.plan.simulator.decode_instance import SimulatedInstance
from lamina.tools.plan.simulator.simulation_report import PoolsReport, report

TRACE = Path(__file__).resolve().parents[4] / "shared" / "traces" / "mooncake_fast25_conversation.jsonl.gz"
LIMITS = SloLimits(ttft_s=40.0, tbt_s=0.05)
SLOW = PrefillLatency(0.0, 1 / 800, 1 / 8e7)


def lagging(overload: str, *, check_again: bool, count: int) -> PoolsReport:
    """Prompts of 11 s, completions of 12 s: what decodes is known late."""
    one = conductor(40, law=SLOW, limits=LIMITS, overload=overload, check_before_decode=check_again)
    return report(played(one, even(count, 3.0, 8000, 300), instances=2, law=SLOW), one)


def test_an_instance_steps_as_its_law_says() -> None:
    """Against a loop over steps. A request that comes while others decode joins the next step, as in any engine, and
    decodes from the step after it on.
    """
    clock, ended = VirtualClock(), dict[int, tuple[float, float]]()
    instance = SimulatedInstance(clock, STEP, lambda r, longest: ended.update({r: (clock.now, longest)}))
    comes = {0: (0.0, 5000, 40), 1: (0.123, 9000, 300), 2: (0.5, 100, 7), 3: (2.0, 70_000, 111)}
    for number, (at_s, stored, answer) in comes.items():
        clock.later(at_s, lambda n=number, s=stored, a=answer: instance.add_request(n, s, a))  # type: ignore[misc]
    while clock.advance():
        pass
    now, rows, expected, longest = 0.0, dict[int, list[int]](), dict[int, float](), dict[int, float]()
    seen, began = 0.0, set[int]()
    while len(expected) < len(comes):
        new = {n: [s, a] for n, (at, s, a) in comes.items() if at <= seen and n not in began}
        rows, began, seen = rows | new, began | new.keys(), now
        took = STEP.seconds(len(rows), sum(s for s, _ in rows.values()))
        now += took
        longest |= {n: max(took, longest.get(n, 0.0)) for n in rows}
        rows = {n: [s + 1, a - 1] for n, (s, a) in rows.items()}
        expected |= {n: now for n, (_, a) in rows.items() if a == 0}
        rows = {n: row for n, row in rows.items() if row[1]}
    assert {n: at for n, (at, _) in ended.items()} == pytest.approx(expected)
    assert {n: most for n, (_, most) in ended.items()} == pytest.approx(longest)


def test_hot_beginnings_are_copied_and_all_workers_have_work() -> None:
    one = conductor(8)
    pools = played(one, zipf(1200, 14.0))
    found = report(pools, one)
    assert found.imbalance < 1.3
    assert found.kv_replicas > 200
    assert found.hit > 0.6
    assert found.expected_off < 0.05


def test_two_transfers_from_one_sender_take_twice_as_long() -> None:
    known = [prompt(16 * 512, *range(at, at + 16)) for at in (100, 200)]
    one = conductor(3)
    for each in known:
        one.prefix_index.add(one.places[0], each.keys)
    late = [TracedPrompt(10.0, each, 1) for each in known]
    pools = played(one, [TracedPrompt(10.0, prompt(60_000), 1), *late])
    first, second = pools.requests[1:]
    assert {first.choice.worker, second.choice.worker} == {1, 2}
    assert first.choice.source == second.choice.source == 0
    assert first.ttft_s == pytest.approx(first.choice.ttft_s)
    assert second.ttft_s - first.ttft_s == pytest.approx((16 * 512 - 1) / RATE)


def test_entries_that_are_given_up_are_not_believed_under_load() -> None:
    """Stores of 100 pages, 8 prompts' worth: what was expected of a prefix is what was there."""
    one = conductor(4, pages=100)
    pools = played(one, zipf(600, 3.0))
    assert [r.prefix for r in pools.requests] == [r.choice.prefix for r in pools.requests]
    assert report(pools, one).hit > 0.1


@pytest.mark.long
def test_early_refusal_wastes_little_and_oscillates_and_prediction_damps_that() -> None:
    """Section 6.3 and 6.4, with what was taken decoded in any case."""
    early, predictive = (lagging(name, check_again=False, count=1000) for name in ("early", "predictive"))
    assert early.correlation < -0.3 < predictive.correlation
    assert predictive.decode_deviation <= 0.5 * early.decode_deviation
    assert predictive.goodput_requests > early.goodput_requests


@pytest.mark.long
def test_prediction_is_nearer_to_the_step_that_a_prompt_finds() -> None:
    """The number of sequences that decode now is no forecast: half of them will have ended, and others will
    have come.
    """
    off = dict[str, float]()
    for overload in ("early", "predictive"):
        one = conductor(40, law=SLOW, limits=LIMITS, overload=overload, check_before_decode=False)
        pools = SimulatedPools(one, SimulatedPoolSpec(SLOW, MOVES, 2, STEP), steps=True)
        pools.run(even(400, 3.0, 8000, 300))
        taken = [r for r in pools.requests if r.ended]
        off[overload] = statistics.median(abs(r.expected_tbt_s - r.tbt_s) / r.tbt_s for r in taken)
    assert off["predictive"] < 0.5 * off["early"]


@pytest.mark.long
def test_a_second_look_keeps_the_limits() -> None:
    found = {name: lagging(name, check_again=True, count=400) for name in ("baseline", "predictive")}
    assert found["predictive"].wasted_tokens < 0.3 * found["baseline"].wasted_tokens
    for one in found.values():  # all that decoded was good
        assert one.goodput_requests == one.requests - sum(one.refused.values())


@pytest.mark.long
@pytest.mark.parametrize("wrong", [1 / 3, 3.0])
def test_estimates_that_are_wrong_by_3_cost_little(wrong: float) -> None:
    """No livelock: they are right before long. Goodput stays that of the baseline with true ones."""
    limits = SloLimits(ttft_s=10.0)
    arrivals = even(300, 1.2, 10_000, 50)
    true = conductor(3, limits=limits, overload="baseline")
    off = conductor(3, limits=limits, law=PrefillLatency(LAW.a, LAW.b * wrong, LAW.c * wrong))
    good = [report(played(one, arrivals, instances=8), one).goodput_requests for one in (true, off)]
    assert good[1] >= 0.97 * good[0]


def crowds(count: int, every_s: float) -> list[TracedPrompt]:
    """Documents of 16 blocks, each of which is asked about once, and then by six at once: too many for who has it."""
    arrivals = list[TracedPrompt]()
    for number in range(count):
        document = [1000 * (number + 1) + n for n in range(16)]
        for asker in range(7):
            own = [10**6 + 10 * (7 * number + asker) + n for n in range(4)]
            at_s = (number + 0.5 * (asker > 0)) * every_s
            arrivals.append(TracedPrompt(at_s, prompt(20 * 512, *document, *own), 2))
    return arrivals


def fetching(law: TransferLatency, truth: TransferLatency) -> tuple[list[bool], float]:
    """Returns which requests of a crowd fetched their prefix, and the law's error in the end as a part of the truth."""
    one = conductor(3, policy="auto")
    one.transfer_latency = TransferLatencyEstimator(law)
    pools = SimulatedPools(one, SimulatedPoolSpec(LAW, truth))
    pools.run(crowds(60, 10.0))
    return [r.choice.transferred_tokens > 0 for r in pools.requests], one.transfer_latency.seconds(
        8192
    ) / truth.seconds(8192)


@pytest.mark.parametrize("wrong", [1 / 3, 3.0])
@pytest.mark.parametrize("rate", [RATE, 8000.0])
def test_a_law_of_transfers_that_is_wrong_by_3_is_found_out(wrong: float, rate: float) -> None:
    """The error is also found where no request would ever try a fetch: 8,000 tokens a second are worth it here, a third
    of that is not.
    """
    truth = TransferLatency.at_rate(rate)
    right, _ = fetching(truth, truth)
    fetches, off = fetching(TransferLatency(0.0, truth.b * wrong), truth)
    assert sum(right[210:]) > 25
    assert sum(fetches[210:]) >= 0.9 * sum(right[210:])
    assert off == pytest.approx(1.0, rel=0.1)


def test_transfers_that_are_too_dear_are_tried_seldom() -> None:
    """At 2,000 tokens a second nearly all is computed sooner than it comes: of 420 prompts few are fetched."""
    truth = TransferLatency.at_rate(2000.0)
    for wrong in (1 / 3, 1.0):
        fetches, _ = fetching(TransferLatency(0.0, truth.b * wrong), truth)
        assert 1 <= sum(fetches) <= 8


@pytest.mark.long
@pytest.mark.parametrize("wrong", [1 / 3, 3.0])
@pytest.mark.parametrize("rate", [RATE, 8000.0])
def test_laws_of_transfers_that_are_wrong_by_3_cost_little(wrong: float, rate: float) -> None:
    """No livelock. Goodput is at least the baseline's with true ones, that of a policy which moves nothing included."""
    limits, truth, arrivals = SloLimits(ttft_s=4.0), TransferLatency.at_rate(rate), zipf(500, 6.0)
    good = list[int]()
    for policy, law in (("cache-aware", truth), ("auto", truth), ("auto", TransferLatency(0.0, truth.b * wrong))):
        one = conductor(4, policy=policy, limits=limits, overload="baseline")
        one.transfer_latency = TransferLatencyEstimator(law)
        pools = SimulatedPools(one, SimulatedPoolSpec(LAW, truth, 8, STEP))
        pools.run(arrivals)
        good.append(report(pools, one).goodput_requests)
    assert good[2] >= good[0]
    assert good[2] >= 0.97 * good[1]


def test_the_simulator_has_no_policy_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of the Conductor's choice is a mutant of the simulation."""
    right = report(played(one := conductor(4), zipf(200, 3.0)), one)
    monkeypatch.setitem(routing.POLICIES, "mooncake", lambda asked: routing.mooncake(asked)._replace(worker=0))
    mutant = report(played(one := conductor(4), zipf(200, 3.0)), one)
    assert mutant.imbalance == 4.0 > 2 * right.imbalance


def told(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    assert launch.main(["plan", "simulate", "--json", *flags]) == 0
    runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return runs


@pytest.mark.long
def test_policies_have_mooncakes_order() -> None:
    """The load is more than the workers can compute without their stored prefixes."""
    mean = {}
    for policy in ("load-balance", "cache-aware", "mooncake", "auto"):
        one = conductor(8, pages=240, policy=policy)
        mean[policy] = report(played(one, zipf(800, 10.0)), one).mean_ttft_s
    assert mean["load-balance"] > mean["cache-aware"] > mean["mooncake"] >= 0.8 * mean["auto"]


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason="the public trace is not here")
def test_the_conversation_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """Mooncake's order of policies, on 8 workers of 6,000 pages; published elsewhere: 92, 60, 14, 6 s."""
    policies = "load-balance,cache-aware,mooncake"
    balance, aware, ours = told(capsys, "--trace", str(TRACE), "--rows", "4000", "--policy", policies)
    assert balance["mean_ttft_s"] > aware["mean_ttft_s"] > 2 * ours["mean_ttft_s"]
    assert ours["hit"] > aware["hit"] > balance["hit"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not TRACE.exists(), reason="the public trace is not here")
def test_the_conversation_trace_by_chance_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trace", str(TRACE)]
    means = [told(capsys, *flags, "--rows", "4000", "--policy", "random", "--seed", str(s))[0] for s in range(10)]
    (balance,) = told(capsys, *flags, "--rows", "4000", "--policy", "load-balance")
    assert sum(m["mean_ttft_s"] for m in means) / 10 > balance["mean_ttft_s"]
    assert all(run["cpu_s"] < 10 for run in told(capsys, *flags))
    decoded = ["--prefill-workers", "16", "--instances", "8", "--slo-ttft", "30s", "--slo-tbt", "100ms"]
    assert told(capsys, *flags, "--policy", "auto", *decoded)[0]["cpu_s"] < 45
    few = [  # where there is room for all, it matters little
        run["mean_ttft_s"]
        for run in told(capsys, *flags, "--rows", "4000", "--speed", "0.3", "--policy", "load-balance,mooncake")
    ]
    assert max(few) < 2 * min(few)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not TRACE.exists(), reason="the public trace is not here")
def test_early_refusal_on_the_conversation_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """Decoding is the bottleneck: 16 prefill workers, 8 instances, twice the request rate."""
    baseline, early, predictive = told(
        capsys, "--trace", str(TRACE), "--rows", "6000", "--speed", "2", "--spread", "3", "--policy", "mooncake",
        "--overload", "baseline,early,predictive", "--prefill-workers", "16", "--instances", "8", "--slo-ttft", "30s",
        "--slo-tbt", "100ms",
    )  # fmt: skip
    assert early["wasted_tokens"] <= 0.3 * baseline["wasted_tokens"]
    assert early["correlation"] < -0.3 < predictive["correlation"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--policy", "auto,best"],
            f"--policy must be one of {', '.join(POLICIES)}, not 'best'",
        ),
        (["--kvcache-balancing-threshold", "0.5"], "must be at least 1, not 0.5"),
        (["--prefill-workers", "0"], "--prefill-workers must be at least 1, not 0"),
        (["--slo-tbt", "1ms", "--instances", "2"], "below a step of one completion alone"),
        (["--slo-tbt", "1"], "--slo-tbt 1 is not a time"),
        (["--slo-ttft", "1ms"], "--slo-ttft 1ms is below what the shortest prompt, of "),
        (["--prefill-pipeline", "3"], "--prefill-pipeline 3 does not divide --prefill-workers"),
        (["--slo-tbt", "100ms"], "--slo-tbt needs --instances, because "),
        (["--prefill-law", "1,2"], "--prefill-law must be three numbers"),
    ],
)
def test_bad_input(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n')
    assert launch.main(["plan", "simulate", "--trace", str(trace), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ('{"timestamp": -1, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}', "line 2: it came before"),
        ('{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1]}', "line 2: hash_ids must have"),
        ('{"timestamp": 5, "input_length": 9, "output_length": 3, "hash_ids": ["a"]}', "line 2: hash_ids must be"),
        ('{"timestamp": 5', "line 2: no JSON"),
    ],
)
def test_a_trace_with_a_mistake(second: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n' + second)
    assert launch.main(["plan", "simulate", "--trace", str(trace)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["t.jsonl", "t_SURROGATE.jsonl"])
def test_a_surrogate_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / name
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n')
    flags = ["plan", "simulate", "--trace", str(trace), "--policy", "auto"]
    assert launch.main(flags) == 0
    assert ("(a surrogate)" in capsys.readouterr().out) == ("SURROGATE" in name)
    assert launch.main([*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["surrogate"] == ("SURROGATE" in name)
