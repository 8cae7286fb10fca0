"""The verbs transport over Soft-RoCE, in a guest."""

from __future__ import annotations

import pytest
from guest import Guest

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1200)]
SUITES = {
    "contract": "tests/contract/test_transports.py",
    "lies": "tests/netstack/test_verbs_faults.py",
}


def test_the_guest_reports_status_and_output(guest: Guest) -> None:
    done = guest.run("echo out; echo err >&2; exit 7", timeout_s=30)
    assert (done.status, done.output) == (7, "out\nerr\n")
    assert "state ACTIVE" in guest.run("rdma link", timeout_s=30).output


@pytest.mark.parametrize("suite", SUITES)
def test_it_holds_over_verbs(guest: Guest, suite: str) -> None:
    done = guest.pytest(f"-m rdma --timeout 90 -rs {SUITES[suite]}", timeout_s=800)
    print(f"{done.output}\n{suite}: {done.seconds:.1f} s")
    assert done.status == 0
    assert "SKIPPED" not in done.output
