"""The transport mlx5 without a card and without a GPU: the distribution's libmlx5 over a stand-in of its kernel, our
kernels on a CPU, software NICs. In a process of its own, whose device is there from its start.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mlx5_stand_in
import pytest
from wiring import HERE, PATH, ROOT

INNER = [str(HERE / "mlx5_checks.py"), "tests/contract/test_transports.py"]


@pytest.mark.timeout(320)
def test_the_contract_and_faults_hold_over_libmlx5(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "mlx5_without_nic", "-p", "no:cacheprovider"]
    flags = ["-m", "not slow", "-k", "mlx5", *INNER]
    paths = os.pathsep.join([str(HERE), str(ROOT / "tests"), PATH])
    environment = mlx5_stand_in.environment(tmp_path) | {"PYTHONPATH": paths}
    done = subprocess.run(
        [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 60
    assert "skipped" not in done.stdout
