"""The transport mlx5 without a card and without a GPU: the distribution's libmlx5 over a stand-in of its kernel, our
kernels on a CPU, software NICs. In a process of its own, whose device is there from its start.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx5_stand_in
import pytest
from test_namespaces import Cable, cable, pull_out  # noqa: F401 - a fixture
from wiring import PATH, ROOT

HERE = Path(__file__).resolve().parent
CHECKS = [str(HERE / "mlx5_checks.py"), str(HERE / "mlx5_meeting_checks.py")]
CONTRACT = [*CHECKS, "tests/contract/test_transports.py"]
TOKENS = ["tests/e2e/devices/test_direct_tokens.py"]


def passed(tests: list[str], expression: str, folder: Path, *, firmware: bool = True) -> int:
    """Returns the number of tests that pass on such a machine; none fails, and none is skipped.

    ``firmware``: it takes commands.
    """
    command = [sys.executable, "-m", "pytest", "-p", "mlx5_without_nic", "-p", "no:cacheprovider", "-m", "not slow"]
    paths = os.pathsep.join(
        [
            str(HERE),
            str(HERE.with_name("rdma")),
            str(ROOT / "tests" / "support"),
            str(ROOT / "tests" / "support" / "netstack"),
            PATH,
        ]
    )
    environment = mlx5_stand_in.environment(folder) | {"PYTHONPATH": paths}
    if not firmware:
        del environment["FAKE_MLX5_HAS_FIRMWARE"]
    done = subprocess.run(
        [*command, "-k", expression, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    count = re.search(r"(\d+) passed", done.stdout)
    assert count
    assert "skipped" not in done.stdout
    return int(count[1])


@pytest.mark.long
@pytest.mark.timeout(320)
def test_the_contract_and_faults_hold_over_libmlx5(tmp_path: Path) -> None:
    assert passed(CONTRACT, "mlx5", tmp_path) > 90


@pytest.mark.long
@pytest.mark.timeout(320)
def test_the_faults_hold_on_rings_of_libmlx5_in_the_host_s_memory(tmp_path: Path) -> None:
    assert passed(CHECKS[:1], "mlx5", tmp_path, firmware=False) > 25


@pytest.mark.slow
def test_a_host_that_vanishes_is_noticed_by_a_peer_that_only_waits(cable: Cable, tmp_path: Path) -> None:  # noqa: F811
    """None of its work requests is under way, so its NIC has nothing to report."""
    pull_out(cable, "mlx5", mlx5_stand_in.environment(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_tokens_over_libmlx5_are_those_of_hosts_and_of_transformers(tmp_path: Path) -> None:
    """Lamina itself, whose workers are processes that send by kernels."""
    assert passed(TOKENS, "beside_nics and (plain or transformers)", tmp_path) == 2


@pytest.mark.long(but=["calls-gpu"])
@pytest.mark.parametrize("rings", ["gpu", "host"])
@pytest.mark.parametrize("more", [(), ("--device", "cuda")], ids=["calls", "kernels"])
def test_two_processes_move_bytes_over_libmlx5(more: tuple[str, ...], rings: str, tmp_path: Path) -> None:
    """The command is that of two hosts: every payload is compared."""
    command = [sys.executable, "-m", "lamina.netstack", "bench", "--transport", "mlx5", "--pattern", "rtt", "--json"]
    flags = ["--sizes", "8,4KiB", "--count", "20", "--warm-up", "2", *more]
    environment = mlx5_stand_in.environment(tmp_path) | {"PYTHONPATH": PATH}
    if rings == "host":
        environment["FAKE_CUDA_RINGS_NOTHING"] = "1"
    done = subprocess.run(
        [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    drivers = ["device", "kernel"] if more else ["python"]
    assert [(row["driver"], row["size"]) for row in rows] == [
        (driver, size) for driver in drivers for size in (8, 4096)
    ]
    assert all(row["verified"] for row in rows)
    for side in (side for row in rows for side in (row["client"], *row["server"])):
        assert ("a thread of this host does" in " ".join(side.get("without", []))) == (rings == "host")
