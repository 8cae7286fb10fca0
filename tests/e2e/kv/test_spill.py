"""One sequence over the memory of several memory workers: the bits of a large one, and no K or V comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny import llama

from lamina import LLM, SamplingParams
from lamina.scheduler.kv_manager.migration import KvMigration

pytestmark = pytest.mark.usefixtures("no_child_left")
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)
LONG = [(7 * i + 3) % 300 + 5 for i in range(1030)]
PROMPTS = [LONG, [(11 * i + 3) % 300 + 5 for i in range(100)], [(5 * i + 3) % 300 + 5 for i in range(200)]]
TINY = {"dtype": "float32", "prefill_chunk": 128, "max_model_len": 1152, "deterministic": True}
SPILL = {"partition": "spill", "kv_memory": "420KB", "memory_workers": 3}  # four stripes of 128 tokens on each
Told = list[tuple[list[int], Any]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Makes a model of more tokens than one memory worker holds."""
    found: Path = tmp_path_factory.mktemp("longer")
    llama(max_position_embeddings=2048).save_pretrained(found)
    return str(found)


def told(llm: LLM, prompts: list[list[int]] = PROMPTS) -> Told:
    return [(o.token_ids, o.logprobs) for r in llm.generate(prompts, PARAMS) for o in r.outputs]


@pytest.fixture(scope="module")
def large(path: str) -> Told:
    """Returns the tokens of one memory worker that holds all."""
    with LLM(path, transport="loopback", memory_workers=1, kv_memory="8MB", **TINY) as llm:
        return told(llm)


@pytest.mark.long
def test_a_prompt_of_three_workers_memory_has_a_large_workers_bits(path: str, large: Told) -> None:
    with LLM(path, transport="shm", **SPILL, **TINY) as llm:
        assert told(llm, [LONG]) == large[:1]
        workers = [w for name, w in llm.stats().items() if name.startswith("memory")]
    assert len(workers) == 3
    for each in workers:
        assert each["stored_bytes"] > 0, "a creditor attends what it holds"
        assert each["bytes_sent"] < each["stored_bytes"] / 4, "and returns results, not K and V"


@pytest.mark.long(but=["{'memory_workers': 3, 'kv_memory': '2MB', 'memory_weights': '3,2,1'}"])
@pytest.mark.parametrize(
    "way",
    [
        {"pipeline": 2, "enable_prefix_caching": True},
        {"memory_workers": 2, "kv_memory": "620KB", "prefill_workers": 1},
        {"memory_workers": 3, "kv_memory": "2MB", "memory_weights": "3,2,1"},
    ],
    ids=str,
)
def test_whatever_goes_with_it(way: dict[str, Any], path: str, large: Told) -> None:
    with LLM(path, transport="loopback", **{**SPILL, **way}, **TINY) as llm:
        assert told(llm) == large
        if "enable_prefix_caching" in way:
            assert told(llm) == large


@pytest.mark.slow
def test_ranks_lend_the_same_stripes(path: str) -> None:
    ranks = {**TINY, "tensor_parallel_size": 2, "transport": "shm"}
    with LLM(path, memory_workers=2, kv_memory="8MB", **ranks) as llm:
        wanted = told(llm)
    with LLM(path, **{**SPILL, "memory_workers": 4, "kv_memory": "330KB"}, **ranks) as llm:
        assert told(llm) == wanted
        read = [w["stored_bytes"] for name, w in sorted(llm.stats().items()) if name.startswith("memory")]
    assert read[0] == read[1]
    assert read[2] == read[3] > 0


@pytest.mark.long
def test_a_creditor_that_dies_is_made_good(path: str, large: Told) -> None:
    tokens, seen = dict[int, list[int]](), 0
    with LLM(path, transport="shm", **SPILL, **TINY) as llm:
        for output in llm.stream(PROMPTS, PARAMS):
            tokens[output.request_id], seen = output.outputs[0].token_ids, seen + 1
            if seen == 8:
                os.kill(llm.pools.pids["memory-1"], signal.SIGKILL)
    assert [tokens[number] for number in sorted(tokens)] == [ids for ids, _ in large]


def test_a_pool_that_cannot_hold_one_sequence_is_refused(path: str) -> None:
    with pytest.raises(
        ValueError, match="hold one sequence of 384 tokens together, not of 1152: raise kv_cache_memory_bytes"
    ):
        LLM(path, transport="loopback", **{**SPILL, "kv_memory": "200KB"}, **TINY)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "loopback"])
def test_a_loan_goes_home_while_its_sequence_decodes(transport: str, path: str) -> None:
    """It goes as soon as short sequences have made room there: the source goes on serving, and the bits are those of
    one worker.
    """
    short = [[(11 * i + 3 + n) % 300 + 5 for i in range(130)] for n in range(3)]
    prompts = [*short, LONG[:450]]
    params = [*(SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True) for _ in short)]
    params.append(SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=3))

    def said(llm: LLM) -> Told:
        return [(o.token_ids, o.logprobs) for r in llm.generate(prompts, params) for o in r.outputs]

    with LLM(path, transport="loopback", memory_workers=1, kv_memory="8MB", **TINY) as llm:
        wanted = said(llm)
    with LLM(path, transport=transport, **SPILL, **TINY) as llm:
        assert said(llm) == wanted
        assert llm.engine.scheduler.features[KvMigration].num_moved_blocks > 0
        assert sum(w["moved_bytes"] for name, w in llm.stats().items() if name.startswith("memory")) > 0
