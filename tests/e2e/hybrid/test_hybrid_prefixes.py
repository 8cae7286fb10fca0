"""Prompts of hybrid models begin with pages and a snapshot of states that earlier prompts left, and tokens are those of
transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.models.hybrids import HYBRIDS, build_hybrid, greedy, prompts, reused

from lamina import LLM, SamplingParams

COUNT = 12
SYSTEM, *QUESTIONS = prompts(37, 9, 6, 11, 20)
TEXTS = [[*SYSTEM, *question] for question in QUESTIONS]
LAYOUTS: list[dict[str, Any]] = [
    {"memory_workers": 1, "transport": "shm"},
    {"memory_workers": 2, "transport": "tcp", "prefill_chunk": 16},
    {"memory_workers": 3, "transport": "shm", "partition": "request"},
    {"memory_workers": 2, "transport": "tcp", "partition": "request", "pipeline": 2},
]


def serve(
    llm: LLM, *texts: list[int], n: int = 1, session_id: str | None = None
) -> tuple[list[list[int]], list[int | None]]:
    """Return the tokens of all completions, and the cached tokens of each prompt."""
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, n=n)
    done = llm.generate([{"prompt_token_ids": text} for text in texts], params, session_id=session_id)
    return [list(x.token_ids) for each in done for x in each.outputs], [each.num_cached_tokens for each in done]


def num_hit_tokens(llm: LLM) -> float:
    return next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")


def check_reuse(name: str, **options: Any) -> None:
    """Serve prompts one after another, together, again, as turns, and n times."""
    model = build_hybrid(name)
    expected = [greedy(model, text, COUNT) for text in TEXTS]
    with LLM(model, dtype="float32", max_model_len=256, max_num_seqs=8, enable_prefix_caching=True, **options) as llm:
        one_by_one = [serve(llm, text) for text in TEXTS]
        assert [tokens for (tokens,), _ in one_by_one] == expected
        assert [cached for _, (cached,) in one_by_one] == [0, 0, 37, 37], "the second prompt left the first at 37"
        assert serve(llm, *TEXTS)[0] == expected
        assert serve(llm, TEXTS[0], session_id="one")[0] == [expected[0]]
        turn = [*TEXTS[0], *expected[0], *QUESTIONS[1]]
        (answer,), (cached,) = serve(llm, turn, session_id="one")
        assert answer == greedy(model, turn, COUNT)
        assert [(each.turns, each.tier) for each in llm.sessions()] == [(2, "pool")]
        assert cached == reused(name, len(TEXTS[0]), COUNT), "a turn continues after the last one"
        llm.reset_prefix_cache()
        tokens, cached_together = serve(llm, *TEXTS)
        assert tokens == expected
        assert cached_together == [0, 37, 37, 37], "prompts that come together wait for the first one's snapshot"
        llm.reset_prefix_cache()
        before = num_hit_tokens(llm)
        assert serve(llm, TEXTS[2], n=3)[0] == [expected[2]] * 3
        assert num_hit_tokens(llm) - before == 2 * (len(TEXTS[2]) - 1), "two of three are forks"


def test_prompts_with_one_system_prompt_share_its_states() -> None:
    check_reuse("bamba", memory_workers=2, transport="loopback")


def test_without_prefix_caching_nothing_is_shared_and_tokens_are_the_same() -> None:
    model = build_hybrid("lfm2")
    options = {"dtype": "float32", "max_model_len": 256, "transport": "loopback", "memory_workers": 1}
    with LLM(model, enable_prefix_caching=False, **options) as llm:
        outputs = [serve(llm, text) for text in TEXTS]
    assert [cached for _, (cached,) in outputs] == [0] * len(TEXTS)
    assert [tokens for (tokens,), _ in outputs] == [greedy(model, text, COUNT) for text in TEXTS]


@pytest.mark.slow
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_states_are_shared_in_all_layouts(name: str, options: dict[str, Any]) -> None:
    check_reuse(name, **options)
