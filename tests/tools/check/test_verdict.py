"""The verdict of ``lamina-launch check`` on two runs, and which settings it compares.

Covers: lamina/tools/check/check_report.py, lamina/tools/check/fault_promises.py, lamina/tools/check/low_memory_case.py,
lamina/tools/check/matrix.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.config.flat_options import make_config
from lamina.config.partition import KvShards
from lamina.kv.stored_format import stored_dtype
from lamina.protocol.blocks.block_counts import split_memory
from lamina.protocol.step_plan import LayerShape
from lamina.request import CompletionOutput, Logprob
from lamina.tools.check import time_left
from lamina.tools.check.agreement import ERROR_ALLOWED, Agreement
from lamina.tools.check.check_report import report_json, show
from lamina.tools.check.fault_promises import COMPUTE, MEMORY
from lamina.tools.check.low_memory_case import LowMemoryCase
from lamina.tools.check.matrix import (
    BASE,
    EVICTING,
    EVICTING_RANKS,
    FIXED,
    LENDING,
    RANKS,
    SELECTING,
    Exactness,
    Resize,
    Setting,
    full_settings,
    quick_settings,
    settings_of_axes,
)
from lamina.tools.check.verdict import Outcome, Verdict, compare, failed_verdict, judge
from lamina.workers.compute.kv_capacity import store_bytes

QUICK = quick_settings(["numba", "reference"])
WHOLE = full_settings(["numba", "reference"], ["torch"], ["shm", "tcp"])
SPLIT = Setting("memory workers", Exactness.BITWISE, BASE, {"memory_workers": 2})
BATCHED = Setting("pipeline", Exactness.BITWISE, FIXED, {"pipeline": 2, "deterministic": True})
LENDS = Setting("partition", Exactness.BITWISE, BASE, {"partition": LENDING, "memory_workers": 3})
PLANNED = Setting("planned change", Exactness.BITWISE, BASE, changes=(Resize(3), Resize(2, (0,))))
ROUNDED = Setting("dtype", Exactness.BOUNDED, None, {"dtype": "bfloat16"})


def completion(tokens: list[int], values: list[float] | None = None) -> CompletionOutput:
    values = values or [-0.5] * len(tokens)
    logprobs = [{t: Logprob(v, 1), t + 100: Logprob(v - 1.0, 2)} for t, v in zip(tokens, values, strict=True)]
    return CompletionOutput(0, "", tokens, "length", None, logprobs)


def agreement(**changes: Any) -> Agreement:
    return replace(Agreement(num_tokens=100, num_same_as_generate=2, num_completions=2, logit_error=1e-5), **changes)


def outcome(**changes: Any) -> Outcome:
    two = [completion([5, 6, 7]), completion([8, 9, 10])]
    plans = [(0, ((0, 0, 3), (1, 0, 3)))]
    return replace(Outcome(two, plans, 0, agreement(), ERROR_ALLOWED, 1.0), **changes)


def other_bits() -> list[CompletionOutput]:
    return [completion([5, 6, 7]), completion([8, 9, 10], [-0.5, math.nextafter(-0.5, 0.0), -0.5])]


def test_equal_runs_are_bitwise() -> None:
    found = judge(SPLIT, outcome(), outcome())
    assert (found.exactness, found.promised, found.held, found.note) == ("bitwise", "bitwise", True, "")
    assert (found.equal_tokens, found.equal_prompts, found.worst_difference) == (6, 2, 0.0)
    assert (found.compared_with, found.same_plans) == ("base", True)


def test_one_bit_is_a_breach_where_bits_are_promised() -> None:
    found = judge(SPLIT, outcome(completions=other_bits()), outcome())
    assert (found.exactness, found.held) == ("token-equal", False)
    assert found.worst_difference == pytest.approx(1e-16, rel=0.5)
    assert found.worst_difference > 0.0
    assert "first difference in prompt 1, token 1" in found.note


def test_a_change_that_moves_nothing_shows_nothing() -> None:
    found = judge(PLANNED, outcome(moved_bytes=0), outcome())
    assert (found.exactness, found.held, found.note) == ("bitwise", False, "bytes of KV moved: 0")
    found = judge(PLANNED, outcome(moved_bytes=64), outcome())
    assert (found.held, found.setting) == (True, "(while sequences run: 3, then 2 without 0)")


def test_one_bit_is_none_where_tokens_are_promised() -> None:
    found = judge(FIXED, outcome(completions=other_bits()), outcome())
    assert (found.exactness, found.held) == ("token-equal", True)


@pytest.mark.parametrize("like", [outcome(), None], ids=["like the base", "the base itself"])
def test_a_wrong_token_is_a_breach_whatever_is_promised(like: Outcome | None) -> None:
    run = outcome(completions=[completion([5, 6, 8]), completion([8, 9, 10])], agreement=agreement(num_wrong=1))
    for promised in (Exactness.BITWISE, Exactness.TOKEN_EQUAL, Exactness.BOUNDED):
        found = judge(Setting("x", promised, BASE if like else None), run, like)
        assert (found.exactness, found.held) == ("nothing", False)


def test_too_many_ties_or_an_error_too_large_are_no_equal_tokens() -> None:
    assert judge(BASE, outcome(agreement=agreement(num_ties=1)), None).held
    assert not judge(BASE, outcome(agreement=agreement(num_ties=2)), None).held
    assert not judge(BASE, outcome(agreement=agreement(logit_error=2 * ERROR_ALLOWED)), None).held
    assert not judge(BASE, outcome(agreement=Agreement()), None).held


@pytest.mark.parametrize(("error", "held"), [(0.29, True), (0.31, False), (math.inf, False), (math.nan, False)])
def test_half_precision_is_bounded(error: float, held: bool) -> None:
    run = outcome(agreement=agreement(logit_error=error, num_ties=20), bound=0.3)
    assert judge(ROUNDED, run, None).held is held
    assert judge(ROUNDED, replace(run, agreement=replace(run.agreement, num_wrong=1)), None).held is False


def test_other_plans_excuse_bits_but_not_tokens() -> None:
    plans = [(0, ((0, 0, 3),)), (0, ((1, 0, 3),))]
    found = judge(SPLIT, outcome(completions=other_bits(), plans=plans), outcome())
    assert (found.promised, found.held) == ("token-equal", True)
    assert "plans" in found.note
    wrong = outcome(completions=other_bits(), plans=plans, agreement=agreement(num_wrong=1))
    assert judge(SPLIT, wrong, outcome()).held is False


def test_other_plans_excuse_nothing_where_all_is_deterministic() -> None:
    run = outcome(completions=other_bits(), plans=[])
    assert judge(BATCHED, run, outcome()).held is False
    preempted = judge(BATCHED, replace(run, num_preemptions=1), outcome())
    assert (preempted.promised, preempted.held) == ("token-equal", True)
    assert "--kv-cache-memory-bytes" in preempted.note


def test_tokens_behind_the_first_difference_are_not_compared() -> None:
    run = [completion([5, 6, 7], [-1.0, -1.25, -9.0])]
    like = [completion([5, 106, 7], [-1.0, -2.0, -1.0])]  # both know token 106 as a candidate of the second place
    found = compare(run, like)
    assert (found.equal_tokens, found.equal_prompts, found.first) == (2, 0, (0, 1))
    assert found.worst == pytest.approx(0.25)


def test_what_is_not_a_number_is_no_equality() -> None:
    run = outcome(completions=[completion([5], [math.nan])])
    like = outcome(completions=[completion([5], [float("nan")])])
    found = judge(SPLIT, run, like)
    assert found.held is False
    assert found.worst_difference == math.inf


def test_missing_prompts_and_tokens_are_noticed() -> None:
    with pytest.raises(ValueError):
        compare([completion([5])], [])
    shorter = compare([completion([5])], [completion([5, 6])])
    assert (shorter.equal_prompts, shorter.first) == (0, (0, 1))


@given(at=st.integers(0, 5), ulps=st.integers(1, 3))
def test_any_changed_bit_is_found(at: int, ulps: int) -> None:
    values = [-0.5] * 6
    for _ in range(ulps):
        values[at] = math.nextafter(values[at], -1.0)
    found = compare([completion([1] * 6, values)], [completion([1] * 6)])
    assert found.first == (0, at)
    assert found.equal_tokens == 6


def test_idle_workers_are_named() -> None:
    assert "memory-1" in judge(SPLIT, outcome(idle=("memory-1",)), outcome()).note


def test_a_row_that_is_to_lend_and_lends_nothing_is_a_breach() -> None:
    assert judge(LENDS, outcome(lent=3), outcome()).held
    idle = judge(LENDS, outcome(), outcome())
    assert (idle.held, idle.exactness) == (False, "bitwise")
    assert "stripes lent: 0" in idle.note
    assert judge(SPLIT, outcome(), outcome()).held, "nobody else has to"


def test_who_goes_on_with_the_kv_that_it_had_is_no_excuse_for_other_bits() -> None:
    (swaps,) = [s for s in QUICK if s.swaps]
    assert "(too little memory for all)" in swaps.text
    right = judge(swaps, outcome(num_preemptions=2, num_swapped=2), outcome())
    assert (right.held, right.exactness) == (True, "bitwise")
    assert right.note == "preempted: 2, with their KV: 2"
    assert judge(swaps, outcome(completions=other_bits(), num_preemptions=2, num_swapped=2), outcome()).held is False
    excused = judge(swaps, outcome(completions=other_bits(), num_preemptions=2, num_swapped=1), outcome())
    assert (excused.held, excused.promised) == (True, "token-equal"), "one was computed anew"
    assert [s.axis for s in WHOLE if s.options.get("kv_cache_dtype") == "int8" and s.swaps] == ["preemption"]


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_memory_is_too_tight_for_what_four_prompts_become(dtype: str) -> None:
    layers = [LayerShape(4, 2, 8, 8, "")] * 3
    config = make_config({"dtype": "float32", "block_size": 16, "max_num_seqs": 4, "kv_cache_dtype": dtype})
    for prompts, longest, blocks in (((3, 17, 1, 290, 33), 322, 23), ((5, 5, 5, 5), 40, 4), ((1, 30), 62, 5)):
        found = LowMemoryCase(longest, layers, 320, prompts).preemption_options(config)
        two, one = (store_bytes(layers, stored_dtype(dtype, torch.float32), n, 16) for n in (32, 16))
        split = split_memory(
            int(found["kv_memory"]), [two - one], [0], [KvShards((True,))], stripe_blocks=0, single_shard=False,
            block_size=16, max_rows=64, max_len=found["max_model_len"],
        )  # fmt: skip
        assert split == [blocks], "of all prompts, and at least one more than the longest of them becomes"
        assert found["max_model_len"] == min(320, -(-longest // 16) * 16)


def test_rows_that_lend_are_in_both_and_say_so() -> None:
    for settings, least in ((QUICK, 1), (WHOLE, 12)):
        lending = [s for s in settings if s.lends]
        assert len(lending) >= least
        assert all(
            "(too little memory for one sequence)" in s.text and s.compared_with in (FIXED, RANKS) for s in lending
        )


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_is_too_tight_for_the_longest_sequence_alone(ranks: int) -> None:
    """Memory workers count their blocks so: one has all but the last stripe, three have enough."""
    layers, config = [LayerShape(4, 2, 8, 8, "")] * 3, make_config({"dtype": "float32", "tensor_parallel_size": ranks})
    for longest, home in ((130, 128), (257, 128), (258, 256), (322, 256), (385, 256), (386, 384)):
        found = LowMemoryCase(longest, layers, 1 << 20).options(config)
        block = config.kv.block_size * 3 * 2 * 16 * 4 // ranks
        split = split_memory(
            int(found["kv_memory"]), [block], [0], [KvShards((True, False, False))], stripe_blocks=4, single_shard=True,
            block_size=config.kv.block_size, max_rows=64, max_len=found["max_model_len"],
        )  # fmt: skip
        assert split == [home // config.kv.block_size]
        assert home < longest - 1 <= home + 128
        assert longest <= found["max_model_len"]
    with pytest.raises(ValueError, match="use longer prompts or a larger --max-tokens"):
        LowMemoryCase(129, layers, 1 << 20).options(config)


@pytest.mark.parametrize("settings", [QUICK, WHOLE], ids=["quick", "all"])
def test_settings_are_valid_and_follow_what_they_are_compared_with(settings: list[Setting]) -> None:
    assert settings[0] is BASE
    seen: set[Setting] = set()
    for setting in settings:
        assert setting.compared_with is None or setting.compared_with in seen
        if setting.drops_blocks and "partition" in setting.options:  # rows that show the refusal
            with pytest.raises(ValueError, match="does not go with --partition"):
                make_config({"memory_workers": 1, **setting.options})
        else:
            make_config({"memory_workers": 1, **setting.options})
        seen.add(setting)
        deterministic = bool(setting.options.get("deterministic"))
        if setting.promised == Exactness.BITWISE and ("pipeline" in setting.options or setting.runs_alone):
            assert deterministic, "these change the rows of a step"
        if setting.promised == Exactness.BITWISE and deterministic:
            known = setting.compared_with in (FIXED, RANKS, EVICTING, EVICTING_RANKS, SELECTING)
            assert known or (setting.compared_with and setting.compared_with.axis == "kv cache dtype")
    assert len({(s.axis, s.text) for s in settings}) == len(settings)


# fault -> promised of prompts of whose KV it had some, and of the others; with and without --deterministic
CLASSES = {
    "lost compute worker": {("bitwise", "bitwise"), ("token-equal", "token-equal")},
    "lost rank": {("bitwise", "bitwise")},
    "lost prefill worker": {("bitwise", "bitwise")},
    "lost memory worker": {("token-equal", "bitwise"), ("bitwise", "bitwise")},  # and with parity
    "lost engine": {("token-equal", "token-equal")},
}


def test_classes_are_those_that_are_stated() -> None:
    for settings in (QUICK, WHOLE):
        lost = [(s, s.fault) for s in settings if s.fault]
        assert {s.axis for s, _ in lost} == CLASSES.keys()
        for setting, fault in lost:
            assert (setting.axis, setting.promised) == (fault.axis, fault.promised)
            assert (fault.promised.word, fault.other_prompts.word) in CLASSES[setting.axis]
            assert setting.options["transport"] in ("shm", "tcp"), "threads do not die"
            strict = fault.other_prompts == Exactness.BITWISE
            assert bool(setting.options.get("deterministic")) or not strict
        assert {s.options.get("partition", "head") for s, f in lost if f.axis == MEMORY.axis} >= {
            "head", "token", "request"
        }  # fmt: skip
        assert all(s.promised <= Exactness.TOKEN_EQUAL or s.options.get("deterministic") for s in settings if s.changes)


def judged(fault: Any, run: Outcome) -> Verdict:
    return judge(Setting(fault.axis, fault.promised, FIXED, {"deterministic": True}, fault=fault), run, outcome())


def test_whose_kv_was_lost_may_have_other_bits_and_nobody_else() -> None:
    """The second prompt has other bits."""
    right = judged(MEMORY, outcome(completions=other_bits(), had_kv=frozenset({1})))
    assert (right.held, right.exactness) == (True, "token-equal")
    assert right.note == "memory-0 had KV of prompts 1"
    wrong = judged(MEMORY, outcome(completions=other_bits(), had_kv=frozenset({0})))
    assert wrong.held is False
    assert "memory-0 had no KV of prompts 1, whose bits differ" in wrong.note
    assert judged(MEMORY, outcome(completions=other_bits())).held is False
    assert judged(COMPUTE, outcome(completions=other_bits(), had_kv=frozenset({1}))).held is False
    many = outcome(completions=other_bits(), had_kv=frozenset({1}), agreement=agreement(num_wrong=1))
    assert judged(MEMORY, many).held is False, "its tokens are promised"
    preempted = judged(MEMORY, outcome(completions=other_bits(), num_preemptions=1))
    assert preempted.held, "as in any run, and it is said"


def test_a_token_too_many_or_too_few_is_a_breach_even_where_all_are_right() -> None:
    for tokens in ([5, 6], [5, 6, 7, 7]):
        told = judged(MEMORY, outcome(completions=[completion(tokens), completion([8, 9, 10])], had_kv=frozenset({0})))
        assert told.held is False
        assert f"prompt 0 got {len(tokens)} tokens, not 3" in told.note


def test_the_time_that_is_left_is_told() -> None:
    assert time_left(10.0, 1, 37) == "; about 6 min are left"
    assert time_left(300.0, 30, 37) == "; about 70 s are left"
    assert time_left(300.0, 37, 37) == ""


def test_all_axes_are_in_both() -> None:
    assert {s.axis for s in QUICK} <= {s.axis for s in WHOLE}
    assert len(WHOLE) > 2 * len(QUICK)


def test_only_takes_along_what_is_needed() -> None:
    assert [s.axis for s in settings_of_axes(QUICK, ["batch mates"])] == ["base", "deterministic", "batch mates"]
    assert [s.axis for s in settings_of_axes(QUICK, ["dtype"])] == ["base", "dtype"]
    assert settings_of_axes(QUICK, []) == QUICK
    with pytest.raises(ValueError, match="--axis must be one of base, again.*'colour'"):
        settings_of_axes(QUICK, ["colour"])


def test_the_report_names_what_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [
        judge(BASE, outcome(), None),
        judge(SPLIT, outcome(completions=other_bits()), outcome()),
        failed_verdict(ROUNDED, "no room", held=None),
        judge(SELECTING, outcome(), None),  # which promises nothing
    ]
    data = report_json("m", make_config({}), verdicts)
    assert (data["held"], data["broken"]) == (False, ["memory workers"])
    assert [r["held"] for r in data["runs"]] == [True, False, None, True]
    show("m", make_config({}), verdicts)
    text = capsys.readouterr().out
    assert "1 of 3 promises BROKEN (memory workers), 1 settings refused" in text
    assert "dtype --dtype bfloat16: refused: no room" in text
    assert "\x1b" not in text, "no colours in a pipe"


def test_the_table_has_only_the_axes_that_were_asked_for_and_what_is_broken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, other = judge(BASE, outcome(), None), judge(SPLIT, outcome(completions=other_bits()), outcome())
    rows = [base, failed_verdict(ROUNDED, "no room", held=None)]
    show("m", make_config({}), rows, axes=["dtype"])
    first = [line.split()[0] for line in capsys.readouterr().out.splitlines()[:2]]
    assert first == ["axis", "dtype"]
    show("m", make_config({}), [other, *rows], axes=["dtype"], left=3)
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[:3]] == ["axis", "memory", "dtype"]
    assert "ended early, 3 settings were not run; m: 1 of 3" in text


def test_a_lost_worker_is_a_breach() -> None:
    lost: Verdict = failed_verdict(SPLIT, "memory worker 1 was killed", held=False)
    assert (lost.word, lost.exactness) == ("BROKEN", "nothing")
