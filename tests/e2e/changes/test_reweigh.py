"""A memory worker that reads less than others gets a smaller part while sequences run; no sequence's tokens change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from test_elastic import PARAMS, PROMPTS, counts, open_llm, run, steps

from lamina import LLM
from lamina.executor.elastic import ResizeResult
from lamina.executor.load_balance import COOLDOWN_S, INTERVAL_S, NUM_INTERVALS
from lamina.server.engine_client.rebalance import REASON, Rebalancer

pytestmark = pytest.mark.usefixtures("no_child_left")
TURNS = 1000.0
TURN_BYTES = 4e6


@pytest.fixture(autouse=True)
def _alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.workers.memory.memory_worker.measure_read_bandwidth", lambda device: 10e9)


class Watched:
    """The server's use of the counters of ``llm``, by a clock of its own."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.now = llm, 0.0
        self.reweigh = Rebalancer(llm.engine, llm.pools, lambda: self.now)
        workers = range(len(llm.pools.registry.memory))
        self.counters = {f"memory-{w}": dict.fromkeys(("stored_bytes", "attend_s", "turns"), 0.0) for w in workers}

    def pass_by(self, *rates: float) -> None:
        """So long that parts are others, where workers read so many bytes a second."""
        for _ in range(NUM_INTERVALS + 1):
            for counters, rate in zip(self.counters.values(), rates, strict=True):
                counters["turns"] += TURNS
                counters["stored_bytes"] += TURNS * TURN_BYTES
                counters["attend_s"] += TURNS * TURN_BYTES / rate
            self.now += INTERVAL_S
            self.reweigh.update({"compute-0": {"steps": 1.0}, **self.counters})
        self.now += COOLDOWN_S


def run_beside(llm: LLM, rates: list[tuple[float, ...]]) -> tuple[list[Any], list[tuple[ResizeResult, list[float]]]]:
    """Tokens and log-probabilities by prompt; in their midst workers read at ``rates``, one after the other."""
    watched, ids, outputs = Watched(llm), [llm.engine.add(p, PARAMS) for p in PROMPTS], dict[int, Any]()
    left, found = list(rates), list[tuple[ResizeResult, list[float]]]()
    for outcome in steps(llm, outputs):
        if outcome is not None:
            found.append((outcome, llm.pools.resizer.weights))
        if left and len(outputs) == len(ids) and not llm.pools.resizer.in_progress:
            watched.pass_by(*left.pop(0))
        while llm.pools.resizer.is_preparing:
            llm.pools.registry.check()
    llm.engine.release_idle_blocks()
    llm.engine.accounting.check_integrity()
    return [(outputs[i].outputs[0].token_ids, outputs[i].outputs[0].logprobs) for i in ids], found


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"partition": "head"},
        {"partition": "token", "kv_cache_dtype": "int8", "pipeline": 2, "prefill_workers": 1},
        {"partition": "head", "tensor_parallel_size": 2, "memory_workers": 4},
        {"partition": "head", "plan": "auto", "memory_weights": ""},
    ],
    ids=["head", "token", "ranks", "plan"],
)
def test_one_that_is_throttled_has_a_smaller_part_until_it_is_not_bit_by_bit(
    options: dict[str, Any], tiny_lm: Path
) -> None:
    with open_llm(tiny_lm, transport="loopback", **{"memory_weights": "measured", **options}) as llm:
        wanted, _ = run(llm)
        workers = len(llm.pools.registry.memory)
        rows = counts(llm, "compute", "rows") + counts(llm, "prefill", "rows")
        slow = (10e9,) * (workers - 1) + (5e9,)
        found, changes = run_beside(llm, [(10e9,) * workers, slow, (10e9,) * workers])
        assert found == wanted
        assert [(c.error, c.reason, c.moved_bytes > 0) for c, _ in changes] == [("", REASON, True)] * 2
        size = llm.engine.config.topology.tensor_parallel_size
        assert [weights for _, weights in changes] == [[1.0] * (workers - size) + [0.5] * size, [1.0] * workers]
        assert counts(llm, "compute", "loads") == len(llm.pools.registry.compute)
        again = counts(llm, "compute", "rows") + counts(llm, "prefill", "rows") - rows
        assert again < rows + 4 * llm.engine.config.batching.max_num_seqs * workers, "a prompt was computed again"
        assert dict(llm.pools.resizer.moved_bytes) == {REASON: sum(c.moved_bytes for c, _ in changes)}
        assert run(llm)[0] == wanted


@pytest.mark.long(but=["options4"])
@pytest.mark.parametrize(
    "options",
    [
        {"partition": "request"},
        {"partition": "spill"},
        {"memory_weights": ""},
        {"memory_workers": 1},
        {"context_overflow": "truncate", "deterministic": False},
    ],
)
def test_parts_stay_where_they_are_not_measured_or_cannot_be_others(
    options: dict[str, Any], tiny_lm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_llm(tiny_lm, transport="loopback", **{"memory_weights": "measured", **options}) as llm:
        workers = len(llm.pools.registry.memory)
        _, changes = run_beside(llm, [(10e9,) * (workers - 1) + (5e9,)])
        assert changes == []
        assert llm.pools.resizer.weights == [1.0] * workers
    assert "keep their parts" not in caplog.text, "nobody looks at them"


@pytest.mark.long
def test_parts_stay_where_what_runs_would_have_no_room(tiny_lm: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The larger part of one fills its memory earlier. It is logged once for as long as the same one is slower."""
    with open_llm(
        tiny_lm, transport="loopback", memory_weights="measured", partition="token", max_model_len=512, kv_memory="1MiB"
    ) as llm:
        _, changes = run_beside(llm, [(10e9, 1e9), (10e9, 1.5e9), (10e9, 1e9), (1e9, 10e9), (1e9, 10e9)])
        assert changes == []
    told = [x for x in map(logging.LogRecord.getMessage, caplog.records) if "keep their parts of the work: " in x]
    assert [words.partition(",")[0] for words in told] == ["memory workers read by 1", "memory workers read by 0.1"]
