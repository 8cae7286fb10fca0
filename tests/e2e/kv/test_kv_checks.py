"""KV that changes in a memory worker's memory is seen before it is attended, and computed again elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.models.hybrids import build_hybrid
from tiny import llama

from lamina import LLM, SamplingParams
from lamina.observe.failpoints import FAILPOINT, Failpoint
from lamina.observe.trace import FLIP_BIT
from lamina.protocol.executor import WorkerError

pytestmark = pytest.mark.usefixtures("no_child_left")
PARAMS = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=0)
PROMPTS = [[5 + i % 50 for i in range(n)] for n in (3, 40, 90)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(path)
    return path


def open_llm(path: Path, **options: Any) -> LLM:
    given = {"memory_workers": 2, "prefill_chunk": 32, "deterministic": True, "transport": "shm", "block_size": 16}
    return LLM(str(path), **{**given, **options})


def run(llm: LLM, tripwire: Failpoint, victim: str) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities. A block of ``victim`` is damaged in their midst, of a sequence that decodes."""
    outputs, tripped = dict[str, Any](), False
    with llm.stream(PROMPTS, PARAMS) as stream:
        for output in stream:
            outputs[output.request_id] = output
            if victim and not tripped and sum(len(o.outputs[0].token_ids) for o in outputs.values()) > 30:
                tripwire.arm(llm.pools.pids[victim], FLIP_BIT, 1)
                tripped = True
        ids = stream.request_ids
    assert not tripped or tripwire.has_fired
    scores = [[next(iter(x.values())).logprob for x in outputs[i].outputs[0].logprobs] for i in ids]
    return [(outputs[i].outputs[0].token_ids, each) for i, each in zip(ids, scores, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partition": "request", "kv_cache_dtype": "int8"},
        {"partition": "token", "prefill_workers": 1, "transport": "tcp"},
    ],
    ids=["head", "request, 8 bits", "token, prefill"],
)
def test_a_block_that_is_damaged_is_never_attended(
    options: dict[str, Any], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILPOINT, str(tmp_path / "wire"))
    tripwire = Failpoint(tmp_path / "wire")
    with open_llm(checkpoint, kv_checks=1.0, **options) as llm:
        wanted, before = run(llm, tripwire, ""), llm.pools.pids
        told = run(llm, tripwire, "memory-0")
        assert [name for name, pid in llm.pools.pids.items() if pid != before[name]] == ["memory-0"]
        for (tokens, scores), (same, near) in zip(told, wanted, strict=True):
            assert tokens == same
            assert scores == pytest.approx(near, abs=1e-4)
        assert run(llm, tripwire, "") == wanted


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    build_hybrid("bamba").save_pretrained(path)
    return path


@pytest.mark.long
@pytest.mark.parametrize("share", [1.0, 0.01, 0.0])
def test_a_state_that_is_damaged_is_never_continued(
    share: float, hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever share of KV is checked. Without checks the damage is in all later scores."""
    monkeypatch.setenv(FAILPOINT, str(tmp_path / "wire"))
    tripwire = Failpoint(tmp_path / "wire")
    with open_llm(hybrid, kv_checks=share, max_model_len=256) as llm:
        wanted, before = run(llm, tripwire, ""), llm.pools.pids
        told = run(llm, tripwire, "memory-0")
        replaced = [name for name, pid in llm.pools.pids.items() if pid != before[name]]
        assert replaced == (["memory-0"] if share else [])
        near = [(tokens, pytest.approx(scores, abs=1e-4)) for tokens, scores in wanted]
        assert (told == near) == (share > 0)
        assert not share or run(llm, tripwire, "") == wanted


@pytest.mark.long
def test_who_looks_at_a_share_finds_it_some_steps_later(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of 20 steps and more that attend it checks at least once, but for one run in 10^6."""
    monkeypatch.setenv(FAILPOINT, str(tmp_path / "wire"))
    tripwire = Failpoint(tmp_path / "wire")
    with open_llm(checkpoint, kv_checks=0.5) as llm:
        before = llm.pools.pids
        run(llm, tripwire, "memory-1")
        assert [name for name, pid in llm.pools.pids.items() if pid != before[name]] == ["memory-1"]


@pytest.mark.long
def test_who_does_not_look_attends_it(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would show nothing."""
    monkeypatch.setenv(FAILPOINT, str(tmp_path / "wire"))
    tripwire = Failpoint(tmp_path / "wire")
    with open_llm(checkpoint) as llm:
        wanted, before = run(llm, tripwire, ""), llm.pools.pids
        assert run(llm, tripwire, "memory-0") != wanted
        assert llm.pools.pids == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_the_worker_is_a_thread_the_run_ends(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILPOINT, str(tmp_path / "wire"))
    tripwire = Failpoint(tmp_path / "wire")
    with open_llm(checkpoint, kv_checks=1.0, transport="loopback") as llm:
        tripwire.arm(os.getpid(), FLIP_BIT, 1)
        with pytest.raises(WorkerError, match="KV block .* is not what was written there"):
            llm.generate(PROMPTS, PARAMS)


def test_a_share_that_is_none_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="kv_checks"):
        open_llm(checkpoint, kv_checks=1.5)
