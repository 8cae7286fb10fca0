"""``lamina-launch check`` on deaths: each class is kept, and a recovery that is wrong turns its line red.

Covers: lamina/tools/check/resize_case.py, lamina/tools/check/runner.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import careless
import pytest

from lamina.config.flat_options import make_config
from lamina.executor.launchers import local
from lamina.observe.failpoints import FAILPOINT
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.surviving_kv import SurvivingTokens
from lamina.server.engine_client.engine_restarts import PromptProgress
from lamina.tools.check.fault_promises import COMPUTE, MEMORY, PARITY, PREFILL, RANK, SERVED, Death
from lamina.tools.check.matrix import BASE, BASE_OPTIONS, FIXED, RANKS, Setting, full_settings, quick_settings
from lamina.tools.check.runner import Check
from lamina.tools.check.verdict import Verdict

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
QUICK, ALL = quick_settings(["reference"]), full_settings([], [], [])
BY_REQUEST = {"partition": "request"}


def row(fault: Death, settings: list[Setting] = QUICK, **options: Any) -> list[Setting]:
    """The first one of a fault with these options."""
    has = (s for s in settings if s.fault == fault and s.options | options == s.options)
    return [next(s for s in has if options or "partition" not in s.options)]


@pytest.fixture(scope="module")
def based(llama_path: Path) -> Check:
    """The undisturbed runs that all others are compared with."""
    comparison = Check(str(llama_path), make_config(BASE_OPTIONS), [], max_tokens=16, seed=1)
    assert [v.held for v in comparison.run([BASE, FIXED])] == [True] * 2
    return comparison


@pytest.fixture(scope="module")
def ranked(based: Check) -> Check:
    assert [v.held for v in based.run([RANKS])] == [True]
    return based


def only(check: Check, settings: list[Setting]) -> Verdict:
    (verdict,) = check.run(settings)
    assert FAILPOINT not in os.environ
    return verdict


@pytest.mark.no_retry
@pytest.mark.long
def test_a_lost_compute_worker_leaves_all_bits(based: Check) -> None:
    verdict = only(based, row(COMPUTE))
    assert (verdict.held, verdict.exactness, verdict.promised) == (True, "bitwise", "bitwise"), verdict.note


@pytest.mark.no_retry
@pytest.mark.long
def test_a_lost_rank_leaves_all_bits(ranked: Check) -> None:
    verdict = only(ranked, row(RANK))
    assert (verdict.held, verdict.exactness, verdict.compared_with) == (True, "bitwise", "tensor parallel"), verdict


@pytest.mark.no_retry
@pytest.mark.long
def test_a_lost_prefill_worker_leaves_all_bits(based: Check) -> None:
    verdict = only(based, row(PREFILL))
    assert (verdict.held, verdict.exactness) == (True, "bitwise"), verdict.note


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"partition": "token"}], ids=["head", "token"])
def test_behind_a_lost_memory_worker_tokens_are_equal(options: dict[str, str], based: Check) -> None:
    verdict = only(based, row(MEMORY, **options))
    assert (verdict.held, verdict.exactness) == (True, "token-equal"), verdict.note
    assert "memory-0 had KV of prompts " in verdict.note


@pytest.mark.no_retry
@pytest.mark.long
def test_by_request_the_others_keep_their_bits(based: Check) -> None:
    verdict = only(based, row(MEMORY, **BY_REQUEST))
    assert (verdict.held, verdict.exactness) == (True, "token-equal"), verdict.note
    assert (said := re.search(r"memory-0 had KV of prompts ([0-9, ]+)", verdict.note))
    assert 0 < len(said[1].split(", ")) < 4, "of those that ran at once"


@pytest.mark.no_retry
@pytest.mark.long
def test_behind_a_lost_engine_tokens_are_equal(based: Check) -> None:
    verdict = only(based, row(SERVED))
    assert (verdict.held, verdict.promised) == (True, "token-equal"), verdict.note
    assert verdict.tokens == 6 * 16


@pytest.mark.no_retry
@pytest.mark.slow
def test_parity_brings_all_bits_back(based: Check) -> None:
    verdict = only(based, row(PARITY, ALL))
    assert (verdict.held, verdict.exactness) == (True, "bitwise"), verdict.note


# What is wrong then, of the driver. The mistakes of the driver. One reports a token twice, one computes another text
# again. The last computes the KV of all sequences again, not only of those that have lost theirs.
def tell_twice(patch: pytest.MonkeyPatch) -> None:
    roll_back = Scheduler.roll_back

    def twice(self: Scheduler, *loss: Any) -> Any:
        for told in (s.output for s in self.running if s.num_output_tokens):
            told.token_ids.append(told.token_ids[-1])
            told.logprobs.append(told.logprobs[-1])  # type: ignore[union-attr]
        return roll_back(self, *loss)

    patch.setattr(Scheduler, "roll_back", twice)


def mistake_the_text(patch: pytest.MonkeyPatch) -> None:
    restart = Sequence.reset_computed

    def mistake(self: Sequence) -> None:
        restart(self)
        if self.num_output_tokens:
            self.tokens[0] ^= 1

    patch.setattr(Sequence, "reset_computed", mistake)


def lose_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SurvivingTokens, "count", lambda self, wanted: 0)


def forget_the_last_token(patch: pytest.MonkeyPatch) -> None:
    ask = PromptProgress.request_message

    def forget(self: PromptProgress, key: int) -> Any:
        for told in self._received.values():
            told.token_ids.pop()
        return ask(self, key)

    patch.setattr(PromptProgress, "request_message", forget)


def change_what_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(local.ROLES, "memory", ("tests.support.models.careless", "serve_memory"))


def rebuild_other_values(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(local.ROLES, "memory", ("tests.support.models.careless", "serve_rebuilt"))
    patch.setenv(careless.SOUND, "2")


WRONG: dict[str, tuple[Death, dict[str, str], Callable[[pytest.MonkeyPatch], None], str]] = {
    "a compute worker, and its last token is told twice": (COMPUTE, {}, tell_twice, "got 17 tokens, not 16"),
    "a compute worker, and KV elsewhere changes": (COMPUTE, {}, change_what_stays, "first difference"),
    "a compute worker, and all is computed again": (COMPUTE, {}, lose_all, "first difference"),
    "by head, of another text": (MEMORY, {}, mistake_the_text, "first difference"),
    "by token, of another text": (MEMORY, {"partition": "token"}, mistake_the_text, "first difference"),
    "by request, of another text": (MEMORY, BY_REQUEST, mistake_the_text, "first difference"),
    "by head, and its KV is another one": (MEMORY, {}, rebuild_other_values, "first difference"),
    "by token, and its KV is another one": (MEMORY, {"partition": "token"}, rebuild_other_values, "first difference"),
    "by request, and its KV is another one": (MEMORY, BY_REQUEST, rebuild_other_values, "first difference"),
    "by request, and others too": (MEMORY, BY_REQUEST, lose_all, "memory-0 had no KV of prompts .* whose bits differ"),
    "an engine, of whose tokens one is forgotten": (SERVED, {}, forget_the_last_token, "got 17 tokens, not 16"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_recovery_is_a_broken_promise(
    case: str, based: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault, options, harm, words = WRONG[case]
    monkeypatch.setenv(careless.FOLDER, str(tmp_path))
    harm(monkeypatch)
    verdict = only(based, row(fault, **options))
    assert (verdict.held, verdict.axis) == (False, fault.axis), verdict
    assert re.search(words, verdict.note), verdict.note


@pytest.mark.long
@pytest.mark.parametrize("harm", [tell_twice, change_what_stays, lose_all])
def test_a_rank_behind_whose_death_something_is_wrong(
    harm: Callable[[pytest.MonkeyPatch], None], ranked: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(monkeypatch)
    verdict = only(ranked, row(RANK))
    assert (verdict.held, verdict.axis) == (False, "lost rank"), verdict
    assert ("got 17 tokens" in verdict.note) == (harm is tell_twice), verdict.note


@pytest.mark.slow
def test_parity_of_which_something_is_wrong_brings_other_bits(based: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    change_what_stays(monkeypatch)
    verdict = only(based, row(PARITY, ALL))
    assert (verdict.held, verdict.axis) == (False, "lost memory worker"), verdict


@pytest.mark.long
def test_a_prefill_worker_in_whose_place_another_one_computes_other_values(
    based: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(local.ROLES, "prefill", ("tests.support.models.careless", "serve_prefill"))
    monkeypatch.setenv(careless.FOLDER, str(tmp_path))
    verdict = only(based, row(PREFILL))
    assert (verdict.held, verdict.axis, verdict.exactness) == (False, "lost prefill worker", "token-equal"), verdict


@pytest.mark.long
def test_who_does_not_die_in_time_is_no_run(based: Check) -> None:
    (setting,) = row(COMPUTE)
    never = Setting(setting.axis, setting.promised, FIXED, setting.options, fault=COMPUTE._replace(times=1 << 40))
    verdict = only(based, [never])
    assert verdict.held is None
    assert "sequences ended before compute-0 died: raise --max-tokens" in verdict.note
