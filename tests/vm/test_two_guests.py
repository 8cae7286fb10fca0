"""Two hosts: two guests with a wire between them that loses packets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from guest import Guest, python
from image import ROOT, Image

from lamina.netstack.contract.fabric import DEATH_NOTICED_S, HOST_NOTICED_S

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(3000)]
KEY = "6b" * 32
HERE, THERE = "10.9.0.1", "10.9.0.2"
COUNTERS = "/sys/class/infiniband/rxe0/ports/1/hw_counters"
START_S = 90.0  # for a program to come: its imports are emulated


@contextmanager
def two_guests(image: Image, loss_percent: float = 0.0) -> Iterator[tuple[Guest, Guest]]:
    """HERE and THERE; each loses what it sends."""
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        Guest(image, rdma_ip=HERE, wire=ours, loss_percent=loss_percent) as here,
        Guest(image, rdma_ip=THERE, wire=theirs, loss_percent=loss_percent) as there,
    ):
        yield here, there


def lost_and_resent(guest: Guest) -> tuple[int, int]:
    """Packets that the wire lost on the way from ``guest``, and how often its device began to send again."""
    (wire,) = json.loads(guest.run("tc -s -j qdisc show dev eth0", timeout_s=30).output)
    return wire["drops"], int(guest.run(f"cat {COUNTERS}/completer_retry_err", timeout_s=30).output)


def bench(flags: str) -> str:
    return python(f"-m lamina.netstack bench --transport verbs --cores none {flags}", f"LAMINA_CLUSTER_KEY={KEY}")


# At 3 % Soft-RoCE breaks the connection in the first few rounds if it may retry 6 times (rdma.RETRIES).
@pytest.mark.parametrize(
    ("loss_percent", "flags", "rows"),
    [
        (1.0, "--pattern rtt,pair --sizes 8,4KiB,64KiB,256KiB,1MiB,64/8/128x32", 12),
        (1.0, "--pattern both --window 4 --sizes 256KiB", 1),
        (3.0, "--pattern pair --sizes 256KiB", 1),
    ],
    ids=["1 %", "1 % both ways", "3 %"],
)
def test_every_message_crosses_a_wire_that_loses_packets(
    image: Image, loss_percent: float, flags: str, rows: int
) -> None:
    """Both sides compare every payload and every tag."""
    with two_guests(image, loss_percent) as (here, there):
        here.start(bench(f"--listen {HERE}:0"))
        here.hear("listening at ", timeout_s=START_S)
        url = here.line(timeout_s=START_S).strip()
        client = there.run(bench(f"--connect {url} {flags} --count 20 --warm-up 0 --json"), timeout_s=300)
        print(f"{client.output}\n{loss_percent:g} %: {client.seconds:.1f} s")
        assert client.status == 0
        assert here.finish(timeout_s=30).status == 0
        measured = [json.loads(line) for line in client.output.splitlines()]
        assert [row["verified"] for row in measured] == [True] * rows
        for guest in (here, there):
            lost, resent = lost_and_resent(guest)
            print(f"lost {lost}, sent again {resent} times")
            assert min(lost, resent) > 10


def test_a_host_that_vanishes_is_noticed_by_a_peer_that_only_waits(image: Image) -> None:
    """Soft-RoCE tries for ever: the channel's own time ends the wait."""
    peer, key = ROOT / "tests/support/netstack/peer.py", f"PEER_KEY={KEY}"
    with two_guests(image) as (here, there):
        here.start(python(f"{peer} listen", f"PEER_URL=verbs://{HERE}:0 {key}"))
        here.hear("verbs://", timeout_s=START_S)
        address = here.line(timeout_s=START_S).strip()
        there.start(python(f"{peer} wait", f"PEER_URL=verbs://{address} {key}"))
        here.hear("accepted", timeout_s=START_S)
        here.stop()
        there.hear("PeerFault ", timeout_s=START_S)
        seconds = float(there.line(timeout_s=START_S))
        print(f"noticed within {seconds:.1f} s")
        assert DEATH_NOTICED_S < seconds < HOST_NOTICED_S  # neither by its life line nor never
