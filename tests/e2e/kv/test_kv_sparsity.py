"""Sequences that keep some of their KV alone: what they save, on how many workers, and who is not one.

Covers: lamina/workers/memory/sparse/scoring.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, RequestOutput, SamplingParams
from lamina.protocol.step_plan import BlockScoresReport
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.sessions.session_table import SessionInfo
from lamina.scheduler.sparsity.pruning import BlockPruner

pytestmark = pytest.mark.usefixtures("no_child_left")
SHIPPED = str(Path(__file__).resolve().parents[3] / "examples" / "tiny_lm" / "model")
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
DENSE = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, kv_sparsity="none")
PROMPTS = [[(7 * i + k) % 90 + 5 for i in range(n)] for k, n in ((1, 400), (5, 333), (9, 60))]
LONG = [prompt[:340] for prompt in PROMPTS[:2]]  # with 160 tokens after them
TINY: dict[str, Any] = {"dtype": "float32", "transport": "loopback", "prefill_chunk": 64, "block_size": 16}
EVICT: dict[str, Any] = {**TINY, "kv_sparsity": "evict", "kv_budget": 128, "kv_recent": 32, "kv_full_layers": 1}


SELECT: dict[str, Any] = {**EVICT, "kv_sparsity": "select"}


def told(outputs: list[RequestOutput]) -> Any:
    return [[(one.token_ids, one.logprobs) for one in output.outputs] for output in outputs]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def dropped(llm: LLM) -> int:
    evictions = llm.engine.scheduler.features.get(BlockPruner)
    return 0 if evictions is None else evictions.num_dropped


@pytest.fixture(scope="module")
def dense(llama_path: Path) -> Any:
    with LLM(str(llama_path), **TINY) as llm:
        return told(llm.generate(PROMPTS, PARAMS))


@pytest.fixture(scope="module")
def sparse(llama_path: Path, dense: Any) -> Any:
    """One memory worker serves it; a request that asks for all KV has all, in the same steps as those that do not."""
    with LLM(str(llama_path), **EVICT) as llm:
        answers = told(llm.generate(PROMPTS, PARAMS))
        lost = dropped(llm)
        assert lost == (400 - 128) // 16 + (333 + 15 - 128) // 16
        mixed = told(llm.generate(PROMPTS, [DENSE, DENSE, PARAMS]))
        assert llm.engine.scheduler.features[PrefixCache].num_hit_tokens == 0, (
            "nobody begins with what a sparse sequence has left"
        )
        assert (mixed, dropped(llm)) == (dense, lost), "the last one is below its budget"
    assert answers[2] == dense[2]
    assert [x[0][1] for x in answers[:2]] != [x[0][1] for x in dense[:2]], "it makes a difference, or shows nothing"
    return answers


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    [
        {"memory_workers": 2}, {"memory_workers": 2, "transport": "shm"}, {"memory_workers": 2, "transport": "tcp"},
        {"attention": "reference"}, {"overlap": False, "memory_workers": 2},
    ],
    ids=str,
)  # fmt: skip
def test_the_same_blocks_and_bits_whoever_holds_the_heads(way: dict[str, Any], sparse: Any, llama_path: Path) -> None:
    with LLM(str(llama_path), **{**EVICT, **way}) as llm:
        found = told(llm.generate(PROMPTS, PARAMS))
    if "attention" in way:  # which rounds otherwise
        assert [[one[0] for one in x] for x in found] == [[one[0] for one in x] for x in sparse]
    else:
        assert found == sparse


@pytest.fixture(scope="module")
def selecting(llama_path: Path, dense: Any) -> Any:
    """One memory worker serves it. Who asks for all has all, and nothing that others have approximated."""
    with LLM(str(llama_path), **SELECT) as llm:
        answers = told(llm.generate(PROMPTS, PARAMS))
        hits = llm.engine.scheduler.features[PrefixCache].num_hit_tokens
        assert told(llm.generate(PROMPTS, [DENSE, DENSE, PARAMS]))[:2] == dense[:2]
        assert llm.engine.scheduler.features[PrefixCache].num_hit_tokens - hits < len(PROMPTS[2]), (
            "of the last one alone"
        )
        again = told(llm.generate(PROMPTS, PARAMS))
        assert llm.engine.scheduler.features[PrefixCache].num_hit_tokens - hits > 700, (
            "all KV is there, for those who select too"
        )
        assert [[one[0] for one in x] for x in again] == [[one[0] for one in x] for x in answers]
    assert answers[2] == dense[2], "below its budget"
    assert [x[0][1] for x in answers[:2]] != [x[0][1] for x in dense[:2]], "it makes a difference, or shows nothing"
    return answers


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    [{"memory_workers": 2}, {"memory_workers": 2, "transport": "shm", "overlap": False}, {"attention": "reference"}],
    ids=str,
)
def test_queries_select_the_same_blocks_whoever_holds_the_heads(
    way: dict[str, Any], selecting: Any, llama_path: Path
) -> None:
    with LLM(str(llama_path), **{**SELECT, **way}) as llm:
        answers = told(llm.generate(PROMPTS, PARAMS))
    if "attention" in way:  # which rounds otherwise
        assert [[one[0] for one in x] for x in answers] == [[one[0] for one in x] for x in selecting]
    else:
        assert answers == selecting


def test_a_cached_prompt_gives_the_same_answer_again(llama_path: Path) -> None:
    """The last row of a cached prompt is alone in its step, and attends everything like the rest of the prompt."""
    with LLM(str(llama_path), **SELECT) as llm:
        answers = [llm.generate(prompt, PARAMS)[0] for prompt in LONG * 2]
    assert tokens_of(answers[:2]) == tokens_of(answers[2:])
    firsts = [answer.outputs[0].logprobs[0] for answer in answers]
    assert [{k: v.logprob for k, v in x.items()} for x in firsts[:2]] == [
        {k: pytest.approx(v.logprob, abs=1e-4) for k, v in x.items()} for x in firsts[2:]
    ]


def test_a_budget_for_all_is_no_approximation(llama_path: Path, dense: Any) -> None:
    with LLM(str(llama_path), **{**SELECT, "kv_budget": 512}) as llm:
        assert told(llm.generate(PROMPTS, PARAMS)) == dense


@pytest.mark.long
def test_prompts_are_saved_before_their_blocks_drop_and_later_ones_load_them(llama_path: Path, sparse: Any) -> None:
    with LLM(str(llama_path), **EVICT, kv_offloading_size="64MiB") as llm:
        first, again = (told(llm.generate(PROMPTS, PARAMS)) for _ in range(2))
        loaded = llm.engine.scheduler.features[OffloadIndex].num_hit_tokens
        assert dropped(llm) > 0
    assert [[one[0] for one in x] for x in first] == [[one[0] for one in x] for x in sparse]
    assert [[one[0] for one in x] for x in again] == [[one[0] for one in x] for x in first]
    assert loaded >= 3 * 128 + 2 * 128, "whole pages of the two long prompts"


@pytest.mark.long
@pytest.mark.parametrize("tier", ["host", "file"])
def test_turns_of_a_session_load_their_prompts_though_blocks_drop(tier: str, llama_path: Path, tmp_path: Path) -> None:
    """And after a restart, if they are on disk. The tokens are those of prompts without a name, which load nothing."""
    store = {"kv_store_dir": str(tmp_path)} if tier == "file" else {"kv_offloading_size": "64MiB"}

    def turns(llm: LLM, name: str | None, said: list[int], count: int) -> tuple[list[int], list[int]]:
        cached = list[int]()
        for _ in range(count):
            (output,) = llm.generate([said], PARAMS, session_id=name)
            cached.append(output.num_cached_tokens or 0)
            llm.engine.finish_in_flight()  # pages in flight to storage are there
            said = [*said, *output.outputs[0].token_ids, *PROMPTS[1][len(said) % 100 :][:6]]
        return said, cached

    with LLM(str(llama_path), **EVICT) as llm:
        wanted, _ = turns(llm, None, PROMPTS[0][:300], 4)
        with pytest.raises(ValueError, match="session_id with .* needs .* or .*: add it"):
            turns(llm, "mine", PROMPTS[0][:300], 1)
        llm.generate([PROMPTS[0][:300]], DENSE, session_id="mine")
        assert llm.sessions()[0].tier == "pool", "whoever drops no blocks needs no storage"
    with LLM(str(llama_path), **EVICT, **store) as llm:
        said, cached = turns(llm, "mine", PROMPTS[0][:300], 3)
        assert cached == [0, 256, 256]
        assert dict(llm.engine.sessions.hits) == {tier: 2}
        assert llm.sessions() == [SessionInfo("mine", 3, 256, tier)]
        assert dropped(llm) > 0
        if tier == "host":
            said, _ = turns(llm, "mine", said, 1)
            assert llm.drop_session("mine")
            assert llm.generate([said], PARAMS)[0].num_cached_tokens == 0, "its pages went with it"
    if tier == "file":
        with LLM(str(llama_path), **EVICT, **store) as llm:
            said, cached = turns(llm, "mine", said, 1)
            assert cached == [256]
            assert dropped(llm) > 0
    assert said == wanted


@pytest.mark.long
def test_queries_select_among_loaded_blocks_as_among_computed_ones(llama_path: Path, tmp_path: Path) -> None:
    """Loaded by another engine, from a directory. One that attends everything finds nothing there."""
    found, loaded = list[RequestOutput](), list[int]()
    with LLM(str(llama_path), **SELECT) as llm:
        wanted = llm.generate(LONG, PARAMS)
    for options in (SELECT, SELECT, {**SELECT, "memory_workers": 2, "transport": "shm"}, TINY):
        with LLM(str(llama_path), **options, kv_store_dir=str(tmp_path)) as llm:
            found += llm.generate(LONG, PARAMS)
            loaded.append(llm.engine.scheduler.features[OffloadIndex].num_hit_tokens)
            llm.engine.release_idle_blocks()
            llm.engine.finish_in_flight()
    assert loaded == [0, 2 * 256, 2 * 256, 0]
    for output, want in zip(found, wanted * 3, strict=False):
        each = zip(output.outputs[0].logprobs or (), want.outputs[0].logprobs or (), strict=True)
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        for some, others in each:
            assert {k: v.logprob for k, v in some.items()} == {
                k: pytest.approx(v.logprob, abs=1e-4) for k, v in others.items()
            }


def test_more_sequences_fit() -> None:
    """Masks would free nothing. With one full layer of four and a tenth of the prompt in the others, at least twice as
    many run at once in the same memory. None is preempted, and all memory is free afterwards.
    """
    prompts = [[(7 * i + k) % 1900 + 5 for i in range(960)] for k in range(4)]
    options: dict[str, Any] = {**TINY, "prefill_chunk": 256, "enable_prefix_caching": False, "max_model_len": 1024}
    options |= {"kv_memory": "11MB", "memory_workers": 1, "compute_threads": 1, "memory_threads": 1}  # 2.6 times 1,024
    most = []
    for sparse in ({}, {"kv_sparsity": "evict", "kv_budget": 96, "kv_recent": 16}):
        with LLM(SHIPPED, **{**options, **sparse}) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
            with llm.stream(prompts, params) as stream:
                most.append(max(llm.engine.scheduler.num_running for _ in stream))
            llm.engine.release_idle_blocks()
            preempted = llm.engine.scheduler.num_preemptions
            assert set(llm.engine.free_blocks) == {min(counts) for counts in llm.engine.worker_info.num_blocks}
    assert (most[1] >= 2 * most[0], preempted) == (True, 0), most


@pytest.mark.long
def test_what_is_kept_is_not_frozen_on_the_prompt() -> None:
    """The demo's model goes on to copy: after 500 tokens many of the kept blocks are of its own ones."""
    prompt = [(37 * i * i + 11 * i) % 1900 + 10 for i in range(500)] * 2
    options: dict[str, Any] = {"kv_budget": 256, "kv_recent": 16, "kv_sink": 16, "block_size": 16}
    with LLM(SHIPPED, transport="loopback", kv_sparsity="evict", **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
        kept = list[int]()
        with llm.stream([prompt[:520]], params) as stream:
            for _ in stream:
                for one in llm.engine.scheduler.batches[0].running:
                    blocks = range(1, -(-len(one.tokens) // 16))
                    kept = sorted(set(blocks) - set(one.kept.scores.dropped_blocks)) if one.kept.scores else kept
    assert len(kept) < 30, "it has lost some"
    assert sum(number * 16 >= 520 for number in kept) > 0.3 * len(kept), kept


@pytest.mark.long
@pytest.mark.parametrize("when", ["blocks have gone", "scores are told and nothing is dropped"])
def test_one_that_was_lost_loses_the_same_blocks_again_and_goes_on_with_the_same_tokens(
    when: str, llama_path: Path, dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)  # blocks go twice
    with LLM(str(llama_path), **{**EVICT, "memory_workers": 2, "transport": "shm"}) as llm:
        want, once = tokens_of(llm.generate(LONG, params)), dropped(llm)
        evictions, before = llm.engine.scheduler.features.get(BlockPruner), list[int]()
        assert evictions is not None
        report = evictions.on_report

        def kill() -> None:
            if not before:
                before.append(dropped(llm) - once)
                os.kill(llm.engine.executor.pids["memory-0"], signal.SIGKILL)  # type: ignore[attr-defined]

        def told(said: BlockScoresReport) -> None:
            report(said)
            if evictions.due and when.startswith("scores"):
                kill()

        monkeypatch.setattr(evictions, "on_report", told)
        got = dict[int, list[int]]()
        with llm.stream(LONG, params) as stream:
            for output in stream:
                got[output.request_id] = output.outputs[0].token_ids
                if len(output.outputs[0].token_ids) >= 145:
                    kill()
        assert [got[number] for number in sorted(got)] == want
        assert (before[0] > 0) == (when == "blocks have gone")
        assert dropped(llm) >= 2 * once + before[0], "those of before, and again"
        (short,) = llm.generate([PROMPTS[2]], PARAMS)
    assert short.outputs[0].token_ids == dense[2][0][0]


@pytest.mark.long
def test_one_that_was_preempted_loses_the_same_blocks_again_and_goes_on_with_the_same_tokens(llama_path: Path) -> None:
    params, answers = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True), []
    for room in ("auto", "300KB"):
        with LLM(str(llama_path), **{**EVICT, "kv_memory": room, "max_model_len": 512}) as llm:
            answers.append(tokens_of(llm.generate([*LONG, LONG[0][::-1]], params)))
            assert (llm.engine.scheduler.num_preemptions > 0) == (room != "auto")
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_sparsity": "select", "kv_full_layers": 99}, "kv_full_layers=99 leaves none of"),
        ({"kv_full_layers": 99}, "kv_full_layers=99 leaves none of"),
        ({"kv_budget": 32}, "kv_budget=32 has no room"),
    ],
    ids=str,
)
def test_a_budget_that_cannot_be_is_refused_in_one_line(options: dict[str, Any], words: str, llama_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        LLM(str(llama_path), **{**EVICT, **options})
    assert "\n" not in str(caught.value)


def test_a_request_asks_for_what_the_engine_has(llama_path: Path) -> None:
    with LLM(str(llama_path), **TINY) as llm, pytest.raises(ValueError, match="start it with --kv-sparsity evict"):
        llm.generate([PROMPTS[2]], SamplingParams(kv_sparsity="evict"))
