"""Two hosts in miniature: two network namespaces with an Ethernet cable (veth) between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
from wiring import HERE, KEY, PATH, ROOT, SOON_S

from lamina.netstack.contract.fabric import HOST_NOTICED_S

BENCH = [sys.executable, "-m", "lamina.netstack", "bench"]
ENVIRONMENT = os.environ | {"LAMINA_CLUSTER_KEY": KEY.hex()}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=SOON_S)


@dataclass
class Cable:
    here: str  # a namespace
    there: str
    address: str  # of `here`

    def run_in(self, namespace: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", namespace, *command]


@pytest.fixture
def cable() -> Iterator[Cable]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip (iproute2)")
    number = os.getpid() % 250 + 1
    cable = Cable(f"lamina-{os.getpid()}a", f"lamina-{os.getpid()}b", f"10.213.{number}.1")
    try:
        try:
            ip("netns", "add", cable.here)
            ip("netns", "add", cable.there)
            ip("link", "add", "eth0", "netns", cable.here, "type", "veth", "peer", "eth0", "netns", cable.there)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces or veth here: {error.stderr.decode().strip()}")
        for name, address in ((cable.here, cable.address), (cable.there, f"10.213.{number}.2")):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield cable
    finally:
        for name in (cable.here, cable.there):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=SOON_S)


@pytest.mark.long(but=["tcp"])
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_messages_cross_the_cable_and_are_verified(cable: Cable, transport: str) -> None:
    listen = [*BENCH, "--transport", transport, "--listen", f"{cable.address}:0", "--cores", "none"]
    with subprocess.Popen(
        cable.run_in(cable.here, *listen), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            assert url.startswith(f"{transport}://{cable.address}:")
            flags = ["--transport", transport, "--connect", url, "--pattern", "put_lat,pair,rate", "--json"]
            flags += ["--sizes", "8,5000,1MiB", "--count", "30", "--rate", "500"]
            done = subprocess.run(
                cable.run_in(cable.there, *BENCH, *flags),
                cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            rows = [json.loads(line) for line in done.stdout.splitlines()]
            assert len(rows) == 9
            assert all(row["verified"] and row["p50_us"] > 0 for row in rows)
            if transport == "auto":
                assert "tcp, for the listener is not within reach of memory" in done.stderr
            assert server.wait(SOON_S) == 0
        finally:
            server.kill()


def test_beyond_loopback_frames_are_encrypted(cable: Cable) -> None:
    """Seen from outside: a peer with the key that wants to go without a code is refused."""
    code = (
        "import sys, lamina.netstack.host.tcp as tcp; from lamina.netstack import Geometry, Terms; "
        "tcp._is_loopback = lambda host: True; fabric = tcp.TcpFabric(bytes.fromhex(sys.argv[2])); "
        "g = Geometry(slots=1, slot_bytes=64); fabric.connect(sys.argv[1], Terms(outbound=g, inbound=g), timeout_s=5)"
    )
    listen = [*BENCH, "--listen", f"{cable.address}:0", "--cores", "none", "--idle", "3"]
    with subprocess.Popen(
        cable.run_in(cable.here, *listen),
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            assert server.stderr is not None
            url = server.stdout.readline().split()[-1]
            done = subprocess.run(
                cable.run_in(cable.there, sys.executable, "-c", code, url, KEY.hex()),
                cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            assert "HandshakeError" in done.stderr
            assert server.wait(SOON_S) == 1
            assert "not encrypted" in server.stderr.read()
        finally:
            server.kill()


@pytest.mark.slow
def test_a_host_that_vanishes_is_noticed_by_a_peer_that_only_waits(cable: Cable) -> None:
    pull_out(cable, "tcp", os.environ)


def pull_out(cable: Cable, scheme: str, machine: Mapping[str, str]) -> None:
    """Nothing is sent and nothing is closed: both ends find that the other's host has vanished. ``machine``: the
    environment of both.
    """

    def end(namespace: str, role: str, url: str) -> subprocess.Popen[str]:
        command = cable.run_in(namespace, sys.executable, str(HERE / "peer.py"), role)
        environment = {**machine, "PEER_URL": url, "PEER_KEY": KEY.hex(), "PYTHONPATH": PATH}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    with end(cable.here, "listen", f"{scheme}://{cable.address}:0") as listener:
        assert listener.stdout is not None
        with end(cable.there, "wait", listener.stdout.readline().strip()) as connector:
            try:
                assert listener.stdout.readline() == "accepted\n"
                ip("-n", cable.here, "link", "set", "eth0", "down")
                for process in (connector, listener):
                    assert process.stdout is not None
                    error, seconds = process.stdout.readline().split()
                    assert error == "PeerFault"
                    assert float(seconds) < HOST_NOTICED_S
            finally:
                connector.kill()
                listener.kill()
