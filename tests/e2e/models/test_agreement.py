"""The rule by which tokens are compared can say no; and what half precision may cost is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import llama

from lamina import LLM, SamplingParams
from lamina.request import CompletionOutput, Logprob, RequestOutput, RequestTimes
from lamina.tools.check.agreement import compare

COUNT = 20


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def completion(model: Any, prompt: list[int], noise: float = 0.0, swap_at: int | None = None) -> RequestOutput:
    """Returns the output of a perfect engine, but for a token at ``swap_at``, and log-probabilities off by
    ``noise``.
    """
    ids = torch.tensor([prompt])
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, eos_token_id=None
    )[0, len(prompt) :].tolist()
    if swap_at is not None:
        tokens[swap_at] = (tokens[swap_at] + 1) % 320
    with torch.no_grad():
        values = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0], -1)
    logprobs = [{t: Logprob(float(values[len(prompt) - 1 + i, t]) + noise, 1)} for i, t in enumerate(tokens)]
    return RequestOutput(
        0, None, prompt, [CompletionOutput(0, "", tokens, "length", None, logprobs)], RequestTimes(0.0)
    )


def test_equal_tokens_are_identical(model: Any) -> None:
    found = compare(model, [completion(model, [5, 6, 7]), completion(model, [9])])
    assert found.identical
    assert (found.num_tokens, found.num_same_as_generate) == (2 * COUNT, 2)
    assert found.logit_error < 1e-4


def test_a_wrong_token_is_found(model: Any) -> None:
    found = compare(model, [completion(model, [5, 6, 7], swap_at=11)])
    assert not found.identical
    assert found.num_wrong >= 1
    assert found.num_same_as_generate == 0


def test_a_large_logit_error_does_not_excuse_ties(model: Any) -> None:
    found = compare(model, [completion(model, [5, 6, 7], noise=100.0, swap_at=11)])
    assert found.num_wrong == 0, "within ten times this error everything is a tie"
    assert not found.identical
    assert not compare(model, [completion(model, [5, 6, 7], noise=100.0)]).identical


def test_what_is_not_a_number_is_not_identical(model: Any) -> None:
    assert not compare(model, [completion(model, [5, 6, 7], noise=float("nan"))]).identical
    broken = llama()
    output = completion(broken, [5, 6, 7])
    broken.lm_head.weight.data.fill_(float("nan"))
    assert not compare(broken, [output]).identical


def test_no_tokens_are_not_identical(model: Any) -> None:
    assert not compare(model, []).identical


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float16", 0.05), ("bfloat16", 0.4)])
def test_error_of_each_dtype_is_bounded(
    dtype: str, bound: float, llama_path: Path, model: Any, prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True)
    with LLM(str(llama_path), transport="loopback", memory_workers=2, dtype=dtype) as llm:
        assert llm.engine.worker_info.dtype == dtype
        outputs = llm.generate(prompts, params)
    rounded = llama().to(getattr(torch, dtype)).double()  # the same weights, everything else in fp64
    error = 0.0
    with torch.no_grad():
        for output in outputs:
            tokens = output.outputs[0].token_ids
            logits = rounded(torch.tensor([output.prompt_token_ids + tokens])).logits[0]
            values = torch.log_softmax(logits, -1)[len(output.prompt_token_ids) - 1 :]
            for row, entry in zip(values, output.outputs[0].logprobs or [], strict=False):
                token, first = next(iter(entry.items()))
                error = max(error, abs(float(row[token]) - first.logprob))
    assert error < bound
    assert error > 0.0
