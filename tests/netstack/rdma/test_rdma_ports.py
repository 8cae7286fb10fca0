"""RDMA ports as /sys lists them, and LAMINA_RDMA_DEVICE: whatever cannot serve is one line with its fix.

Covers: netstack/rdma/device.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lamina.netstack.doctor import Machine, rdma_device
from lamina.netstack.rdma.native_backend import LibibverbsProvider, native_gids
from lamina.netstack.rdma.rdma_ports import Port, Wanted, gid_names, partition_index, ports, why_no_port

NONE = "0000:0000:0000:0000:0000:0000:0000:0000"
LOCAL, MAPPED = "fe80:0000:0000:0000:5054:00ff:fe12:3456", "0000:0000:0000:0000:0000:ffff:0a09:0001"


def device(
    root: Path, name: str, *, state: str = "4: ACTIVE", link: str = "Ethernet", node: str = "1: CA",
    gids: tuple[str, ...] = (LOCAL, NONE, NONE, MAPPED),
) -> None:  # fmt: skip
    folder = root / "sys/class/infiniband" / name
    files = {"node_type": node, "ports/1/state": state, "ports/1/link_layer": link}
    for index, gid in enumerate(gids):
        files[f"ports/1/gids/{index}"] = gid
        if gid != NONE:  # the kernel refuses to read the kind of an empty one
            files[f"ports/1/gid_attrs/types/{index}"] = "RoCE v2"
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text + "\n")


def test_a_port_is_read_with_the_gids_that_are_set(tmp_path: Path) -> None:
    device(tmp_path, "rxe0")
    (port,) = ports(tmp_path)
    assert (port.device, port.number, port.state, port.link) == ("rxe0", 1, "ACTIVE", "Ethernet")
    assert port.gids == {0: ("fe80::5054:ff:fe12:3456", "RoCE v2"), 3: ("::ffff:a09:1", "RoCE v2")}
    ok, detail, fix = rdma_device(Machine(tmp_path, wanted=""))
    assert (ok, fix) == (True, "")
    assert detail.startswith("rxe0:1 ACTIVE, Ethernet, GIDs 0 (RoCE v2 fe80::5054:ff:fe12:3456), 3 (RoCE v2 ")


def test_no_folder_is_no_port(tmp_path: Path) -> None:
    assert ports(tmp_path) == []
    assert "rdma_rxe" in rdma_device(Machine(tmp_path, wanted="rxe0"))[2]


def test_only_the_first_of_many_gids_are_named() -> None:
    assert gid_names({n: (f"fe80::{n}", "") for n in range(256)}).endswith(", 7 (fe80::7) and 248 more")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", Wanted()),
        ("rxe0", Wanted("rxe0")),
        ("mlx5_0:2", Wanted("mlx5_0", 2)),
        ("mlx5_0:1:0", Wanted("mlx5_0", 1, 0)),
        ("mlx5_0::3", Wanted("mlx5_0", None, 3)),
        (":1", Wanted("", 1)),
    ],
)
def test_names_are_taken_apart(text: str, wanted: Wanted) -> None:
    assert Wanted.parse(text) == wanted


@pytest.mark.parametrize("text", ["a:b", "a:0", "a:1:-1", "a:1:2:3", "a:\u00b2", "a: 1"])
def test_a_malformed_name_is_told_with_the_form(text: str, tmp_path: Path) -> None:
    device(tmp_path, "a")
    with pytest.raises(ValueError, match=r"LAMINA_RDMA_DEVICE is NAME, NAME:PORT or NAME:PORT:GID_INDEX.*not '"):
        Wanted.parse(text)
    ok, detail, fix = rdma_device(Machine(tmp_path, wanted=text))
    assert ok is False
    assert "NAME:PORT" in detail
    assert fix


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("mlx5_9", "names 'mlx5_9', which is not here; choose from down, iwarp, nogid, rxe0"),
        ("rxe0:2", "names port 2, which is not here; choose from rxe0:1 ACTIVE"),
        ("rxe0:1:1", "rxe0:1 has no GID 1; choose from 0 \\(RoCE v2 fe80::5054:ff:fe12:3456\\), 3 "),
        ("down", "down:1 is DOWN; connect it"),
        ("iwarp", "iwarp:1 speaks iWARP.*; name another device"),
        ("nogid", "nogid:1 has no GID; set an IP address"),
    ],
)
def test_what_cannot_serve_is_named_with_its_fix(wanted: str, words: str, tmp_path: Path) -> None:
    device(tmp_path, "rxe0")
    device(tmp_path, "down", state="1: DOWN")
    device(tmp_path, "iwarp", node="4: RNIC")
    device(tmp_path, "nogid", gids=(NONE, NONE))
    said = why_no_port(ports(tmp_path), wanted)
    assert "\n" not in said
    assert re.search(words, said), said
    ok, detail, fix = rdma_device(Machine(tmp_path, wanted=wanted))
    assert ok is False
    assert f"{detail}; {fix}" == said


def test_any_port_that_serves_is_enough(tmp_path: Path) -> None:
    device(tmp_path, "a_down", state="1: DOWN")
    device(tmp_path, "rxe0")
    assert why_no_port(ports(tmp_path), "") == ""
    assert why_no_port(ports(tmp_path), ":1:3") == ""


def test_a_partition_is_found_by_its_members(tmp_path: Path) -> None:
    port = Port("mlx5_0", 1, "ACTIVE", "InfiniBand")
    folder = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/pkeys"
    folder.mkdir(parents=True)
    for index, key in enumerate(["0xffff", "0x0001", "0x8001", "0x0000"]):
        (folder / str(index)).write_text(f"{key}\n")
    assert [partition_index(port, key, tmp_path) for key in (None, 0x7FFF, 0x8001, 1)] == [0, 0, 2, 2]
    with pytest.raises(ValueError, match=r"mlx5_0:1 is in no partition 0x8002 .*; it is in 0x0001, 0x8001, 0xffff"):
        partition_index(port, 0x8002, tmp_path)


@pytest.mark.rdma
def test_the_kernels_list_is_that_of_libibverbs() -> None:
    """The list is compared for each device here, GID by GID."""
    pytest.importorskip("pyverbs.device")
    from pyverbs.device import Context

    found = ports()
    if not found:
        pytest.skip("no RDMA device")
    for port in found:
        with Context(name=port.device) as context:
            table = [g for g in context.query_gid_table(2000) if g.port_num == port.number]
            assert {g.gid_index for g in table} == port.gids.keys()
            assert why_no_port(found, f"{port.device}:{port.number}:{table[0].gid_index}") == ""
            assert f"has no GID {1999}" in why_no_port(found, f"{port.device}:{port.number}:1999")


@pytest.mark.rdma
def test_the_engine_lists_the_kernels_gids() -> None:
    if not (there := ports()):
        pytest.skip("no RDMA device")
    assert ports(gids=native_gids) == there


@pytest.mark.rdma
def test_a_gid_that_is_not_there_is_refused_by_name() -> None:
    pytest.importorskip("pyverbs.device")
    from lamina.netstack.rdma.device import RdmaDevice

    active = [p for p in ports() if p.is_active]
    if not active:
        pytest.skip("no RDMA device")
    with pytest.raises(ImportError, match=r"1 has no GID 1999; choose from 0"):
        RdmaDevice(f"{active[0].device}:1:1999")
    with pytest.raises(ImportError, match="not 'x:y'"):
        RdmaDevice("x:y")
    with pytest.raises(ImportError, match=r"1 has no GID 1999; choose from 0"):
        LibibverbsProvider(f"{active[0].device}:1:1999", spin_s=0.0)
