"""Two ranks divide the heads of recurrent layers, and serve the tokens of transformers' cached generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models.hybrids import HYBRIDS, build_hybrid, greedy, prompts
from test_hybrid_recovery import run
from test_hybrid_storage import FIRST, OPTIONS, forget_pool, serve, total

from lamina import LLM, SamplingParams

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
COUNT = 24
TEXTS = prompts(5, 23, 40, 1)
LAYOUTS: list[dict[str, Any]] = [
    {"memory_workers": 2, "transport": "shm", "prefill_chunk": 7},
    {"memory_workers": 4, "transport": "tcp", "prefill_chunk": 16},
    {"memory_workers": 4, "transport": "shm", "partition": "request", "pipeline": 2},
]


def tokens_of(path: Path, **options: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    with LLM(str(path), dtype="float32", max_model_len=256, tensor_parallel_size=2, **options) as llm:
        done = llm.generate([{"prompt_token_ids": text} for text in TEXTS], params)
        return [list(each.outputs[0].token_ids) for each in done]


@pytest.mark.long
def test_two_ranks_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    """A group whose B and C go to both ranks, and a mean over all heads of both."""
    model = build_hybrid("bamba")
    model.save_pretrained(tmp_path)
    expected = [greedy(model, text, COUNT) for text in TEXTS]
    assert tokens_of(tmp_path, memory_workers=4, transport="loopback", prefill_chunk=7) == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_tokens_are_those_of_transformers(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = build_hybrid(name)
    model.save_pretrained(tmp_path)
    assert tokens_of(tmp_path, **options) == [greedy(model, text, COUNT) for text in TEXTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HYBRIDS))
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_requests_go_on_after_the_deaths_of_a_rank_and_of_memory_workers(
    name: str, transport: str, tmp_path: Path
) -> None:
    model, texts = build_hybrid(name), prompts(5, 60, 33, 1, 90)
    expected = [greedy(model, text, 40) for text in texts]
    model.save_pretrained(tmp_path)
    options = {"transport": transport, "prefill_chunk": 16, "max_model_len": 256}
    with LLM(str(tmp_path), dtype="float32", tensor_parallel_size=2, memory_workers=4, **options) as llm:
        assert run(llm, {1: "memory-1", 60: "compute-1", 90: "memory-2", 130: "compute-0"}) == expected


@pytest.mark.long
def test_ranks_store_and_load_the_states_of_their_own_heads(tmp_path: Path) -> None:
    model = build_hybrid("bamba")
    model.save_pretrained(tmp_path / "model")
    options = {
        "tensor_parallel_size": 2,
        "memory_workers": 2,
        "transport": "loopback",
        "kv_store_dir": str(tmp_path / "kv"),
    }
    with LLM(str(tmp_path / "model"), **OPTIONS, **options) as llm:
        answer, cached = serve(llm, FIRST)
        assert (answer, cached) == (greedy(model, FIRST, len(answer)), 0)
        forget_pool(llm)
        other = [*FIRST, 9, 8, 7]
        assert serve(llm, other) == (greedy(model, other, len(answer)), len(FIRST))
        assert total(llm, "state_loaded_bytes") > 0
