"""Workers of a store that are killed half way: what the index does not know is not there, all else is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "killed_workers.py"


@pytest.mark.no_retry
@pytest.mark.long(but=["20"])
@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_9(tmp_path: Path, rounds: int) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "kv"), str(rounds), "7"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    cut = json.loads(run.stdout)["cut off"]
    assert cut.get("w", 0) >= rounds // 5, f"most are hit while they write: {cut}"
