"""The facts that a transport's name alone gives, also on a host that cannot open it.

Covers: netstack/contract/base.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

from lamina import netstack
from lamina.netstack import schemes
from lamina.netstack.contract.base import RDMA_DEVICE, rdma_device
from lamina.netstack.host.loopback_host import LoopbackFabric
from lamina.netstack.rdma import verbs

ROOT = Path(__file__).resolve().parents[3]
NAMES = [name for name in schemes.SCHEMES if name not in schemes.WRAPPERS]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that lacks what every transport needs, such as the head of a cluster without an RDMA NIC."""

    def refuse(name: str) -> None:
        raise ImportError(f"{name} is not to be opened here")

    monkeypatch.setattr(schemes, "import_module", refuse)


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("name", NAMES)
def test_whether_peers_are_threads_is_known_without_opening_it(name: str) -> None:
    for scheme in (name, f"emulate+{name}", f"emulate+{name}?latency_ms=1"):
        assert netstack.in_process(scheme) == (name in schemes.THREADS)
    with pytest.raises(ImportError, match="not to be opened"):
        netstack.open(name, key=bytes(32))


@pytest.mark.parametrize("name", NAMES)
def test_a_transport_that_opens_says_the_same(name: str) -> None:
    try:
        fabric = netstack.open(name, key=bytes(32))
    except (ImportError, OSError, ValueError) as e:
        pytest.skip(f"{name}: {e}")
    assert fabric.in_process == netstack.in_process(name)


@pytest.mark.usefixtures("closed")
def test_a_name_that_is_none_is_refused_with_those_there_are() -> None:
    for scheme in ("carrier-pigeon", "shm+tcp", "emulate+carrier-pigeon"):
        with pytest.raises(ValueError, match=r"unknown transport .*choose one of loopback, .*verbs"):
            netstack.in_process(scheme)


def test_an_rdma_device_is_for_those_who_take_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device reaches them, through a wrapper too; each transport that takes one is in the table, and no other."""
    told = list[str]()

    def open_rdma(key: bytes, *, device: str = "") -> LoopbackFabric:
        told.append(device)
        return LoopbackFabric(key)

    taken = set()
    for name, place in schemes.SCHEMES.items():
        try:
            parameters = signature(import_module(f"lamina.netstack.{place}").open_fabric).parameters
        except ImportError:
            continue
        if "device" in parameters:
            taken.add(name)
    assert taken - set(schemes.WRAPPERS) == set(schemes.BY_RDMA)
    monkeypatch.setattr(verbs, "open_fabric", open_rdma)
    for scheme in ("verbs", "emulate+verbs?latency_ms=1"):
        netstack.open(scheme, key=bytes(32), device="mlx5_1:2:3").close()
        netstack.open(scheme, key=bytes(32)).close()
    assert told == ["mlx5_1:2:3", ""] * 2
    for name in set(NAMES) - set(schemes.BY_RDMA):
        with pytest.raises(ValueError, match=f"--rdma-device mlx5_1 is for .*: leave it out with --transport {name}$"):
            netstack.open(name, key=bytes(32), device="mlx5_1")
    with pytest.raises(ValueError, match="mlx5_0:1:3, not 'mlx5_1:x'"):
        netstack.open("auto", key=bytes(32), device="mlx5_1:x")


def test_the_device_of_all_hosts_goes_before_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RDMA_DEVICE, raising=False)
    assert rdma_device() == ""
    assert rdma_device("mlx5_1") == "mlx5_1"
    monkeypatch.setenv(RDMA_DEVICE, "mlx5_0")
    assert rdma_device() == "mlx5_0"
    assert rdma_device("mlx5_1") == "mlx5_1"


@pytest.mark.parametrize("text", ["pigeon", "=loft", "pigeon=", "pigeon=loft/bird", "pigeon=loft,=", "pigeon=.loft"])
def test_transports_of_the_environment_are_names_of_modules(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(schemes.PLUGINS, text)
    with pytest.raises(ValueError, match="LAMINA_TRANSPORTS must have NAME=MODULE, several separated by commas, not '"):
        netstack.open("pigeon", key=bytes(32))


def test_a_transport_of_the_environment_that_is_nowhere_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(schemes.PLUGINS, "pigeon=loft.bird")
    with pytest.raises(ImportError, match=r"names loft.bird, and there is no loft: put its folder into PYTHONPATH"):
        netstack.open("pigeon", key=bytes(32))


OPEN = """
from lamina import netstack
try:
    print(netstack.open("pigeon", key=bytes(32)))
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("package", [True, False])
def test_no_transport_comes_from_the_current_directory(tmp_path: Path, *, package: bool) -> None:
    """The same folder is trusted where PYTHONPATH names it and it is not the current directory."""
    file = tmp_path / "loft" / ("bird/__init__.py" if package else "bird.py")
    file.parent.mkdir(parents=True)
    file.write_text("print('executed')\ndef open_fabric(key): return 'flies'\n")
    refused = "LAMINA_TRANSPORTS names bird, which lies in the current directory: start in another one"
    for folder, path, printed in (
        (tmp_path / "loft", str(ROOT), [refused]),
        (tmp_path, os.pathsep.join([str(ROOT), str(tmp_path / "loft")]), ["executed", "flies"]),
    ):
        environment = os.environ | {"PYTHONPATH": path, schemes.PLUGINS: "pigeon=bird"}
        for program in (["-c", OPEN], ["-m", "loft_main"]):
            (folder / "loft_main.py").write_text(OPEN)
            done = subprocess.run(
                [sys.executable, *program], cwd=folder, env=environment, capture_output=True, text=True, timeout=60,
                check=True,
            )  # fmt: skip
            assert done.stdout.splitlines() == printed


@pytest.mark.usefixtures("closed")
def test_what_is_taken_beyond_a_host() -> None:
    assert schemes.beyond_host("shm") == "auto"
    assert schemes.beyond_host("emulate+shm?latency_ms=1") == "emulate+auto?latency_ms=1"
    assert schemes.beyond_host("tcp") == "tcp"
    for scheme in ("loopback", "emulate+loopback"):
        with pytest.raises(ValueError, match="stays in one process"):
            schemes.beyond_host(scheme)
