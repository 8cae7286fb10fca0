"""Workers load once and connect often: real processes meet anew in the middle of their sequences, which go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams
from lamina.netstack import Channel
from lamina.protocol.executor import WorkerError
from lamina.workers.epoch_channels import EpochFabric

pytestmark = pytest.mark.usefixtures("no_child_left")
# Penalties depend on what workers were sent before; log-probabilities show a wrong bit where a token would not.
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=24, logprobs=2, frequency_penalty=0.4, repetition_penalty=1.1, ignore_eos=True
)
VIEWS = 3


def run(llm: LLM, prompts: list[list[int]], pauses: int) -> list[Any]:
    """Tokens and log-probabilities by prompt; so often, all workers meet anew when some tokens are there."""
    engine, outputs = llm.engine, dict[int, Any]()
    ids = [engine.add(prompt, PARAMS) for prompt in prompts]
    for pause in range(pauses):
        while min((len(outputs[i].outputs[0].token_ids) if i in outputs else 0) for i in ids) < 4 * (pause + 1):
            outputs |= {o.request_id: o for o in engine.step()}
        outputs |= {o.request_id: o for o in engine.finish_in_flight()}
        assert any(engine.has_work and not outputs[i].finished for i in ids), "a fast sequence may have ended"
        engine.resume(llm.pools.connect())
    while engine.has_work:
        outputs |= {o.request_id: o for o in engine.step()}
    engine.release_idle_blocks()
    return [(outputs[i].outputs[0].token_ids, outputs[i].outputs[0].logprobs) for i in ids]


def open_files(llm: LLM) -> dict[str, int]:
    return {worker: len(os.listdir(f"/proc/{pid}/fd")) for worker, pid in llm.pools.pids.items()}


def counters(llm: LLM, role: str, name: str) -> list[float]:
    return [values[name] for worker, values in llm.stats().items() if worker.startswith(role)]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"transport": "tcp", "prefill_workers": 1},
        {"transport": "shm", "pipeline": 3},
        {"transport": "shm", "tensor_parallel_size": 2, "partition": "token"},
    ],
    ids=["prefill", "ring", "ranks"],
)
def test_workers_meet_anew_and_their_sequences_go_on(
    options: dict[str, Any], llama_path: Path, prompts: list[list[int]]
) -> None:
    with LLM(
        str(llama_path), memory_workers=2, deterministic=True, prefill_chunk=32, max_recoveries=0, **options
    ) as llm:
        wanted = run(llm, prompts, 0)
        pids, rows = llm.pools.pids, counters(llm, "memory", "rows")
        files = open_files(llm)
        found = run(llm, prompts, VIEWS - 1)
        assert open_files(llm) == files, "channels of older epochs are closed"
        assert found == wanted
        assert llm.pools.pids == pids
        for role, name in (("compute", "loads"), ("prefill", "loads"), ("memory", "stores")):
            assert set(counters(llm, role, name)) <= {1.0}, "nothing was loaded twice"
            assert set(counters(llm, role, "connects")) <= {float(VIEWS)}
        assert all(
            counters(llm, role, "loads") for role in ("compute", *(["prefill"] if "prefill_workers" in options else []))
        )
        # Of prompts that prefill workers computed, the rest after the retained chunks is computed where these lie.
        rests = sum((len(p) - 1) % 32 + 1 for p in prompts if len(p) > 32) if "prefill_workers" in options else 0
        for before, after in zip(rows, counters(llm, "memory", "rows"), strict=True):
            assert after - before <= before + rests, "no prompt was filled in again"
        assert counters(llm, "memory", "refused") == [0.0, 0.0]
        os.kill(pids["memory-1"], signal.SIGKILL)
        lost = (
            r"^memory worker 1 \(pid \d+\) was killed by SIGKILL; its pool cannot continue and was ended: start again$"
        )
        with pytest.raises(WorkerError, match=lost):
            llm.pools.connect()


def test_nothing_may_be_in_flight(llama_path: Path) -> None:
    with LLM(str(llama_path), transport="loopback") as llm:
        llm.engine.add([5, 6, 7], PARAMS)
        llm.engine.step()
        with pytest.raises(ValueError, match="while steps are in flight"):
            llm.pools.connect()
        llm.engine.finish_in_flight()
        ready = llm.pools.connect()
        llm.engine.resume(ready)
        while llm.engine.has_work:
            llm.engine.step()


def test_a_peer_has_the_time_of_a_start_to_listen(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory worker that has just been started imports for seconds before it does."""
    limits: list[float | None] = []
    right = EpochFabric.connect

    def connect(self: EpochFabric, *args: Any, **limit: float) -> Channel:
        limits.append(limit.get("timeout_s"))
        return right(self, *args, **limit)

    monkeypatch.setattr(EpochFabric, "connect", connect)
    with LLM(str(llama_path), transport="loopback", prefill_workers=1, memory_workers=2, start_timeout_s=77.0):
        assert limits == [77.0] * 4
