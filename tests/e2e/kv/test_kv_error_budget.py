"""Shadows of completions that keep or attend some of their KV: what they show, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, RequestOutput, SamplingParams
from lamina.scheduler.sparsity.reference_decode import ReferenceDecoder

pytestmark = pytest.mark.usefixtures("no_child_left")


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


PARAMS = greedy(40)
PROMPTS = [[(7 * i + k) % 90 + 5 for i in range(n)] for k, n in ((1, 400), (5, 333), (9, 350))]
TINY: dict[str, Any] = {"dtype": "float32", "transport": "loopback", "prefill_chunk": 64, "block_size": 16}
SPARSE: dict[str, Any] = {**TINY, "kv_budget": 64, "kv_recent": 16, "kv_sink": 16, "kv_full_layers": 0}
LAX, TIGHT = "top1=1,kl=1,shadow=1", "top1=0.0001,kl=1,shadow=1"


def told(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.long
def test_nothing_is_left_out_and_nothing_is_apart(llama_path: Path) -> None:
    """It also holds where completions come and go, so that a reference decode begins after the one that it follows."""
    with LLM(str(llama_path), **{**SPARSE, "kv_sparsity": "select", "kv_budget": 512, "kv_error_budget": LAX}) as llm:
        answers = told(llm.generate(PROMPTS, PARAMS))
        watch = llm.engine.scheduler.features.get(ReferenceDecoder).monitor  # type: ignore[union-attr]
        assert watch.tokens > 90, "all but those until it has come as far"
        assert (watch.top1, watch.kl < 1e-6) == (0.0, True)
        assert len(llm.engine.scheduler.batches[0].running) == 0
    with LLM(str(llama_path), **TINY) as llm:
        assert told(llm.generate(PROMPTS, PARAMS)) == answers


@pytest.mark.long(but=["{'kv_sparsity': 'evict', 'memory_workers': 2}"])
@pytest.mark.parametrize(
    "way",
    [
        {"kv_sparsity": "select"}, {"kv_sparsity": "evict", "memory_workers": 2},
        {"kv_sparsity": "select", "pipeline": 2, "transport": "shm"},
        {"kv_sparsity": "evict", "tensor_parallel_size": 2, "memory_workers": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_left_out_is_seen(way: dict[str, Any], llama_path: Path) -> None:
    """And nothing else follows from it: tokens are those of requests without shadows."""
    with LLM(str(llama_path), **{**SPARSE, **way, "kv_error_budget": LAX}) as llm:
        answers = told(llm.generate(PROMPTS, PARAMS))
        shadows = llm.engine.scheduler.features.get(ReferenceDecoder)
        assert shadows is not None
        assert shadows.monitor.tokens > 90
        assert shadows.monitor.kl > 1e-4
        assert shadows.budget_tokens == 64
    with LLM(str(llama_path), **{**SPARSE, **way}) as llm:
        assert llm.engine.scheduler.features.get(ReferenceDecoder) is None
        assert told(llm.generate(PROMPTS, PARAMS)) == answers


@pytest.mark.long
@pytest.mark.parametrize("form", ["select", "evict"])
def test_over_budget_answers_go_on_with_all_kv(form: str, llama_path: Path) -> None:
    """Running answers go on with all KV after the tokens that they have; new ones get more of it, in the end all."""
    options, long = {**SPARSE, "kv_sparsity": form, "kv_error_budget": TIGHT}, greedy(80)
    with LLM(str(llama_path), **options) as llm:
        shadows = llm.engine.scheduler.features.get(ReferenceDecoder)
        assert shadows is not None
        rounds = list[list[RequestOutput]]()
        while shadows.budget_tokens and len(rounds) < 4:
            rounds.append(llm.generate(PROMPTS, long))
        last = told(llm.generate(PROMPTS, PARAMS))
    first, rebuilt = rounds[0], [[o.outputs[0].kv_rebuilt for o in outputs] for outputs in rounds]
    assert rebuilt[0] == [True] * 3
    assert shadows.budget_tokens == 0, "the last rung"
    assert shadows.num_rebuilt == sum(map(sum, rebuilt))
    with LLM(str(llama_path), **TINY) as llm:
        assert last == told(llm.generate(PROMPTS, PARAMS)), "with all from the beginning"
        begun = [[*prompt, *tokens[:60]] for prompt, tokens in zip(PROMPTS, told(first), strict=True)]
        assert told(llm.generate(begun, greedy(20))) == [tokens[60:] for tokens in told(first)]
        assert last != [tokens[:40] for tokens in told(first)], "it makes a difference, or shows nothing"
