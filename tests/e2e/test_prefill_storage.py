"""Prefill workers with KV in host memory and on disk: what is stored is loaded, fetched and computed on.

Covers: lamina/workers/memory/kv_transfer/prefix_send.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams
from lamina.observe.failpoints import FAILPOINT, Failpoint
from lamina.observe.trace import Event

pytestmark = pytest.mark.usefixtures("no_child_left")
Reference = Callable[[list[int], int], list[int]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
BEGINNING = [(7 * i + 3) % 90 + 5 for i in range(300)]
LONGER = [*BEGINNING, *((11 * i + 3) % 90 + 5 for i in range(150))]
OTHERS = [[(k * 13 + 11 * i) % 90 + 5 for i in range(300)] for k in range(1, 5)]
SMALL: dict[str, Any] = {
    "dtype": "float32", "prefill_chunk": 64, "transport": "loopback", "memory_workers": 2, "prefill_workers": 1,
}  # fmt: skip
STORED = 256  # tokens of BEGINNING's whole pages


def tokens(llm: LLM, prompt: list[int]) -> list[int]:
    return list(llm.generate([prompt], PARAMS)[0].outputs[0].token_ids)


def total(llm: LLM, name: str, role: str = "") -> float:
    return sum(stats.get(name, 0.0) for worker, stats in llm.stats().items() if worker.startswith(role))


WAYS: list[dict[str, Any]] = [
    {"kv_memory": "260KB"},
    {"kv_memory": "260KB", "partition": "token", "memory_workers": 3},
    {"kv_memory": "500KB", "partition": "request", "pipeline": 2},
    {"kv_memory": "260KB", "prefill_workers": 2, "prefill_pipeline": 2},
    {"kv_memory": "260KB", "prefill_workers": 2, "deterministic": True},
]


@pytest.mark.no_retry
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_prefill_worker_computes_the_rest_of_a_prompt_that_host_memory_has(
    way: dict[str, Any], llama_path: Path, reference: Reference
) -> None:
    options = {**SMALL, "kv_offloading_size": "64MiB", "prefill_kv_memory": "1MiB", **way}
    with LLM(str(llama_path), **options) as llm:
        for prompt in (BEGINNING, *OTHERS):  # the pool has no room for all of them
            assert tokens(llm, prompt) == reference(prompt, 8)
        assert total(llm, "kv_saved_bytes") > 0
        before = total(llm, "rows", "prefill"), total(llm, "kv_loaded_bytes")
        assert tokens(llm, LONGER) == reference(LONGER, 8)
        assert total(llm, "rows", "prefill") - before[0] == len(LONGER) - STORED
        assert total(llm, "kv_loaded_bytes") > before[1]


@pytest.mark.no_retry
def test_a_restart_finds_what_prefill_workers_have_computed(
    llama_path: Path, tmp_path: Path, reference: Reference
) -> None:
    options = {**SMALL, "kv_store_dir": str(tmp_path / "kv")}
    with LLM(str(llama_path), **options) as llm:
        tokens(llm, BEGINNING)
    with LLM(str(llama_path), **options) as llm:
        assert tokens(llm, LONGER) == reference(LONGER, 8)
        assert total(llm, "rows", "prefill") == len(LONGER) - STORED
        assert total(llm, "fetched_bytes", "prefill") == total(llm, "kv_loaded_bytes") > 0
    with LLM(str(llama_path), **{**options, "kv_store_dir": str(tmp_path / "other")}) as llm:
        tokens(llm, LONGER)
        assert total(llm, "rows", "prefill") == len(LONGER), "the control: an empty directory"


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "event"),
    [("prefill-0", Event.FETCH), ("memory-1", Event.LEND), ("memory-0", Event.LOAD)],
    ids=["prefill worker fetches", "memory worker sends", "memory worker loads"],
)
def test_a_worker_dies_while_stored_kv_goes_to_a_prefill_worker(
    victim: str, event: Event, llama_path: Path, tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are the same, that worker alone is replaced, and later prompts fetch again."""
    wire = Failpoint(tmp_path / "wire")
    monkeypatch.setenv(FAILPOINT, str(tmp_path / "wire"))
    options = {**SMALL, "transport": "shm", "kv_store_dir": str(tmp_path / "kv")}
    with LLM(str(llama_path), **options) as llm:
        for prompt in (BEGINNING, OTHERS[0]):
            tokens(llm, prompt)
    with LLM(str(llama_path), **options) as llm:
        pids = llm.pools.pids
        wire.arm(pids[victim], event, 1 if event == Event.LOAD else 2)
        assert tokens(llm, LONGER) == reference(LONGER, 8)
        assert wire.has_fired
        assert [worker for worker, pid in llm.pools.pids.items() if pid != pids[worker]] == [victim]
        again = [*OTHERS[0], *LONGER[300:]]
        assert tokens(llm, again) == reference(again, 8)
        assert total(llm, "fetched_bytes", "prefill") > 0
