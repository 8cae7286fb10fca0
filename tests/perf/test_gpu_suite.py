"""perf/gpu_suite.py where packages are missing: one line says so, and how to get them; parts fail one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nccl_over_gloo import open_over_gloo

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "perf"))
import gpu_suite  # noqa: E402 - needs the path above
from gpu import collective  # noqa: E402

CPU = torch.device("cpu")
SUPPORT = [ROOT, ROOT / "tests/support", ROOT / "tests/support/devices"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SUPPORT))}
# It would build while other tests run; tests/e2e/devices/test_gpu_decode.py has the others.
ELSEWHERE = ("build", "tokens", "decode")
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
    assert "pip download --dest wheels" in said
    assert "msgspec pytest-timeout, and --carried wheels" in said
    assert len(errors) == 2
    assert all(error.startswith("ModuleNotFoundError: ") and "msgspec" in error for error in errors)


def test_the_plan_takes_less_than_ten_minutes_and_what_is_learnt_first_comes_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu_suite.main(["--plan"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    names = [line.rsplit(maxsplit=3)[0] for line in lines]
    assert names[:7] == ["build", "machine", "compile", "exactness", "tokens", "memory", "attention"]
    assert float(lines[-1].split()[-2]) <= gpu_suite.WHOLE_S < 600


def part(code: str, limit_s: float, **more: Any) -> Any:
    """A part that runs the code, in its own process."""
    return gpu_suite.Part(lambda: eval(code), limit_s, "the code", **more)


FAULTS = {
    "well": part("{'figure': 1.5}", 60, gpu=False),
    "fails": part("1 / 0", 60, gpu=False),
    "dies": part("__import__('os')._exit(3)", 60, gpu=False),
    "hangs": part("__import__('time').sleep(600)", 4, gpu=False),
    "needs a GPU": part("{}", 60),
    "last": part("{'figure': 2.5}", 60, gpu=False),
}
OWN_PARTS = """
import sys
sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]
import test_gpu_suite, gpu_suite
gpu_suite.parts = lambda: test_gpu_suite.FAULTS
gpu_suite.__file__ = __file__
sys.exit(gpu_suite.main())
"""


@pytest.mark.long
def test_what_hangs_or_dies_is_a_line_of_the_report_and_the_others_run(tmp_path: Path) -> None:
    """A machine without a GPU, as this one, has none of the parts that need one."""
    script, out = tmp_path / "suite.py", tmp_path / "out"
    own = f"sys.argv[1:1] = {[str(Path(__file__).parent), str(ROOT / 'perf')]}"
    script.write_text(OWN_PARTS.replace("import sys\n", f"import sys\n{own}\n", 1))
    command = [sys.executable, str(script), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=ENVIRONMENT)
    assert done.returncode == 1, done.stderr
    found = {row.pop("part"): row for row in map(json.loads, (out / "results.jsonl").read_text().splitlines())}
    assert list(found) == list(FAULTS)
    assert (found["well"]["figure"], found["last"]["figure"]) == (1.5, 2.5)
    assert "ZeroDivisionError" in found["fails"]["error"]
    assert found["dies"]["error"] == "it ended with status 3"
    assert found["hangs"]["error"] == "it took more than 4 s"
    assert "no NVIDIA GPU" in found["needs a GPU"]["skipped"]
    report = (out / "report.md").read_text()
    assert [line for line in report.splitlines() if "To mend" in line] == [
        "## To mend: fails", "## To mend: dies", "## To mend: hangs",
    ]  # fmt: skip
    assert "3 of 6 parts without an error" in report


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in gpu_suite.parts() if name not in ELSEWHERE])
def test_each_part_has_no_fault_of_its_own(name: str, tmp_path: Path) -> None:
    """On the stand-ins, as --dry-run runs them one after another."""
    command = [sys.executable, str(ROOT / "perf/gpu_suite.py"), "--dry-run", "--parts", name, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (tmp_path / "log.txt").read_text()[-3000:]
    (found,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert found.pop("part") == name
    assert {"error", "skipped"}.isdisjoint(found)
    assert set(found) > {"seconds"}, "nothing was found"


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
