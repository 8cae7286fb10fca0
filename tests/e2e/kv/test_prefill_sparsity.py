"""Prefill workers with sequences that lose blocks after their prompts, whose last rows compute workers run; and with
queries that select blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams
from lamina.kv.sparsity import OBSERVED_DECODE_ROWS
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.sparsity.pruning import BlockPruner

pytestmark = pytest.mark.usefixtures("no_child_left")
PARAMS = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
DENSE = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, kv_sparsity="none")
PROMPTS = [[(7 * i + 3 + 5 * n) % 90 + 5 for i in range(length)] for n, length in enumerate((300, 260, 90, 300))]
WINDOW, CHUNK = 16, 32
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "memory_workers": 2, "prefill_chunk": CHUNK, "kv_sparsity": "evict", "kv_budget": 128,
    "kv_recent": 32, "kv_observation_window": WINDOW, "transport": "shm",
}  # fmt: skip


def run(path: Path, **options: Any) -> tuple[list[list[int]], dict[str, float]]:
    """Return the tokens of sparse prompts, and then of dense ones, and counts."""
    with LLM(str(path), **{**OPTIONS, **options}) as llm:
        found = [o.outputs[0].token_ids for params in (PARAMS, DENSE) for o in llm.generate(PROMPTS, params)]
        scheduler = llm.engine.scheduler
        facts = {"dropped": scheduler.features[BlockPruner].num_dropped, "preempted": scheduler.num_preemptions}
        facts["rows"] = sum(s["rows"] for worker, s in llm.stats().items() if worker.startswith("prefill"))
        if options.get("kv_offloading_size"):
            facts["hits"] = scheduler.features[OffloadIndex].num_hit_tokens
        if options.get("prefill_workers"):
            dispatcher = scheduler.features[PrefillDispatcher]
            assert not any(w.prompts or w.in_flight for w in dispatcher.workers)
            assert dispatcher.slo_admission.conductor.num_waiting == 0
        return [list(tokens) for tokens in found], facts


@pytest.mark.no_retry
@pytest.mark.long(but=["{}"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_workers": 2, "prefill_pipeline": 2},
        {"prefill_workers": 2, "deterministic": True},
        {"pipeline": 2, "kv_memory": "280KB"},
        {"kv_offloading_size": "64MiB", "enable_prefix_caching": True, "kv_memory": "280KB"},
    ],
    ids=str,
)
def test_the_same_blocks_are_lost_and_the_tokens_are_the_same(options: dict[str, Any], llama_path: Path) -> None:
    own = {name: value for name, value in options.items() if not name.startswith("prefill")}
    (wanted, before), (found, facts) = (run(llama_path, **own), run(llama_path, **{"prefill_workers": 1, **options}))
    assert found == wanted
    assert before["rows"] == 0 < facts["rows"], "a prefill worker computed prompts"
    assert facts["dropped"] > 0
    if "kv_memory" not in options:
        assert facts["dropped"] == before["dropped"]
        unit = CHUNK if "deterministic" in options else 1
        scored = max(WINDOW, OBSERVED_DECODE_ROWS)
        first = sum((len(p) - scored) // unit * unit for p in PROMPTS)
        assert facts["rows"] >= first, "all but the rows that are scored"
    else:
        assert facts["preempted"] > 0


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_workers": 2, "prefill_pipeline": 2}, {"kv_offloading_size": "64MiB"}, {"tensor_parallel_size": 2}],
    ids=str,
)
def test_queries_select_the_same_blocks_of_prompts_that_prefill_workers_compute(
    options: dict[str, Any], llama_path: Path
) -> None:
    """A request that attends everything gets other tokens, so the selection shows."""
    found = list[list[list[int]]]()
    dense = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, kv_sparsity="none")
    base = {name: value for name, value in OPTIONS.items() if name != "kv_observation_window"}
    for more in ({}, {"prefill_workers": 1}):
        own = {name: value for name, value in options.items() if more or not name.startswith("prefill")}
        with LLM(str(llama_path), **{**base, "kv_sparsity": "select", **more, **own}) as llm:
            found.append([list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, PARAMS)])
            rows = sum(s["rows"] for worker, s in llm.stats().items() if worker.startswith("prefill"))
            assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, dense)] != found[-1]
    assert found[0] == found[1]
    assert rows >= sum(len(prompt) - CHUNK for prompt in PROMPTS), "prefill workers computed prompts"
