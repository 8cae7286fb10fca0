"""Models with recurrent layers give the tokens of transformers' cached generate, however their states are divided.

Covers: lamina/engine/hybrid_model.py, lamina/workers/compute/mixer_client.py, lamina/workers/memory/state_store.py,
lamina/workers/memory/layer_loop/hybrid_loop.py, lamina/models/recurrent/mixer_routing.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.models.hybrids import HYBRIDS, build_hybrid, greedy, greedy_without_states, prompts

from lamina import LLM, SamplingParams

COUNT = 24
TEXTS = prompts(5, 23, 40, 1)
LAYOUTS: list[dict[str, Any]] = [
    {"memory_workers": 1, "transport": "shm"},
    {"memory_workers": 2, "transport": "tcp", "prefill_chunk": 7},
    {"memory_workers": 3, "transport": "shm", "prefill_chunk": 16},
    {"memory_workers": 2, "transport": "tcp", "partition": "request", "prefill_chunk": 7},
    {"memory_workers": 3, "transport": "shm", "partition": "request", "pipeline": 2},
]


def tokens_of(model: Any, **options: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    with LLM(model, dtype="float32", max_model_len=256, **options) as llm:
        done = llm.generate([{"prompt_token_ids": text} for text in TEXTS], params)
        return [list(each.outputs[0].token_ids) for each in done]


def test_an_exchange_of_attention_and_a_recurrent_layer_gives_the_tokens_of_transformers() -> None:
    model = build_hybrid("falcon_h1")
    expected = [greedy(model, text, COUNT) for text in TEXTS]
    assert tokens_of(model, memory_workers=2, transport="loopback", prefill_chunk=7) == expected
    assert [greedy_without_states(model, text, COUNT) for text in TEXTS] != expected


@pytest.mark.slow
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_tokens_are_those_of_transformers(name: str, options: dict[str, Any]) -> None:
    model = build_hybrid(name)
    assert tokens_of(model, **options) == [greedy(model, text, COUNT) for text in TEXTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_states_matter_to_the_tokens(name: str) -> None:
    model, text = build_hybrid(name), TEXTS[2]
    assert greedy_without_states(model, text, COUNT) != greedy(model, text, COUNT)
