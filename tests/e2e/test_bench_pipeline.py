"""The running pipeline keeps near its plan on emulated devices: a short form of perf/bench_pipeline.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEAST, MOST = 0.97, 1.6  # of the plan; the machine may be busy with other things


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["loopback", "shm"])
def test_time_per_token_is_near_the_plan(transport: str) -> None:
    command = [
        sys.executable, "perf/bench_pipeline.py", "--n", "1,2,3", "--ratio", "2", "--runs", "2", "--tokens", "6",
        "--least-ms", "30", "--transport", transport,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=390, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[int, Any] = {}
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            point = json.loads(line)
            found[point["settings"]["n"]] = point
    assert found.keys() == {1, 2, 3}
    for n, point in found.items():
        assert LEAST <= point["ratio_to_plan"] <= MOST, f"n = {n}"
    per_batch = {n: point["token_s"]["median"] / n for n, point in found.items()}
    assert per_batch[3] < per_batch[2] < per_batch[1], "what rotation is for"
    assert run.stdout.count("| 2 |") >= 3, "the table"
