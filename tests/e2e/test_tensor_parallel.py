"""Engines whose weights are on several compute workers: tokens of transformers, one order, and deaths that are
reported.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES

from lamina import LLM, SamplingParams
from lamina.cli.launch import main

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2, ignore_eos=True)
Reference = Callable[[list[int], int], list[int]]
Found = list[Any]


def outputs(path: Path, prompts: list[list[int]], params: Any = GREEDY, **options: Any) -> tuple[Found, Found]:
    """Tokens, and log-probabilities, of every prompt."""
    with LLM(str(path), **{"prefill_chunk": 32, "max_num_seqs": 4, **options}) as llm:
        found = [o.outputs[0] for o in llm.generate(prompts, params)]
    return [o.token_ids for o in found], [o.logprobs for o in found]


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_tokens_are_those_of_transformers(
    size: int, llama_path: Path, prompts: list[list[int]], reference: Reference
) -> None:
    tokens, _ = outputs(llama_path, prompts, transport="loopback", tensor_parallel_size=size, memory_workers=4)
    assert tokens == [reference(p, 16) for p in prompts]


RANKS = {"tensor_parallel_size": 2, "memory_workers": 2, "deterministic": True, "transport": "loopback"}


@pytest.fixture(scope="module")
def two_ranks(llama_path: Path) -> Callable[[list[list[int]]], tuple[Found, Found]]:
    """Returns the tokens of two ranks, run once."""
    known: list[tuple[Found, Found]] = []

    def give(prompts: list[list[int]]) -> tuple[Found, Found]:
        if not known:
            known.append(outputs(llama_path, prompts, **RANKS))
        return known[0]

    return give


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"memory_workers": 4, "overlap": False},
        {"transport": "shm"},
        {"pipeline": 2},
        {"pipeline": 3},
        {"transport": "shm", "pipeline": 3},
    ],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()),
)
def test_ranks_give_the_same_bits_whatever_is_around_them(
    options: dict[str, Any], llama_path: Path, prompts: list[list[int]], two_ranks: Any
) -> None:
    """Memory workers, own processes, batches that take turns, replicas."""
    assert outputs(llama_path, prompts, **{**RANKS, **options}) == two_ranks(prompts)


@pytest.mark.long
def test_the_log_says_what_each_rank_has(llama_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lamina"):
        outputs(llama_path, [[3]], **{**RANKS, "memory_workers": 4})
    assert "--collective auto: mesh: not every rank computes on a GPU" in caplog.text
    assert "rank 1: query heads 4..7, KV heads 2..3 of layer 0 on memory worker 1, 3, 0.3 MB of weights" in caplog.text


@pytest.mark.no_retry
@pytest.mark.long
def test_sampling_with_penalties_draws_what_one_rank_does(llama_path: Path, prompts: list[list[int]]) -> None:
    params = [
        SamplingParams(temperature=0.8, top_k=5, seed=1, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.0, min_p=0.1, seed=3, max_tokens=12, ignore_eos=True),
    ]
    (wanted, exact), (found, close) = (
        outputs(llama_path, prompts, params, transport="loopback", memory_workers=2, tensor_parallel_size=n)
        for n in (1, 2)
    )
    assert found == wanted
    assert [e.logprob for step in close[3] for e in step.values()] == pytest.approx(
        [e.logprob for step in exact[3] for e in step.values()], abs=1e-3
    )


@pytest.mark.no_retry
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3", "phi3", "mixtral", "qwen3-moe"])
def test_tokens_of_families_are_those_of_one_rank(name: str, prompts: list[list[int]], tmp_path: Path) -> None:
    next(f for f in FAMILIES if f.name == name).build().save_pretrained(tmp_path)
    prompts = [[t % 300 + 3 for t in p] for p in prompts]
    wanted, found = (
        outputs(tmp_path, prompts, transport="loopback", memory_workers=4, tensor_parallel_size=n)[0] for n in (1, 4)
    )
    assert found == wanted


@pytest.mark.no_retry
@pytest.mark.long(but=["prefill_workers=1 memory_workers=4"])
@pytest.mark.parametrize(
    "options",
    [
        {"prefill_workers": 1, "memory_workers": 4},
        {"prefill_workers": 2, "prefill_pipeline": 2, "memory_workers": 2},
        {"prefill_workers": 1, "memory_workers": 4, "partition": "token", "kv_offloading_size": "64MiB"},
        {"prefill_workers": 1, "memory_workers": 4, "partition": "request", "pipeline": 3},
    ],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()),
)
def test_a_prefill_worker_computes_prompts_for_all_ranks(
    options: dict[str, Any], llama_path: Path, reference: Reference
) -> None:
    """It has all weights, and sends each rank's memory workers the heads of that rank."""
    prompts = [[(7 * i + 3 * n) % 90 + 5 for i in range(length)] for n, length in enumerate((300, 200, 150))]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(str(llama_path), transport="shm", tensor_parallel_size=2, prefill_chunk=32, **options) as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        longer = prompts[0] + prompts[2]
        (output,) = llm.generate([longer], params)
        stats = llm.stats()
    assert found == [reference(p, 16) for p in prompts]
    assert output.outputs[0].token_ids == reference(longer, 16)
    assert sum(s["rows"] for worker, s in stats.items() if worker.startswith("prefill")) > sum(map(len, prompts))
    received = [stats[f"memory-{n}"]["bytes_received"] for n in range(options["memory_workers"])]
    assert sum(received[::2]) == pytest.approx(sum(received[1::2]), rel=0.1), "ranks have equal parts"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2, "memory_workers": 3}, r"use memory_workers=2 or 4, not 3"),
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size must be at least 1, not 0"),
        (
            {"tensor_parallel_size": 2, "prefill_workers": 1, "deterministic": True},
            r"tensor_parallel_size=2 or more with prefill_workers does not go with deterministic",
        ),
        ({"tensor_parallel_size": 2, "memory_weights": "2,1"}, r"every rank must have the same weights"),
        ({"collective": "ring"}, r"collective must be one of auto, mesh, nccl, not 'ring'"),
        ({"tensor_parallel_size": 2, "collective": "nccl"}, r'collective="nccl" needs compute_device="cuda"'),
        ({"tensor_parallel_size": 3, "memory_workers": 3}, r"3 does not divide the 4 KV heads .*: use 1 or 2 or 4"),
    ],
)
def test_bad_sizes_are_told_in_one_line(options: dict[str, Any], words: str, llama_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as error:
        LLM(str(llama_path), transport="loopback", **options)
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_dry_run_and_explain_know_of_ranks(tiny_lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three = ["--tensor-parallel-size", "3", "--memory-workers", "3"]
    two = ["--tensor-parallel-size", "2"]
    assert main(["generate", str(tiny_lm), "--dry-run", "--prompt", "x", "--pipeline", "3", *two]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "would start 4 compute workers (2 replicas x 2 ranks) and 2 memory workers" in said[0]
    assert said[1] == "--collective auto: ranks would meet over mesh: not every rank computes on a GPU"
    assert main(["generate", str(tiny_lm), "--dry-run", "--prompt", "x", "--collective", "mesh", *two]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "--collective mesh: ranks would meet over mesh: as asked"
    assert main(["generate", str(tiny_lm), "--dry-run", "--prompt", "x"]) == 0
    assert "--collective" not in capsys.readouterr().out, "one rank meets nobody"
    assert main(["explain", str(tiny_lm), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main(["explain", str(tiny_lm), "--json", *two]) == 0
    part = json.loads(capsys.readouterr().out)
    assert part["architecture"] == "LlamaForCausalLM (rank 0 of 2)"
    assert whole["weight_bytes"] / 2 < part["weight_bytes"] < 1.1 * whole["weight_bytes"] / 2
    assert main(["generate", str(tiny_lm), "--dry-run", "--prompt", "x", *three]) == 2
    assert "does not divide the model's 4 KV heads: use 1 or 2 or 4" in capsys.readouterr().err
    nccl = ["--collective", "nccl", *two]
    assert main(["generate", str(tiny_lm), "--dry-run", "--prompt", "x", *nccl]) == 2
    assert "--collective nccl needs --compute-device cuda" in capsys.readouterr().err
