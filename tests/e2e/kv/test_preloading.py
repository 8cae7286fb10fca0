"""Layers that are loaded under the slices before them: the same tokens as without, and a trace that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from emulated_medium import environment

from lamina import LLM, SamplingParams
from lamina.observe.perfetto import read
from lamina.observe.trace import Event
from lamina.scheduler.kv_manager.swap import SwapPolicy

pytestmark = pytest.mark.usefixtures("no_child_left")
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [(7 * i + 3) % 90 + 5 for i in range(300)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": True, "kv_offloading_size": "16MiB"}
# Of two workers each reads two pages, layer by layer: six reads, of which the first two are the first layer's.
WAYS: list[dict[str, Any]] = [
    {"transport": "shm", "memory_workers": 2},
    {"transport": "loopback", "memory_workers": 2, "pipeline": 2},
]


@pytest.fixture
def long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """First rows are thought to take so long that a gate opens after the first layer."""
    monkeypatch.setattr(SwapPolicy, "prefill_estimate_s", lambda self, tokens: 1e3)


def script(monkeypatch: pytest.MonkeyPatch, *happenings: dict[str, Any]) -> None:
    for name, value in environment(*happenings).items():
        monkeypatch.setenv(name, value)


def asked_twice(llm: LLM, prompt: list[int] = PROMPT) -> tuple[list[int], list[int], int]:
    """Returns the tokens of a prompt that is computed, those after its load, and how many of it were loaded."""
    tokens = list[list[int]]()
    for _ in range(2):
        (output,) = llm.generate([prompt], PARAMS)
        tokens.append(output.outputs[0].token_ids)
        llm.engine.finish_in_flight()
        llm.engine.scheduler.evict_retained()
    return tokens[0], tokens[1], output.num_cached_tokens or 0


@pytest.mark.long(but=["{'transport': 'shm', 'memory_workers': 2}"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.usefixtures("long_rows")
def test_a_layer_comes_under_the_slice_before_it(
    llama_path: Path, tmp_path: Path, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, {"call": "read", "after": 2, "delay_s": 0.6})  # rows are there first
    trace = str(tmp_path / "trace.json")
    with LLM(str(llama_path), trace=trace, **OPTIONS, **way) as llm:
        computed, loaded, cached = asked_twice(llm)
    assert (loaded, cached) == (computed, 256)
    spans = read(trace).spans
    for device in ("memory-0", "memory-1"):
        own = [s for s in spans if s.device == device]
        loads = {s.layer: s for s in own if s.event is Event.LOAD}
        assert sorted(loads) == [0, 1, 2]
        stored = [s for s in own if s.event is Event.STORED and s.start >= loads[0].end]
        first = [min(s.start for s in stored if s.layer == layer) for layer in sorted(loads)]
        assert first[0] < loads[1].end, "rows went through the first layer while the second one was loaded"
        assert all(first[n] >= loads[n].end for n in loads), "and through none before it was there"
        assert any(s.event is Event.WAIT_LAYER for s in own)


@pytest.mark.long(but=["lost-{'transport': 'shm', 'memory_workers': 2}"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("fault", ["lost", "broken"])
@pytest.mark.usefixtures("long_rows")
def test_tokens_of_a_load_that_fails_behind_its_gate_count_for_nothing(
    llama_path: Path, way: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed anew, in the same epoch; what a page before it has is used."""
    script(monkeypatch, {"call": "read", "delay_s": 0.01}, {"call": "read", "after": 4, "times": 1, "fault": fault})
    with LLM(str(llama_path), **OPTIONS, **way) as llm:
        computed, loaded, cached = asked_twice(llm)
        view = llm.engine.scheduler.epoch
        assert llm.generate([PROMPT[:40]], PARAMS)[0].outputs[0].token_ids
        assert llm.engine.scheduler.epoch == view == 1
    assert (loaded, cached) == (computed, 128)


@pytest.mark.usefixtures("long_rows")
def test_who_is_cancelled_while_it_is_loaded_leaves_nothing(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, {"call": "read", "delay_s": 0.01})
    with LLM(str(llama_path), **OPTIONS, **WAYS[1]) as llm:
        blocks = llm.engine.free_blocks
        asked_twice(llm)
        number = llm.engine.add(PROMPT, PARAMS)
        loading = llm.engine.scheduler
        while not any(s.transfer.loading_tokens and s.num_computed_tokens for b in loading.batches for s in b.running):
            llm.engine.step()
        llm.engine.cancel(number)
        llm.engine.release_idle_blocks()
        llm.engine.finish_in_flight()
        assert asked_twice(llm)[2] == 256
        llm.reset_prefix_cache()
        llm.generate([[5, 6, 7]], PARAMS)
        assert llm.engine.free_blocks == blocks
