"""The engine of verbs on libibverbs, without a device: the contract and its faults over fake_verbs.cpp."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import build, run
from wiring import PATH, ROOT

from lamina.netstack.host.native_module import verbs_fault

HERE = Path(__file__).resolve().parent
CHECKS = [str(HERE / name) for name in ("verbs_native_checks.py", "verbs_rights_checks.py")]
INNER = [*CHECKS, "tests/contract/test_transports.py"]
LIBRARY = ["-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1"]
RACES, BOUNDS = ["-fsanitize=thread"], ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(autouse=True)
def _built() -> None:
    if "infiniband/verbs.h" in verbs_fault():
        pytest.skip(f"no native verbs: {verbs_fault()}")


def fake(tmp_path: Path, *flags: str) -> Path:
    return build(tmp_path, HERE / "fake_verbs.cpp", *LIBRARY, *flags)


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize("sanitizer", [RACES, BOUNDS], ids=["races", "bounds"])
def test_two_engines_of_four_threads(tmp_path: Path, sanitizer: list[str]) -> None:
    """Full rings both ways, then one leaves while the other waits."""
    program = build(tmp_path, HERE / "verbs_threads.cpp", *sanitizer, "-Wno-tsan")
    said = run(program, str(fake(tmp_path, *sanitizer)), "3000")
    assert said == "messages 3000; the peer closed the channel\n"


@pytest.mark.no_retry
def test_credit_that_two_threads_owe_is_told_once(tmp_path: Path) -> None:
    """Else a peer that stands still may be sent more than it has posted receives for, which ends the connection."""
    assert run(build(tmp_path, HERE / "verbs_credit.cpp"), str(fake(tmp_path))) == "acted 1, told 1\n"


@pytest.mark.long
def test_the_contract_and_faults_hold_without_python_on_the_way(tmp_path: Path) -> None:
    """In a process of its own, whose libibverbs is the fake."""
    command = [sys.executable, "-m", "pytest", "-p", "verbs_without_nic", "-p", "no:cacheprovider"]
    flags = ["-m", "rdma or not rdma", "-k", "verbs", *INNER]
    environment = os.environ | {"FAKE_VERBS": str(fake(tmp_path)), "PYTHONPATH": os.pathsep.join([str(HERE), PATH])}
    done = subprocess.run(
        [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 75
    assert "skipped" not in done.stdout
