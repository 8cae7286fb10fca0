"""Prompts on workers of their own: the same tokens, and the compute workers see one row a step."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams
from lamina.api import frontend
from lamina.executor.worker_executor import WorkerExecutor

pytestmark = pytest.mark.usefixtures("no_child_left")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SCORED = SamplingParams(temperature=0.7, seed=1, max_tokens=12, logprobs=2, prompt_logprobs=0, ignore_eos=True)


@pytest.mark.long
def test_tokens_are_those_of_transformers(
    llama_path: Path, prompts: list[list[int]], reference: Callable[[list[int], int], list[int]]
) -> None:
    with LLM(str(llama_path), memory_workers=2, partition="token", prefill_workers=1, prefill_chunk=32) as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
        assert found == [reference(p, 24) for p in prompts]
        pids, stats = llm.pools.pids, llm.stats()
        assert len({*pids.values(), os.getpid()}) == 5, "each worker is its own process"
        assert stats["prefill-0"]["rows"] == sum(len(p) for p in prompts if len(p) > 1)
        decoded = len(prompts) * 23 + 1  # the first token comes from a prefill worker, but for the prompt of one token
        assert decoded <= stats["compute-0"]["rows"] <= decoded + len(prompts)
        assert all(stats[w]["grant_s"] > 0 for w in ("memory-0", "memory-1"))


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize("pipeline", [1, 2])
def test_the_bits_are_those_of_the_compute_worker(pipeline: int, gemma2_path: Path) -> None:
    """A model with windows, in chunks; prompts' log-probabilities and sampled tokens too."""
    prompts = [[3 + (5 * i + j) % 300 for j in range(n)] for i, n in enumerate((60, 9, 1, 33))]
    found: list[Any] = []
    for prefill_workers in (0, 1, 2):
        with LLM(
            str(gemma2_path),
            transport="loopback",
            memory_workers=2,
            prefill_chunk=16,
            deterministic=True,
            prefill_workers=prefill_workers,
            pipeline=pipeline,
        ) as llm:
            outputs = llm.generate(prompts, SCORED)
            found.append([(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1] == found[2]


def test_a_request_that_is_cancelled_gives_its_blocks_back(llama_path: Path, prompts: list[list[int]]) -> None:
    with LLM(str(llama_path), transport="loopback", prefill_workers=1, prefill_chunk=8) as llm:
        engine = llm.engine
        before = engine.free_blocks
        for cancel_after in (1, 2, 4, 7):
            ids = [engine.add(p, GREEDY) for p in prompts]
            for _ in range(cancel_after):
                engine.step()
            for request in ids:
                engine.cancel(request)
            engine.release_idle_blocks()
            assert engine.free_blocks == before
        whole = llm.generate(prompts, GREEDY)
        assert all(len(o.outputs[0].token_ids) == 24 for o in whole)


@pytest.mark.long
def test_a_preempted_prompt_is_computed_again(llama_path: Path, prompts: list[list[int]]) -> None:
    """KV memory for hardly more than the longest: sequences make room for each other, and nothing is lost."""
    longest = [prompts[3] + prompts[1]] * 3
    found = []
    alone: dict[str, Any] = {"enable_prefix_caching": False, "prefill_workers": 1, "prefill_chunk": 32}  # each its own
    for options in ({}, {"max_model_len": 160, "kv_memory": "120KB", "block_size": 16}):
        with LLM(str(llama_path), transport="loopback", **alone, **options) as llm:
            outputs = llm.generate(longest, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
            found.append([o.outputs[0].token_ids for o in outputs])
            preempted = llm.engine.scheduler.num_preemptions
    assert preempted > 0, llm.engine.free_blocks
    assert found[0] == found[1]


def test_a_driver_that_pauses_does_not_take_prefill_workers_for_hung(
    llama_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of both pools lie there for longer than a chunk may take."""
    paused_s = [0.0]
    clock = lambda: time.monotonic() + paused_s[0]  # noqa: E731
    monkeypatch.setattr(frontend, "WorkerExecutor", partial(WorkerExecutor, clock=clock))
    with LLM(str(llama_path), transport="loopback", prefill_workers=1, prefill_chunk=8) as llm:
        engine, workers = llm.engine, llm.pools.registry
        engine.add(prompts[0], GREEDY)
        while not any(s.num_output_tokens for b in engine.scheduler.batches for s in b.running):
            engine.step()
        engine.add(prompts[3], GREEDY)
        while len({batch for batch, _ in engine.in_flight}) < 2:  # a step, and a chunk of the prompt
            engine.step()
        for member in (*workers.prefill, *workers.compute):
            poller = select.poll()
            poller.register(member.link, select.POLLIN)
            assert poller.poll(60_000)
        paused_s[0] = 1000.0
        while engine.has_work:
            engine.step()


def test_no_room_for_a_prompt_is_told_with_the_flags_that_help(
    llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.workers.prefill.main.available_bytes", lambda _: 1000)
    options: dict[str, Any] = {"transport": "loopback", "memory_workers": 1, "memory_addresses": "loopback://here"}
    with pytest.raises(ValueError, match=r"^a prefill worker takes \d+KiB .* max_model_len or prefill_workers$"):
        LLM(str(llama_path), prefill_workers=1, **options)
