"""Prefill workers compute prompts of hybrid models, and memory workers get the states with K and V.

Covers: lamina/workers/prefill/local_mixers.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models.hybrids import HYBRIDS, build_hybrid, greedy, prompts
from test_hybrid_recovery import TEXTS as RECOVERY_TEXTS
from test_hybrid_recovery import run
from test_hybrid_storage import total

from lamina import LLM, SamplingParams

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
COUNT = 24
TEXTS = prompts(5, 23, 40, 1)
LAYOUTS: list[dict[str, Any]] = [
    {"memory_workers": 1, "transport": "shm"},
    {"memory_workers": 3, "transport": "tcp", "prefill_chunk": 7},
    {"memory_workers": 2, "transport": "shm", "prefill_chunk": 7, "partition": "request", "prefill_workers": 2},
    {"memory_workers": 2, "transport": "tcp", "prefill_chunk": 16, "pipeline": 2, "kv_checks": 1.0},
]


def serve(llm: LLM, texts: list[list[int]], count: int = COUNT, **options: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **options)
    done = llm.generate([{"prompt_token_ids": text} for text in texts], params)
    return [list(each.token_ids) for one in done for each in one.outputs]


def check_layout(model: Any, **options: Any) -> None:
    options = {"prefill_workers": 1, **options}
    with LLM(model, dtype="float32", max_model_len=256, **options) as llm:
        assert serve(llm, TEXTS) == [greedy(model, text, COUNT) for text in TEXTS]
        rows = total(llm, "rows", "prefill")
    assert rows == sum(len(text) for text in TEXTS if len(text) > 1)  # a prompt of one token is a row of decoding


def test_a_prefill_worker_gives_the_tokens_of_transformers() -> None:
    check_layout(build_hybrid("falcon_h1"), memory_workers=2, transport="loopback", prefill_chunk=7)


@pytest.mark.slow
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_tokens_are_those_of_transformers(name: str, options: dict[str, Any]) -> None:
    check_layout(build_hybrid(name), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_requests_go_on_after_the_deaths_of_workers(name: str, transport: str, tmp_path: Path) -> None:
    """The first is a prefill worker's that computes prompts."""
    model = build_hybrid(name)
    model.save_pretrained(tmp_path)
    expected = [greedy(model, text, 40) for text in RECOVERY_TEXTS]
    options = {"transport": transport, "prefill_chunk": 4, "max_model_len": 256, "prefill_workers": 1}
    with LLM(str(tmp_path), dtype="float32", memory_workers=2, **options) as llm:
        kill = {1: "prefill-0", 30: "memory-1", 60: "compute-0", 90: "prefill-0", 130: "memory-0"}
        assert run(llm, kill) == expected
        assert serve(llm, RECOVERY_TEXTS[1:2]) == [expected[1][:COUNT]]
        assert total(llm, "rows", "prefill") > 0


@pytest.mark.long
def test_completions_and_later_prompts_continue_from_states_that_came_with_grants() -> None:
    """Also where the rest is more than a chunk: a prefill worker would compute the beginning again."""
    model, (text, rest) = build_hybrid("bamba"), prompts(41, 30)
    options: dict[str, Any] = {"transport": "loopback", "memory_workers": 2, "prefill_workers": 1, "prefill_chunk": 16}
    with LLM(model, dtype="float32", max_model_len=256, enable_prefix_caching=True, **options) as llm:
        answer = greedy(model, text, COUNT)
        assert serve(llm, [text], n=3) == [answer] * 3
        for more in ([*text[:40], 9, 8, 7], [*text[:40], *rest]):
            (done,) = llm.generate([{"prompt_token_ids": more}], SamplingParams(max_tokens=4, temperature=0.0))
            assert (list(done.outputs[0].token_ids), done.num_cached_tokens) == (greedy(model, more, 4), 40)
        assert total(llm, "rows", "prefill") == len(text)


@pytest.mark.long
def test_preempted_requests_are_computed_again() -> None:
    model, texts = build_hybrid("lfm2"), prompts(5, 23, 40, 1, 60)
    options: dict[str, Any] = {"transport": "loopback", "prefill_workers": 1, "memory_workers": 2, "block_size": 16}
    with LLM(model, dtype="float32", max_model_len=96, kv_memory="64KiB", **options) as llm:
        assert serve(llm, texts) == [greedy(model, text, COUNT) for text in texts]
        assert llm.engine.scheduler.num_preemptions > 0
