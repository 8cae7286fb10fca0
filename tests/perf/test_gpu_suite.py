"""perf/gpu_suite.py where packages are missing: one line says so, and how to get them; parts fail one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nccl_over_gloo import open_over_gloo

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "perf"))
from gpu import collective  # noqa: E402 - needs the path above

CPU = torch.device("cpu")
COLLECTIVE_NCCL = "lamina.ops.collective.nccl.open_collective"
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


@pytest.mark.long
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


@pytest.mark.long
def test_collectives_are_measured_against_each_other_on_devices_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(COLLECTIVE_NCCL, open_over_gloo)
    rows = collective.measure(("mesh", "nccl"), [CPU, CPU], runs=2)
    assert list(rows) == [f"{kind} {size}" for kind in ("all_reduce", "all_gather") for size in collective.SIZES]
    for what, row in rows.items():
        nbytes = collective.SIZES[what.split(" ", 1)[1]]
        for name in ("mesh", "nccl"):
            assert row[f"{name} algbw"] == pytest.approx(nbytes / row[f"{name} us"] / 1e3)
            share = {"all_reduce": 1.0, "all_gather": 0.5}[what.split()[0]]
            assert row[f"{name} busbw"] == pytest.approx(row[f"{name} algbw"] * share)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md: 2 (n - 1) / n of a sum, (n - 1) / n of a gather, of the bytes of the result."""
    assert collective.bandwidths("all_reduce", 4 * 10**9, 4, 2.0) == {"us": 2e6, "algbw": 2.0, "busbw": 3.0}
    assert collective.bandwidths("all_gather", 4 * 10**9, 4, 2.0) == {"us": 2e6, "algbw": 2.0, "busbw": 1.5}


def test_a_collective_that_is_wrong_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COLLECTIVE_NCCL, open_over_gloo)
    monkeypatch.setattr("lamina.ops.collective.nccl.ordered_sum", lambda parts: parts[0] + 1.0)
    with pytest.raises(collective.BrokenError, match="all_reduce of 16 KiB by nccl is wrong"):
        collective.measure(("mesh", "nccl"), [CPU, CPU], runs=1)


@pytest.mark.long
def test_ranks_of_cpus_are_processes() -> None:
    line = [sys.executable, str(ROOT / "perf/bench_collective.py"), "--runs", "2"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=True)
    assert "left out: --collective nccl" in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["all_reduce"] * 3 + ["all_gather"] * 3
    assert all(row[3:] and min(map(float, row[5::3])) > 0.0 for row in rows)


def test_without_two_gpus_the_row_is_skipped_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert collective.nccl_against_mesh() == {"skipped": "collective nccl against mesh takes 2 GPUs, and 1 is here"}
