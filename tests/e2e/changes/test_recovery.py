"""Workers are killed in the midst of steps: others take their places, and every request gets the tokens that it would
have got."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import careless
import pytest
from held_interpreter import FOLDER, SECONDS
from test_faults import gone, shared_memory
from tiny import llama

from lamina import LLM, SamplingParams
from lamina.config.engine_config import ModelOptions
from lamina.executor.launchers import local
from lamina.observe.failpoints import FAILPOINT, Failpoint
from lamina.observe.trace import Event
from lamina.protocol.executor import WorkerError
from lamina.tools.check.runner import ReferenceModel

pytestmark = pytest.mark.usefixtures("no_child_left")
TOKENS = 40
KILLS = 10
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, frequency_penalty=0.4, repetition_penalty=1.1),
    SamplingParams(temperature=0.8, max_tokens=TOKENS, ignore_eos=True, seed=7, n=2),
    SamplingParams(temperature=0.8, max_tokens=TOKENS, min_tokens=3, stop_token_ids=[11, 12], seed=3),
    SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, prompt_logprobs=0),
]
# Rounded: KV that is built again is computed in other shapes.
PLACES = 4


def _first(entry: dict[int, Any]) -> float:
    return float(next(iter(entry.values())).logprob)


def told(outputs: list[Any]) -> list[Any]:
    found = []
    for output in outputs:
        scores = [None if x is None else round(_first(x), PLACES) for x in output.prompt_logprobs or []]
        for one in output.outputs:
            probs = [round(_first(x), PLACES) for x in one.logprobs or []]
            found.append((one.token_ids, one.finish_reason, one.stop_reason, probs, scores))
    return found


def run(llm: LLM, prompts: list[list[int]], kill: dict[int, str]) -> list[Any]:
    """All prompts to their ends. ``kill``: who is killed once so many tokens have come, in all."""
    outputs, left, grown = dict[int, Any](), dict(sorted(kill.items())), dict[int, int]()
    with llm.stream(prompts, PARAMS) as stream:
        for output in stream:
            had = outputs.get(output.request_id)
            for i, one in enumerate(output.outputs):
                before = had.outputs[i].token_ids if had else []
                assert one.token_ids[: len(before)] == before, "what was told is another thing now"
            outputs[output.request_id] = output
            grown[output.request_id] = sum(len(o.token_ids) for o in output.outputs)
            while left and sum(grown.values()) >= next(iter(left)):
                os.kill(llm.pools.pids[left.pop(next(iter(left)))], signal.SIGKILL)
        ids = stream.request_ids
    assert not left, "somebody was not killed"
    return told([outputs[i] for i in ids])


CASES = {
    "by head, spares": ({"spare_compute": 1, "spare_memory": 1}, ["compute-0", "memory-1"]),
    "by token, a ring": ({"partition": "token", "pipeline": 3}, ["compute-1", "memory-0", "compute-0"]),
    "by request, prefill, tcp": (
        {"partition": "request", "prefill_workers": 1, "transport": "tcp"},
        ["memory-1", "prefill-0", "compute-0"],
    ),
    "ranks": ({"tensor_parallel_size": 2}, ["compute-1", "memory-1"]),
}


@pytest.mark.long(but=["by head, spares"])
@pytest.mark.parametrize("case", CASES)
def test_every_request_goes_on(case: str, llama_path: Path, prompts: list[list[int]]) -> None:
    options, victims = CASES[case]
    before = shared_memory()
    with LLM(str(llama_path), memory_workers=2, prefill_chunk=32, deterministic=True, **options) as llm:
        wanted = run(llm, prompts, {})
        pids = llm.pools.pids
        spares = [member.handle.pid for member in llm.pools.workers.spare_workers]
        found = run(llm, prompts, {20 + 30 * i: victim for i, victim in enumerate(victims)})
        assert found == wanted
        for worker, pid in llm.pools.pids.items():
            assert (pid != pids[worker]) == (worker in victims)
            assert (pid in spares) == (worker in victims and bool(spares))
        assert all(gone(pids[victim]) for victim in victims)
        assert run(llm, prompts, {}) == wanted
        last = llm.pools.pids
    assert all(gone(pid) for pid in last.values())
    assert shared_memory() == before


@pytest.mark.long
@pytest.mark.parametrize("role", ["memory", "compute"])
def test_one_whose_device_has_an_error_is_replaced_and_where_the_next_one_has_the_same_the_run_ends(
    role: str,
    llama_path: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The log has the traceback of each."""
    monkeypatch.setitem(local.ROLES, role, ("tests.support.models.careless", f"serve_failing_{role}"))
    monkeypatch.setenv(careless.FOLDER, str(tmp_path))
    monkeypatch.setenv(careless.FAILING, "1")
    with LLM(str(llama_path), memory_workers=2, deterministic=True) as llm:
        pids, tokens = llm.pools.pids, run(llm, prompts, {})
        assert len([worker for worker, pid in llm.pools.pids.items() if pid != pids[worker]]) == 1
        assert run(llm, prompts, {}) == tokens
    assert capfd.readouterr().err.count(f"\nRuntimeError: {careless.ERROR}") == 1
    monkeypatch.setenv(careless.FAILING, "9")
    with LLM(str(llama_path), memory_workers=2) as llm:
        pids = llm.pools.pids
        with pytest.raises(WorkerError, match=f"^{role} worker.*: RuntimeError: {careless.ERROR}$"):
            run(llm, prompts, {})
    assert all(gone(pid) for pid in pids.values())


@pytest.mark.long
def test_one_that_is_stopped_is_replaced_long_before_the_deadline_of_a_step(llama_path: Path) -> None:
    with LLM(str(llama_path), memory_workers=2) as llm:
        for victim in ("memory-0", "compute-0"):
            pids = llm.pools.pids
            stream = llm.stream([[5, 6, 7]], PARAMS[0])
            next(stream)
            os.kill(pids[victim], signal.SIGSTOP)
            assert [o.outputs[0].finish_reason for o in stream][-1] == "length"
            assert [worker for worker, pid in llm.pools.pids.items() if pid != pids[worker]] == [victim]
            assert gone(pids[victim])
        # One that owes nothing may stand still for as long as it likes; it is lost once there is something to do.
        idle = llm.pools.pids["memory-1"]
        os.kill(idle, signal.SIGSTOP)
        assert llm.engine.check_workers() == []
        assert llm.pools.pids["memory-1"] == idle
        assert llm.generate([[5, 6, 7]], PARAMS[0])[0].outputs[0].finish_reason == "length"
        assert llm.pools.pids["memory-1"] != idle
        assert gone(idle)


@pytest.mark.parametrize("seconds", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_one_whose_interpreter_stands_still_is_not_replaced(
    seconds: int, llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still for longer than one may be stopped: it answers nothing and takes no CPU time, and goes on by
    itself.
    """
    monkeypatch.setitem(local.ROLES, "memory", ("tests.support.models.held_interpreter", "serve_memory"))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(SECONDS, str(seconds))
    with LLM(str(llama_path), memory_workers=2) as llm:
        pids, wanted = llm.pools.pids, llm.generate([[5, 6, 7]], PARAMS[0])[0].outputs[0].token_ids
        (tmp_path / "hold").touch()
        while not all((tmp_path / f"over-{pids[name]}").exists() for name in ("memory-0", "memory-1")):
            assert llm.generate([[5, 6, 7]], PARAMS[0])[0].outputs[0].token_ids == wanted
            llm.stats()
        assert llm.pools.pids == pids


@pytest.mark.slow
def test_one_that_hangs_is_replaced_once_a_step_is_late(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose stop is not seen is as one that hangs."""
    monkeypatch.setattr("lamina.executor.stall_detector.STOPPED_S", 1e9)
    options: dict[str, Any] = {"memory_workers": 2, "prefill_workers": 1, "step_timeout_s": 3.0, "max_recoveries": 100}
    with LLM(str(llama_path), **options) as llm:
        wanted = llm.generate([[5, 6, 7]] * 2, PARAMS[0])
        for victim in ("compute-0", "memory-0", "prefill-0"):
            pids = llm.pools.pids
            os.kill(pids[victim], signal.SIGSTOP)
            assert told(llm.generate([[5, 6, 7]] * 2, PARAMS[0])) == told(wanted)
            assert llm.pools.pids[victim] != pids[victim]
            assert gone(pids[victim])


@pytest.mark.no_retry
@pytest.mark.long
def test_kv_that_is_built_again_in_half_precision_errs_no_more_than_its_rounding(tiny_lm: Path) -> None:
    """Rows of a chunk are rounded otherwise than rows one by one: so tokens may be other ones, but no worse."""
    rng = random.Random(1)
    prompts = [[rng.randrange(2048) for _ in range(16)] for _ in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=0)
    with LLM(str(tiny_lm), memory_workers=2, dtype="bfloat16") as llm:
        left, outputs = ["memory-1", "compute-0"], dict[int, Any]()
        with llm.stream(prompts, params) as stream:
            for output in stream:
                outputs[output.request_id] = output
                grown = sum(len(o.outputs[0].token_ids) for o in outputs.values())
                if left and grown >= (3 - len(left)) * 48:
                    kill(llm, left.pop(0))
        assert not left
    exact = ReferenceModel(str(tiny_lm), ModelOptions())
    found, bound = exact.agreement(ModelOptions(dtype="bfloat16"), "auto", list(outputs.values()))
    assert found.num_completions == len(prompts)
    assert 0.0 < found.logit_error <= bound
    assert not found.num_wrong
    for output in outputs.values():  # the same, after another text: as if KV were built again of the wrong tokens
        output.prompt_token_ids[-1] ^= 1
    found, _ = exact.agreement(ModelOptions(dtype="bfloat16"), "auto", list(outputs.values()))
    assert found.logit_error > bound


def test_one_loss_too_many_ends_the_run_and_names_it(llama_path: Path) -> None:
    with LLM(str(llama_path), memory_workers=1, max_recoveries=1) as llm:
        wanted = run(llm, [[5, 6, 7]] * len(PARAMS), {})
        assert run(llm, [[5, 6, 7]] * len(PARAMS), {20: "memory-0"}) == wanted
        last = llm.pools.pids
        with pytest.raises(
            WorkerError, match=r"^memory worker 0 \(pid \d+\) was killed by SIGKILL; .* --max-recoveries 1 "
        ):
            run(llm, [[5, 6, 7]] * len(PARAMS), {20: "memory-0"})
        assert all(gone(pid) for pid in last.values())


@pytest.mark.long
def test_a_module_in_this_process_goes_on_without_its_memory_worker(prompts: list[list[int]]) -> None:
    """Its compute worker is a thread, which stays."""
    with LLM(llama(), memory_workers=2, prefill_chunk=32, deterministic=True) as llm:
        wanted = run(llm, prompts, {})
        assert run(llm, prompts, {30: "memory-0"}) == wanted


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_kills_at_random_moments(case: str, llama_path: Path, prompts: list[list[int]]) -> None:
    """In the midst of slices, messages, and of the recovery from another kill."""
    options, _ = CASES[case]
    rng = random.Random(case)
    with LLM(
        str(llama_path), memory_workers=2, prefill_chunk=32, deterministic=True, max_recoveries=1000, **options
    ) as llm:
        wanted = run(llm, prompts, {})
        for number in range(KILLS):
            victims = rng.choices(sorted(llm.pools.pids), k=rng.choice((1, 1, 2)))
            timers = [threading.Timer(rng.uniform(0.0, 0.4), kill, (llm, victim)) for victim in victims]
            for timer in timers:
                timer.start()
            found = run(llm, prompts, {})
            for timer in timers:
                timer.join()
            assert found == wanted, f"kill {number}: {victims}"


def kill(llm: LLM, victim: str) -> None:
    with suppress(ProcessLookupError):
        os.kill(llm.pools.pids[victim], signal.SIGKILL)


@pytest.mark.long
def test_one_that_dies_while_nobody_asks_for_anything_is_replaced_too(llama_path: Path) -> None:
    with LLM(str(llama_path), memory_workers=2) as llm:
        wanted = llm.generate([[5, 6, 7]], PARAMS[0])[0].outputs[0].token_ids
        first = llm.pools.pids
        os.kill(first["memory-0"], signal.SIGKILL)
        assert gone(first["memory-0"], 10.0)
        assert set(llm.stats()) == {"memory-1", "compute-0"}
        assert llm.engine.check_workers() == []
        assert set(llm.stats()) == {"memory-0", "memory-1", "compute-0"}
        os.kill(llm.pools.pids["compute-0"], signal.SIGKILL)
        assert llm.generate([[5, 6, 7]], PARAMS[0])[0].outputs[0].token_ids == wanted
        assert not set(llm.pools.pids.values()) & {first["memory-0"], first["compute-0"]}


AT = [("memory-0", Event.WAIT_Q), ("memory-1", Event.SEND_O), ("compute-0", Event.SEND_KV), ("compute-0", Event.WAIT_O)]


@pytest.mark.long
def test_between_two_messages_of_a_layer(
    llama_path: Path, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Failpoint(tmp_path / "wire")
    monkeypatch.setenv(FAILPOINT, str(tmp_path / "wire"))
    with LLM(str(llama_path), memory_workers=2, prefill_chunk=32, deterministic=True) as llm:
        wanted = run(llm, prompts, {})
        for victim, event in AT:
            pids = llm.pools.pids
            wire.arm(pids[victim], event, 25)
            assert run(llm, prompts, {}) == wanted
            assert wire.has_fired, f"{victim} has not come to {event.name}"
            assert [worker for worker, pid in llm.pools.pids.items() if pid != pids[worker]] == [victim]
