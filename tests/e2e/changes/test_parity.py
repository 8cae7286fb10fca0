"""With --kv-parity a lost memory worker's KV comes back from the others: nothing is computed again, no bit moves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_faults import gone

from lamina import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("no_child_left")
PARAMS = SamplingParams(temperature=0.8, max_tokens=24, seed=3, logprobs=1, frequency_penalty=0.4, ignore_eos=True)
PROMPTS = [[7 + i % 200 for i in range(n)] for n in (3, 140, 290, 291)]
TOLD = 30, 60  # tokens in all, at which a worker is killed


def run(
    llm: LLM, kills: Mapping[int, list[str]], prompts: list[list[int]] = PROMPTS, params: SamplingParams = PARAMS
) -> list[Any]:
    """Tokens and their log-probabilities, unrounded.

    ``kills``: the workers that are killed once so many tokens have come.
    """
    left, outputs = dict(sorted(kills.items())), dict[int, Any]()
    with llm.stream(prompts, params) as stream:
        for output in stream:
            outputs[output.request_id] = output
            told = sum(len(one.outputs[0].token_ids) for one in outputs.values())
            while left and told >= next(iter(left)):
                for victim in left.pop(next(iter(left))):
                    os.kill(llm.pools.pids[victim], signal.SIGKILL)
    assert not left, "somebody was not killed"
    each = (outputs[i].outputs[0] for i in sorted(outputs))
    return [(one.token_ids, [(t, p.logprob) for x in one.logprobs for t, p in x.items()]) for one in each]


def count(llm: LLM, name: str) -> float:
    return sum(values.get(name, 0.0) for values in llm.stats().values())


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "victims"),
    [
        ({"spare_memory": 1}, ["memory-1", "memory-2"]),  # the last one keeps the parity
        ({"pipeline": 3, "transport": "tcp", "prefill_workers": 1}, ["memory-2", "memory-0"]),
        pytest.param({"dtype": "bfloat16"}, ["memory-0", "memory-1"], marks=pytest.mark.slow),
    ],
    ids=["spare", "replicas, tcp, prefill workers", "bfloat16"],
)
def test_kv_of_one_that_is_lost_is_back_bit_by_bit(options: dict[str, Any], victims: list[str], tiny_lm: Path) -> None:
    chosen = {"memory_workers": 2, "kv_parity": 1, "deterministic": True, "prefill_chunk": 64, "dtype": "float32"}
    with LLM(str(tiny_lm), **{**chosen, **options}) as llm:
        wanted = run(llm, {})
        rows = count(llm, "rows")
        pids = llm.pools.pids
        assert run(llm, {told: [victim] for told, victim in zip(TOLD, victims, strict=True)}) == wanted
        again = count(llm, "rows") - rows
        assert {w for w, pid in llm.pools.pids.items() if pid != pids[w]} == {*victims}
        assert all(gone(pids[victim]) for victim in victims)
        assert count(llm, "moved_bytes") > 0
        assert again <= sum(map(len, PROMPTS)), "a prompt was computed again"


@pytest.mark.no_retry
def test_of_two_at_once_kv_is_computed_again(tiny_lm: Path) -> None:
    with LLM(str(tiny_lm), memory_workers=2, kv_parity=1, deterministic=True, dtype="float32") as llm:
        wanted = [tokens for tokens, _ in run(llm, {})]
        found = run(llm, {40: ["memory-0", "memory-2"]})
        assert [tokens for tokens, _ in found] == wanted
        assert count(llm, "moved_bytes") == 0


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1, ignore_eos=True)
LATER = 120, 160  # tokens in all, when all prompts are computed


@pytest.mark.no_retry
@pytest.mark.long(but=["two of a rank"])
@pytest.mark.parametrize(
    ("options", "victims", "computes_again"),
    [
        ({"memory_workers": 4}, [["memory-0"], ["memory-3"]], False),
        ({"memory_workers": 4}, [["memory-5"], ["memory-1", "memory-2"]], False),  # 4 and 5 keep the parity
        ({"transport": "tcp"}, [["memory-0"], ["memory-1"]], False),
        ({"transport": "tcp", "pipeline": 3}, [["memory-3"], ["memory-1"]], False),
        ({"transport": "tcp", "prefill_workers": 1, "memory_workers": 4}, [["memory-1"], ["memory-4"]], False),
        ({"memory_workers": 4}, [["memory-1", "memory-5"]], True),
    ],
    ids=["shm", "shm, one of each rank", "tcp, a worker for each rank", "replicas", "prefill workers", "two of a rank"],
)
def test_a_memory_worker_of_any_rank_may_be_lost(
    options: dict[str, Any],
    victims: list[list[str]],
    computes_again: bool,
    llama_path: Path,
    prompts: list[list[int]],
    reference: Callable[[list[int], int], list[int]],
) -> None:
    """The tokens are those of transformers, and compute workers repeat only the rounds that were in flight."""
    chosen = {"kv_parity": 1, "tensor_parallel_size": 2, "dtype": "float32", "enable_prefix_caching": False}
    with LLM(str(llama_path), **{"transport": "shm", "memory_workers": 2, **chosen, **options}) as llm:
        wanted = [reference(prompt, 40) for prompt in prompts]
        assert [tokens for tokens, _ in run(llm, {}, prompts, GREEDY)] == wanted
        rows, pids = llm.stats()["compute-0"]["rows"], llm.pools.pids
        killed = dict(zip(LATER, victims, strict=False))
        assert [tokens for tokens, _ in run(llm, killed, prompts, GREEDY)] == wanted
        more = llm.stats()["compute-0"]["rows"] - 2 * rows
        assert {w for w, pid in llm.pools.pids.items() if pid != pids[w]} == {w for each in victims for w in each}
        in_flight = len(victims) * 3 * len(prompts)  # rows of three rounds, for each loss
        assert (more > in_flight) == computes_again, f"{more} rows were computed again"
        assert (count(llm, "moved_bytes") == 0) == computes_again


LONG = [(7 * i + 3) % 90 + 5 for i in range(300)]
OTHERS = [[(k * 13 + 11 * i) % 90 + 5 for i in range(300)] for k in range(1, 7)]


@pytest.mark.no_retry
@pytest.mark.long(but=["shm, host memory"])
@pytest.mark.parametrize(
    ("options", "victims"),
    [
        ({"kv_offloading_size": "64MiB"}, ["memory-0", "memory-1"]),
        ({"kv_offloading_size": "64MiB", "tensor_parallel_size": 2}, ["memory-1", "memory-0"]),
        ({"kv_store_dir": "DIR", "transport": "tcp"}, ["memory-1", "memory-2"]),  # 2 keeps the parity
        ({"kv_store_dir": "DIR", "kv_offloading_size": "300KB"}, ["memory-2", "memory-0"]),
        ({"kv_store_dir": "DIR", "prefill_workers": 1}, ["memory-2", "memory-1"]),
    ],
    ids=["shm, host memory", "two ranks", "tcp, disk", "disk behind memory", "prefill workers"],
)
def test_kv_that_was_loaded_is_back_too(
    options: dict[str, Any],
    victims: list[str],
    llama_path: Path,
    tmp_path: Path,
    reference: Callable[[list[int], int], list[int]],
) -> None:
    """A prompt is loaded from storage, and memory workers die while its answer decodes."""
    chosen = {"memory_workers": 2, "kv_parity": 1, "dtype": "float32", "prefill_chunk": 64, "transport": "shm"}
    where = {name: str(tmp_path / "kv") if value == "DIR" else value for name, value in options.items()}
    turn = [*LONG[:256], *LONG[:40]]
    with LLM(str(llama_path), **{**chosen, "kv_memory": "260KB", **where}) as llm:
        for prompt in (LONG, *OTHERS):
            llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        llm.engine.finish_in_flight()
        rows, pids = llm.stats()["compute-0"]["rows"], llm.pools.pids
        ((tokens, _),) = run(llm, {5: [victims[0]], 20: [victims[1]]}, [turn], GREEDY)
        assert tokens == reference(turn, 40)
        assert count(llm, "kv_loaded_bytes") > 0
        assert {w for w, pid in llm.pools.pids.items() if pid != pids[w]} == {*victims}
        assert count(llm, "moved_bytes") > 0
        alone = 40 + 40  # rows of the prompt's rest, and of the answer
        assert llm.stats()["compute-0"]["rows"] - rows <= alone + 2 * 3, "tokens were computed again"
