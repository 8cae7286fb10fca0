"""Decoding hardly feels prompts that prefill workers compute (perf/bench_prefill.py, in short)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIN = 1.2  # a step with prompts, of one without


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_decoding_beside_prompts_keeps_its_pace() -> None:
    """Slices and layers of 20 ms, chunks of 512. Without prefill workers steps wait for chunks, so the pin can fail."""
    command = [
        sys.executable, "perf/bench_prefill.py", "--prefill-workers", "2,0", "--slice-ms", "20", "--attention-ms", "20",
        "--layers", "2", "--runs", "2", "--prompts", "2",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=390, check=False)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    ratios = {row["settings"]["prefill_workers"]: row["step_ratio"] for row in rows}
    assert ratios[2] <= PIN < ratios[0]
