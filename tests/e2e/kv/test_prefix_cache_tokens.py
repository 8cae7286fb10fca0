"""Prompts that begin like earlier ones: the same tokens, with --deterministic the same bits, nothing computed twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lamina import LLM, RequestOutput, SamplingParams
from lamina.config.flat_options import make_config

pytestmark = pytest.mark.usefixtures("no_child_left")
Reference = Callable[[list[int], int], list[int]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
BEGINNING = [(7 * i + 3) % 90 + 5 for i in range(150)]


def asked(number: int, length: int = 150) -> list[int]:
    return BEGINNING[:length] + [(number * 31 + i) % 90 + 5 for i in range(20)]


def rows(llm: LLM) -> float:
    """Tokens of all steps until now."""
    return llm.stats()["memory-0"]["rows"]


OPTIONS: list[dict[str, Any]] = [
    {"transport": "shm", "memory_workers": 2},
    {"transport": "loopback", "memory_workers": 3, "partition": "token"},
    {"transport": "loopback", "memory_workers": 2, "partition": "request", "pipeline": 3},
]


@pytest.fixture(scope="module", params=OPTIONS, ids=str)
def llm(request: pytest.FixtureRequest, llama_path: Path) -> Iterator[LLM]:
    """The defaults: no option says that prefixes are kept."""
    with LLM(str(llama_path), dtype="float32", prefill_chunk=64, **request.param) as llm:
        yield llm


@pytest.mark.long(but=["{'transport': 'shm', 'memory_workers': 2}"])
def test_what_is_known_is_not_computed_again(llm: LLM, reference: Reference) -> None:
    llm.reset_prefix_cache()
    counts, outputs = [rows(llm)], list[RequestOutput]()
    for number in range(3):
        outputs += llm.generate([asked(number)], PARAMS)
        counts.append(rows(llm))
    assert [o.num_cached_tokens for o in outputs] == [0, 150, 150], "four whole blocks of 32, and 22 tokens"
    first, *others = (b - a for a, b in pairwise(counts))
    assert all(n <= first - 150 + 2 for n in others), "a row more or less behind the end"
    for number, output in enumerate(outputs):
        assert output.outputs[0].token_ids == reference(asked(number), 12)


def test_a_conversation_goes_on_behind_its_answer(llm: LLM, reference: Reference) -> None:
    llm.reset_prefix_cache()
    turn = asked(5)
    for cached in (0, 181, 213):  # 170, 202 and 234 tokens, and 11 whose KV the answer has left
        (output,) = llm.generate([turn], PARAMS)
        assert output.num_cached_tokens == cached
        assert output.outputs[0].token_ids == reference(turn, 12)
        turn = [*turn, *output.outputs[0].token_ids, *range(20, 40)]


@pytest.mark.long(but=["{'transport': 'shm', 'memory_workers': 2}"])
def test_requests_that_begin_alike_at_once(llm: LLM, reference: Reference) -> None:
    llm.reset_prefix_cache()
    llm.generate([asked(0)], PARAMS)
    prompts = [asked(n, length) for n, length in enumerate((150, 100, 64, 33, 32, 5))]
    outputs = llm.generate(prompts, PARAMS)
    assert [o.num_cached_tokens for o in outputs] == [169, 100, 64, 33, 32, 0]
    assert [o.outputs[0].token_ids for o in outputs] == [reference(p, 12) for p in prompts]


def test_completions_of_one_prompt_compute_it_once(llm: LLM, reference: Reference) -> None:
    llm.reset_prefix_cache()
    before = rows(llm)
    (output,) = llm.generate([asked(3)], replace(PARAMS, n=4))
    assert [o.token_ids for o in output.outputs] == [reference(asked(3), 12)] * 4
    assert rows(llm) - before <= 170 + 3 * 1 + 4 * (12 + 1)


def test_prompts_that_begin_alike_wait_for_the_first_of_them(llm: LLM, reference: Reference) -> None:
    llm.reset_prefix_cache()
    before, prompts = rows(llm), [asked(n) for n in range(40, 46)]
    outputs = llm.generate(prompts, PARAMS)
    assert [o.outputs[0].token_ids for o in outputs] == [reference(p, 12) for p in prompts]
    first, *others = sorted(o.num_cached_tokens or 0 for o in outputs)
    assert first == 0
    assert {128, 150} >= {*others}, "nobody waits longer for less than a block"
    assert rows(llm) - before <= 170 + 5 * (170 - 128) + 6 * (12 + 1)


def test_nothing_is_found_behind_a_reset(llm: LLM) -> None:
    llm.generate([asked(0)], PARAMS)
    llm.reset_prefix_cache()
    (output,) = llm.generate([asked(0)], PARAMS)
    assert output.num_cached_tokens == 0


def test_scores_of_a_prompt_are_all_computed(llm: LLM) -> None:
    first, second = (llm.generate([asked(9)], SamplingParams(max_tokens=1, prompt_logprobs=1))[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    assert second.prompt_logprobs is not None
    assert len(second.prompt_logprobs) == 170
    assert first.prompt_logprobs is not None


@pytest.mark.long
def test_bits_are_those_of_a_fresh_prompt(llama_path: Path) -> None:
    """Under --deterministic, where reuse ends at a multiple of the prefill chunk, and takes no completions."""
    found = []
    options = {"transport": "loopback", "dtype": "bfloat16", "prefill_chunk": 48, "deterministic": True}
    for caches in (False, True):
        with LLM(str(llama_path), enable_prefix_caching=caches, **options) as llm:
            outputs = [llm.generate([asked(n)], PARAMS)[0] for n in range(3)]
        found.append([o.outputs[0].logprobs for o in outputs])
        assert [o.num_cached_tokens for o in outputs] == ([0, 96, 96] if caches else [0, 0, 0])
    assert found[0] == found[1]


@pytest.mark.long
def test_the_weights_of_a_module_may_change(llama_path: Path) -> None:
    """So no KV is kept for the next prompt."""
    model = AutoModelForCausalLM.from_pretrained(llama_path, dtype=torch.float32)
    with LLM(model, transport="loopback") as llm:
        first = llm.generate([asked(1)], PARAMS)[0]
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(-0.5)
        second = llm.generate([asked(1)], PARAMS)[0]
    assert second.num_cached_tokens == 0
    assert second.outputs[0].token_ids != first.outputs[0].token_ids
    ids = torch.tensor([asked(1)])
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert second.outputs[0].token_ids == wanted[0, 170:].tolist()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, True),
        ({"prefill_workers": 1}, True),
        ({"prefill_workers": 1, "enable_prefix_caching": False}, False),
        ({"enable_prefix_caching": False}, False),
        ({"enable_prefix_caching": True}, True),
    ],
)
def test_prefixes_are_kept_unless_somebody_says_no(options: dict[str, Any], kept: bool) -> None:
    assert make_config(options).caches_prefixes == kept


def test_beside_prefill_workers_a_short_rest_is_computed_where_its_beginning_lies(llama_path: Path) -> None:
    """A turn follows another: the conversation is not computed again. A long rest goes to a prefill worker, which has
    the beginning as well, as it has computed that.
    """
    first = [3 + (7 * i) % 300 for i in range(96)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    told = []
    for workers in (0, 1):
        with LLM(
            str(llama_path), transport="loopback", prefill_workers=workers, prefill_chunk=32, deterministic=True,
            memory_workers=1, enable_prefix_caching=True,
        ) as llm:  # fmt: skip
            rows, outputs = [], list[tuple[list[int], int | None]]()
            for prompt in (first, [*first, 5, 6, 7], [*first, *range(40, 100)]):
                (output,) = llm.generate([prompt], params)
                outputs.append((output.outputs[0].token_ids, output.num_cached_tokens))
                rows.append(llm.stats().get("prefill-0", {}).get("rows", 0.0))
            told.append(outputs)
    assert rows == [96, 96, 96 + 60]
    assert [tokens for tokens, _ in told[0]] == [tokens for tokens, _ in told[1]]
    assert [cached for _, cached in told[1]] == [0, 96, 96]
