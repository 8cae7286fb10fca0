"""Prompts that begin alike on prefill workers: computed once where their beginning is, with the same tokens."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lamina import LLM, SamplingParams
from lamina.observe.failpoints import FAILPOINT, Failpoint
from lamina.observe.trace import Event
from lamina.scheduler.conductor import ConductorConfig
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer.block_parts import whole_blocks
from lamina.workers.prefill import prefix_fetch

pytestmark = pytest.mark.usefixtures("no_child_left")
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
DOCUMENT, QUESTION = 64, 40  # tokens; a question is longer than a chunk


def asked(documents: int, count: int) -> list[list[int]]:
    """Questions about documents, each with its own."""
    about = [[2 + (7 * d + 3 * t) % 300 for t in range(DOCUMENT)] for d in range(documents)]
    return [[*about[n % documents], *(2 + (11 * n + 5 * t) % 300 for t in range(QUESTION))] for n in range(count)]


@pytest.mark.long
def test_tokens_are_the_same_whoever_has_computed_the_beginning(
    llama_path: Path, reference: Callable[[list[int], int], list[int]]
) -> None:
    """Over policies, bit by bit; and most documents are computed once for each worker at most."""
    prompts, documents, workers = asked(2, 10), 2, 2
    expected = [reference(p, 4) for p in prompts]
    options = {"memory_workers": 2, "partition": "request", "prefill_workers": workers, "prefill_chunk": 32}
    with LLM(str(llama_path), transport="loopback", deterministic=True, **options) as llm:
        before = 0.0
        for policy in ("auto", "mooncake", "cache-aware", "load-balance", "random"):
            llm.engine.slo_admission.set_config(ConductorConfig(policy=policy))
            found = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
            assert found == expected, policy
            stats = llm.stats()
            rows = sum(stats[f"prefill-{w}"]["rows"] for w in range(workers)) - before
            before += rows
            assert rows <= len(prompts) * QUESTION + workers * documents * DOCUMENT, policy
            assert llm.engine.slo_admission.num_page_replicas is not None
            llm.reset_prefix_cache()
            assert llm.engine.slo_admission.num_page_replicas == 0


@pytest.mark.long
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_document_that_one_worker_has_comes_to_the_other(kv_cache_dtype: str, llama_path: Path) -> None:
    """Bit by bit; and what many ask about is on both then."""
    prompts = asked(1, 5)
    options = {"prefill_workers": 2, "prefill_chunk": 32, "deterministic": True, "kv_cache_dtype": kv_cache_dtype}
    with LLM(str(llama_path), transport="loopback", enable_prefix_caching=False, **options) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    with LLM(str(llama_path), transport="loopback", **options) as llm:
        llm.engine.slo_admission.set_config(ConductorConfig(policy="mooncake"))
        tokens = [o.outputs[0].token_ids for part in (prompts[:1], prompts[1:]) for o in llm.generate(part, GREEDY)]
        assert tokens == expected
        stats = llm.stats()
        assert sorted(stats[f"prefill-{w}"]["fetched_bytes"] > 0 for w in range(2)) == [False, True]
        assert sum(stats[f"prefill-{w}"]["rows"] for w in range(2)) == DOCUMENT + len(prompts) * QUESTION
        assert llm.engine.slo_admission.num_page_replicas


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize(("victim", "event"), [("prefill-0", Event.LEND), ("prefill-1", Event.FETCH)])
def test_a_worker_dies_in_the_middle_of_a_transfer(
    victim: str, event: Event, llama_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker that has the document dies, or the one that gets it: nothing is lost, and none has half of it."""
    prompts, wire = asked(1, 5), Failpoint(tmp_path / "wire")
    monkeypatch.setenv(FAILPOINT, str(tmp_path / "wire"))
    with LLM(str(llama_path), prefill_workers=2, prefill_chunk=32, deterministic=True) as llm:
        llm.engine.slo_admission.set_config(ConductorConfig(policy="mooncake"))
        runs = list[list[list[int]]]()
        for times in (0, 2):
            llm.reset_prefix_cache()
            begun = llm.generate(prompts[:1], GREEDY)
            pids = llm.pools.pids
            wire.arm(pids[victim], event, times)
            runs.append([o.outputs[0].token_ids for o in begun + llm.generate(prompts[1:], GREEDY)])
        assert wire.has_fired
        assert [worker for worker, pid in llm.pools.pids.items() if pid != pids[worker]] == [victim]
        assert runs[0] == runs[1]


@pytest.mark.no_retry
def test_completions_of_one_prompt_compute_it_once(llama_path: Path) -> None:
    (prompt,) = asked(1, 1)
    params = SamplingParams(n=4, temperature=0.9, seed=3, max_tokens=4, ignore_eos=True)
    with LLM(str(llama_path), transport="loopback", prefill_workers=1, prefill_chunk=32) as llm:
        assert len({tuple(one.token_ids) for one in llm.generate([prompt], params)[0].outputs}) > 1
        assert llm.stats()["prefill-0"]["rows"] == len(prompt)


@pytest.mark.long
def test_what_the_driver_thinks_is_there_and_is_not_costs_no_worker(
    llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is wrong: the prompt is computed instead, what decodes goes on, and no worker is replaced."""
    prompts, gone = asked(1, 5), list[int]()

    def forgetful(store: KvStore, sequence: int, first: int, count: int) -> list[Sequence[int]] | None:
        if threading.current_thread().name == "lamina-send" and not gone:
            gone.append(sequence)
            return None
        return whole_blocks(store, sequence, first, count)

    with LLM(str(llama_path), transport="loopback", prefill_workers=2, prefill_chunk=32, deterministic=True) as llm:
        llm.engine.slo_admission.set_config(ConductorConfig(policy="mooncake"))
        before, view, runs = list(llm.pools.registry), llm.engine.scheduler.epoch, list[list[list[int]]]()
        for patched in (False, True):
            llm.reset_prefix_cache()
            begun = llm.generate(prompts[:1], GREEDY)
            if patched:
                monkeypatch.setattr(prefix_fetch, "whole_blocks", forgetful)
            runs.append([o.outputs[0].token_ids for o in begun + llm.generate(prompts[1:], GREEDY)])
        assert gone
        assert runs[0] == runs[1]
        assert list(llm.pools.registry) == before, "all are who they were"
        assert llm.engine.scheduler.epoch > view
        assert llm.engine.slo_admission.num_page_replicas, "and what others have is fetched again"


@pytest.mark.long
@pytest.mark.parametrize("victim", ["prefill-0", "prefill-1"])
def test_a_worker_that_stands_still_is_replaced_while_the_other_serves(victim: str, llama_path: Path) -> None:
    """The worker that has the document stands still, or the one that is to have it: it is replaced in the time of a
    stop, and not of a step.
    """
    prompts = asked(1, 6)
    with LLM(str(llama_path), prefill_workers=2, prefill_chunk=32, deterministic=True) as llm:
        llm.engine.slo_admission.set_config(ConductorConfig(policy="mooncake"))
        runs = list[list[list[int]]]()
        for stops in (False, True):
            llm.reset_prefix_cache()
            begun = llm.generate(prompts[:1], GREEDY)
            pids = llm.pools.pids
            if stops:
                os.kill(pids[victim], signal.SIGSTOP)
            runs.append([o.outputs[0].token_ids for o in begun + llm.generate(prompts[1:], GREEDY)])
        assert [worker for worker, pid in llm.pools.pids.items() if pid != pids[worker]] == [victim]
        assert runs[0] == runs[1]
