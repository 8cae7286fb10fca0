"""First tokens come at the predicted times. Two prefill workers are real processes on emulated devices, which take
nearly all of the time, so that other load on this host counts little.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import msgspec
import pytest

from lamina import LLM, SamplingParams
from lamina.engine.engine import Engine
from lamina.scheduler.conductor import ConductorConfig
from lamina.scheduler.conductor.decision_log import CHOICE, DecisionLog, LogFields
from lamina.utils.emulated_device import VARIABLE, DeviceTimes

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
WORKERS, CHUNK, BUSY = 2, 64, 0.85  # of the workers' time, that prompts ask for
DEVICES = DeviceTimes(slice_s=(0.001,), prefill_row_s=0.0005, attention_s=0.001)
WARM = (400, 100, 300, 200, 80)  # tokens of prompts by which the law is learned
PIN = 0.2  # of the real time


def served(engine: Engine, comes: list[tuple[float, int]]) -> dict[int, float]:
    """Prompts of so many tokens, each at its time; by request, seconds until the first token."""
    begun, left, first = time.monotonic(), list(comes), dict[int, float]()
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    while left or engine.has_work:
        while left and begun + left[0][0] <= time.monotonic():
            _, tokens = left.pop(0)
            engine.add([2 + (tokens * 7 + len(left)) % 250] * tokens, params)
        if not engine.has_work:
            time.sleep(max(0.0, begun + left[0][0] - time.monotonic()))
        for output in engine.step() if engine.has_work else []:
            if output.times.first_token_s is not None:
                first[output.request_id] = output.times.first_token_s - output.times.arrival_s
    engine.release_idle_blocks()
    return first


@pytest.mark.long
def test_a_first_token_is_foreseen_within_a_fifth(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the median of 24 prompts, at whose arrival others wait and are computed."""
    monkeypatch.setenv(VARIABLE, msgspec.json.encode(DEVICES).decode())
    foreseen, queues = dict[int, float](), list[float]()

    def note(name: str, said: LogFields) -> None:
        if name == CHOICE and "ttft_s" in said:
            foreseen[said["request"]] = said["ttft_s"]
            queues.append(said["queue_s"])

    options = {"attention": "emulate", "prefill_workers": WORKERS, "prefill_chunk": CHUNK, "compute_threads": 1}
    with LLM(str(llama_path), max_num_seqs=64, enable_prefix_caching=False, **options) as llm:
        promises = llm.engine.slo_admission
        promises.set_config(ConductorConfig())
        for tokens in WARM:
            served(llm.engine, [(0.0, tokens)])
        promises.decision_log = DecisionLog(note)
        rng, at, comes = random.Random(4), 0.0, list[tuple[float, int]]()
        for _ in range(24):
            comes.append((at, rng.randint(CHUNK + 8, 400)))
            at += rng.expovariate(BUSY * WORKERS / promises.conductor.prefill_latency.model.seconds(236))
        real = served(llm.engine, comes)
    assert len(foreseen) == 24
    assert sum(seconds > 0.05 for seconds in queues) > 5, "some have to wait"
    assert statistics.median(abs(foreseen[n] - real[n]) / real[n] for n in foreseen) <= PIN
