"""`plan --calibrate` on a run that real workers have made: its steps are those that the engine had them do."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lamina import LLM
from lamina.cli.launch import main
from lamina.observe.perfetto import read
from lamina.tools.plan.calibrate.load_driver import RunShape, run_requests
from lamina.tools.plan.calibrate.recorded_run import steps_of

pytestmark = pytest.mark.usefixtures("no_child_left")


def test_a_recorded_run_is_fitted(llama_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, shape, answer = str(tmp_path / "run.json"), RunShape(4, 48), 24
    options = {"transport": "loopback", "prefill_chunk": 16, "enable_prefix_caching": False, "memory_workers": 2}
    with LLM(str(llama_path), trace=trace, **options) as llm:
        real = run_requests(llm.engine, time.monotonic, shape.requests(answer), time.sleep, together=True)
    assert 0 < real.tbt_p50_s <= real.tbt_p99_s
    run = steps_of(read(trace), "--calibrate")
    assert (run.chunk, run.memory_workers, run.layers) == (16, 2, 3)
    computed = 4 * (48 + answer - 1)
    assert computed <= sum(s.rows for s in run.steps) <= computed + 4, "at most a row too many of each"
    seen = sum(n for length in [48 + answer - 1] * 4 for n in range(1, length + 1))
    assert seen <= sum(s.pairs for s in run.steps) <= seen + 4 * (48 + answer)
    assert all(s.model_s > 0 and s.attention_s > 0 for s in run.steps)
    assert main(["plan", str(llama_path), "--calibrate", trace, "--predict", "4x48,2x96:2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["predicted"]) == {"4 x 48, n = 1", "2 x 96, n = 2"}
    assert {"4", "19"} <= told["slices"].keys(), "four that decode; three, and a chunk beside them"
    assert told["predicted"]["4 x 48, n = 1"]["tokens_s"] > 0
    assert main(["plan", str(llama_path), "--calibrate", trace, "--predict", "4x48"]) == 0
    assert "4 x 48, n = 1" in capsys.readouterr().out
