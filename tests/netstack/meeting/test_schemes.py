"""What is known of a transport by its name alone, also on a host that cannot open it."""

from __future__ import annotations

import pytest

from lamina import netstack
from lamina.netstack import schemes

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
        assert netstack.in_process(scheme) == (name == "loopback")
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


@pytest.mark.usefixtures("closed")
def test_what_is_taken_beyond_a_host() -> None:
    assert schemes.beyond_host("shm") == "auto"
    assert schemes.beyond_host("emulate+shm?latency_ms=1") == "emulate+auto?latency_ms=1"
    assert schemes.beyond_host("tcp") == "tcp"
    for scheme in ("loopback", "emulate+loopback"):
        with pytest.raises(ValueError, match="stays in one process"):
            schemes.beyond_host(scheme)
