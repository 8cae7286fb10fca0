"""Layers that a prefill worker fetches while memory workers load later ones: the same tokens, and a trace shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from emulated_medium import environment

from lamina import LLM, SamplingParams
from lamina.observe.perfetto import read
from lamina.observe.trace import Event
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.slo_admission import SloAdmission

pytestmark = pytest.mark.usefixtures("no_child_left")
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [(7 * i + 3) % 90 + 5 for i in range(300)]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "kv_offloading_size": "16MiB", "memory_workers": 2, "prefill_workers": 1, "prefill_chunk": 32,
}  # fmt: skip
# Each memory worker reads two pages, layer by layer: six reads, of which the first two are the first layer's.
WAYS: list[dict[str, Any]] = [
    {"transport": "shm"},
    {"transport": "shm", "prefill_workers": 2, "prefill_pipeline": 2},
    {"transport": "loopback", "pipeline": 2},
    {"transport": "tcp", "partition": "request"},
]
LONG = pytest.mark.long(but=["{'transport': 'shm'}"])


@pytest.fixture(autouse=True)
def long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill worker is thought to take so long that it begins after the first layer."""
    monkeypatch.setattr(SloAdmission, "stored_start_s", lambda self, stored, tokens: 1e3)


def script(monkeypatch: pytest.MonkeyPatch, *events: dict[str, Any]) -> None:
    for name, value in environment(*events).items():
        monkeypatch.setenv(name, value)


def forget(llm: LLM) -> None:
    """Leave nothing in the pool, and on prefill workers."""
    llm.engine.finish_in_flight()
    llm.engine.scheduler.evict_retained()
    for worker in llm.engine.scheduler.features[PrefillDispatcher].workers:
        assert worker.prompt_cache is not None
        worker.prompt_cache.invalidate()


def asked(llm: LLM, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """Return the tokens of a prompt, and how many of it were stored."""
    (output,) = llm.generate([prompt], PARAMS)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


@LONG
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_layer_is_fetched_while_the_next_one_is_loaded(
    llama_path: Path, tmp_path: Path, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, {"call": "read", "after": 2, "delay_s": 0.4})
    trace = str(tmp_path / "trace.json")
    with LLM(str(llama_path), trace=trace, **{**OPTIONS, **way}) as llm:
        computed, _ = asked(llm)
        forget(llm)
        assert asked(llm) == (computed, 256)
        stats = llm.stats()
        loaded = sum(s.get("kv_loaded_bytes", 0.0) for s in stats.values())
        assert sum(s.get("fetched_bytes", 0.0) for s in stats.values()) == loaded > 0
        assert llm.engine.scheduler.epoch == 1
    spans = read(trace).spans
    devices = {s.device for s in spans if s.event is Event.LOAD}
    assert devices
    for device in devices:
        own = [s for s in spans if s.device == device]
        loads = {s.layer: s for s in own if s.event is Event.LOAD and s.value}
        sent = {s.layer: s for s in own if s.event is Event.LEND}
        assert sorted(sent) == [0, 1, 2] or not loads
        for layer, load in loads.items():
            assert sent[layer].end >= load.end, "a layer was sent before it was there"
        if loads:
            assert sent[0].end < max(load.end for load in loads.values()), "the first one was sent before the last came"


@pytest.mark.long(but=["lost-{'transport': 'shm'}"])
@pytest.mark.parametrize("way", WAYS[:3], ids=str)
@pytest.mark.parametrize("fault", ["lost", "broken"])
def test_what_a_prefill_worker_computes_on_a_failed_load_counts_for_nothing(
    llama_path: Path, way: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute workers continue after the page that is there, in the same epoch. No later prompt uses the rest."""
    script(monkeypatch, {"call": "read", "delay_s": 0.01}, {"call": "read", "after": 4, "times": 1, "fault": fault})
    failed = list[int]()
    leaves = PrefillDispatcher.leave_to_compute_workers
    monkeypatch.setattr(
        PrefillDispatcher, "leave_to_compute_workers", lambda self, s: (failed.append(s.id), leaves(self, s))
    )
    with LLM(str(llama_path), **{**OPTIONS, **way}) as llm:
        computed, _ = asked(llm)
        forget(llm)
        assert asked(llm) == (computed, 128)
        assert len(failed) <= 1, "the prompt, unless its chunks were stored before the report"
        for beginning in (280, 300):
            other = [*PROMPT[:beginning], *range(5, 60)]
            tokens, _ = asked(llm, other)
            forget(llm)
            llm.reset_prefix_cache()
            assert asked(llm, other) == (tokens, 0)
        assert llm.engine.scheduler.epoch == 1


def test_a_prompt_is_cancelled_while_it_is_loaded_and_fetched(
    llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, {"call": "read", "delay_s": 0.01})
    with LLM(str(llama_path), **OPTIONS, transport="loopback") as llm:
        blocks, dispatcher = llm.engine.free_blocks, llm.engine.scheduler.features[PrefillDispatcher]
        computed, _ = asked(llm)
        forget(llm)
        number = llm.engine.add(PROMPT, PARAMS)
        while not dispatcher.overlapped:
            llm.engine.step()
        llm.engine.cancel(number)
        llm.engine.release_idle_blocks()
        llm.engine.finish_in_flight()
        assert not dispatcher.overlapped
        forget(llm)
        assert asked(llm) == (computed, 256)
        llm.reset_prefix_cache()
        llm.generate([[5, 6, 7]], PARAMS)
        assert llm.engine.free_blocks == blocks
