"""The verbs transport over Soft-RoCE, in a guest."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from guest import Guest
from image import ROOT, Image

pytestmark = [pytest.mark.vm, pytest.mark.timeout(3000)]
SUITES = {
    "contract": "tests/contract/test_transports.py",
    "lies": "tests/netstack/rdma/test_verbs_faults.py "
    "tests/netstack/bootstrap/test_listener.py tests/netstack/bootstrap/test_auto.py",
    "ports": "tests/netstack/rdma/test_rdma_ports.py tests/netstack/rdma/test_traffic_class.py",
    "deaths and stops": "tests/netstack/test_processes.py tests/netstack/test_stalls.py",
}
LONG = ("deaths and stops",)  # each death is that of a new process, whose imports are emulated
DECODE = f"{Path(__file__).with_name('decode.py')} {ROOT / 'examples/tiny_lm/model'}"


def test_the_guest_reports_status_and_output(guest: Guest) -> None:
    done = guest.run("echo out; echo err >&2; exit 7", timeout_s=30)
    assert (done.status, done.output) == (7, "out\nerr\n")
    assert "state ACTIVE" in guest.run("rdma link", timeout_s=30).output


def test_the_engine_was_built_and_loads(guest: Guest) -> None:
    """If not, install again where libibverbs-dev is."""
    done = guest.python(
        "-c 'from lamina.netstack.host.native_module import verbs_fault; print([verbs_fault()])'", timeout_s=60
    )
    assert (done.status, done.output) == (0, "['']\n")


@pytest.mark.parametrize("suite", [pytest.param(s, marks=pytest.mark.slow if s in LONG else ()) for s in SUITES])
def test_it_holds_over_verbs(guest: Guest, suite: str) -> None:
    done = guest.pytest(f"-m rdma --timeout 300 -rs {SUITES[suite]}", timeout_s=800)
    print(f"{done.output}\n{suite}: {done.seconds:.1f} s")
    assert done.status == 0
    assert "SKIPPED" not in done.output


@pytest.mark.slow
def test_rows_of_perftest(guest: Guest) -> None:
    """ib_write_lat and ib_write_bw between two processes of the guest, as pingpong.py has them."""
    flags = "--only ib_write --sizes 64,4096 --rounds 1 --count 50 --warm-up 5 --cores 0,0"
    done = guest.python(f"perf/pingpong.py {flags}", timeout_s=800)
    print(f"{done.output}\n{done.seconds:.1f} s")
    assert done.status == 0
    for name in ("ib_write_lat", "ib_write_bw"):
        (row,) = (line for line in done.output.splitlines() if line.startswith(f"{name} "))
        assert all(float(us) > 0.0 for us in row.split()[1:])
        assert len(row.split()) == 3


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_tokens_over_verbs_are_those_of_one_process(image: Image) -> None:
    """Two memory workers and a compute worker in the guest; one process on this machine."""
    command = [sys.executable, *DECODE.split(), "loopback"]
    here = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    with Guest(image, processors=2) as guest:
        there = guest.python(f"{DECODE} verbs", timeout_s=1700)
    print(f"{there.output}\ntokens: {there.seconds:.1f} s")
    assert there.status == 0
    wanted, found = (json.loads(text.splitlines()[-1]) for text in (here.stdout, there.output))
    assert found["tokens"] == wanted["tokens"]
    assert len({*chain(*wanted["tokens"])}) >= 10, "tokens that vary, so that equality says something"
    assert len({*found["processes"].values()}) == 3
    assert min(found["received"]) > 0
