"""Prefill workers that compute a prompt together, each with some of the layers: the bits are those of one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("no_child_left")
SCORED = SamplingParams(temperature=0.7, seed=1, max_tokens=12, logprobs=2, prompt_logprobs=0, ignore_eos=True)
PROMPTS = [[3 + (5 * i + j) % 300 for j in range(n)] for i, n in enumerate((60, 9, 1, 130, 33, 130))]
OPTIONS: dict[str, Any] = {"transport": "loopback", "memory_workers": 2, "prefill_chunk": 16, "deterministic": True}


def told(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    outputs = llm.generate(prompts, SCORED)
    return [(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize("model", ["llama_path", "gemma2_path"])
def test_the_bits_are_those_of_one_worker(model: str, request: pytest.FixtureRequest) -> None:
    """A model with windows too; prompts' log-probabilities and sampled tokens."""
    path, answers = str(request.getfixturevalue(model)), list[Any]()
    for workers, stages in ((1, 1), (2, 2)):
        with LLM(path, prefill_workers=workers, prefill_pipeline=stages, **OPTIONS) as llm:
            answers.append(told(llm))
            stats = llm.stats()
            assert len({stats[f"prefill-{i}"]["rows"] for i in range(workers)}) == workers, "the first alone has tokens"
    assert answers[0] == answers[1]


@pytest.mark.long
def test_two_groups_keep_prompts_and_fetch_from_each_other(llama_path: Path) -> None:
    shared = [PROMPTS[3] + [7 + i] * 20 for i in range(4)]
    with LLM(str(llama_path), prefill_workers=4, prefill_pipeline=2, **OPTIONS) as llm:
        first = told(llm, shared)
        assert told(llm, shared) == first
        assert len(llm.engine.worker_info.prefill_stores) == 2, "one of each group"
    with LLM(str(llama_path), **OPTIONS) as llm:
        assert told(llm, shared) == first


@pytest.mark.long(but=["1"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_dies_is_replaced_and_its_prompts_are_computed_anew(stage: int, llama_path: Path) -> None:
    options = {**OPTIONS, "transport": "shm", "prefill_workers": 2, "prefill_pipeline": 2}
    with LLM(str(llama_path), **options) as llm:
        expected, before = told(llm), llm.pools.pids
        ids = [llm.engine.add(prompt, SCORED) for prompt in PROMPTS]
        for _ in range(3):
            llm.engine.step()
        os.kill(before[f"prefill-{stage}"], signal.SIGKILL)
        outputs = dict[str, Any]()
        while llm.engine.has_work:
            outputs |= {o.request_id: o for o in llm.engine.step()}
        again = [(outputs[i].prompt_logprobs, outputs[i].outputs[0].token_ids) for i in ids]
        assert again == [(scores, tokens) for scores, tokens, _ in expected]
        after = llm.pools.pids
        assert {label for label in after if after[label] != before[label]} == {f"prefill-{stage}"}


@pytest.mark.long
def test_what_cannot_be_is_refused_in_a_line_that_names_the_fix(llama_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prefill_pipeline=2 does not divide prefill_workers=3: use 2 or 4"):
        LLM(str(llama_path), prefill_workers=3, prefill_pipeline=2)
    with pytest.raises(ValueError, match="^prefill_pipeline needs prefill_workers"):
        LLM(str(llama_path), prefill_pipeline=2)
    with pytest.raises(ValueError, match=r"prefill_pipeline=4: the model has 3 layers of attention"):
        LLM(str(llama_path), prefill_workers=4, prefill_pipeline=4, transport="loopback")
