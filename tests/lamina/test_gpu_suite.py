"""perf/gpu_suite.py where packages are missing: one line says so, and how to get them; parts fail one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import sys
sys.path[:0] = [sys.argv[1] + "/perf", sys.argv[1]]
for name in ("msgspec", "pytest_timeout"):
    sys.modules[name] = None
import gpu_suite
print(gpu_suite.missing())
for name in ("gpu_attention", "gpu_decode"):
    print(gpu_suite.run_part(name, lambda: gpu_suite.module(name))["error"])
"""


def test_what_is_missing_is_told_and_fails_its_parts_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(ROOT)], capture_output=True, text=True, timeout=100, check=True
    )
    said, *errors = done.stdout.splitlines()
    assert "not here: cupy, msgspec, pytest_timeout: " in said or "not here: msgspec, pytest_timeout: " in said
    assert "pip install --target carried" in said
    assert "msgspec pytest-timeout, and PYTHONPATH=carried" in said
    assert len(errors) == 2
    assert all(error.startswith("ModuleNotFoundError: ") and "msgspec" in error for error in errors)
