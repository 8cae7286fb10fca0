"""perf/gpu_suite.py where packages are missing: one line says so, and how to get them; parts fail one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "perf"))
from gpu import collective  # noqa: E402 - needs the path above

CPU = torch.device("cpu")
WITHOUT = """
import sys
sys.path[:0] = [sys.argv[1] + "/perf", sys.argv[1]]
for name in ("msgspec", "pytest_timeout"):
    sys.modules[name] = None
import gpu_suite
print(gpu_suite.missing())
for name in ("gpu.attention", "gpu.decode"):
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


def test_collectives_are_measured_against_each_other_on_devices_that_are_there() -> None:
    found = collective.measure(("mesh", "gloo"), [CPU, CPU], runs=2)
    assert list(found) == list(collective.SIZES)
    assert all(set(row) == {"mesh", "gloo"} and min(row.values()) > 0.0 for row in found.values())


def test_collectives_that_give_other_bits_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.collective.process_group.ordered_sum", lambda parts: parts[0] + 1.0)
    with pytest.raises(collective.BrokenError, match="sums of 16 KiB differ between mesh, gloo"):
        collective.measure(("mesh", "gloo"), [CPU, CPU], runs=1)


def test_without_two_gpus_the_row_is_skipped_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert collective.nccl_against_mesh() == {"skipped": "collective nccl against mesh takes 2 GPUs, and 1 is here"}
