"""The RDMA port next to a GPU: a host of two sockets, as /sys would show it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lamina.netstack.doctor import Machine, gpu_ports
from lamina.netstack.rdma.nearest_port import cores_of, gpus, nearest_first
from lamina.netstack.rdma.rdma_ports import Port

SWITCH = "pci0000:00/0000:00:01.0/0000:01:00.0"  # two GPUs and two NICs below it
FAR = "pci0000:80/0000:80:01.0"
PLACES = {
    "0000:02:00.0": (SWITCH, 0),
    "0000:03:00.0": (SWITCH, 0),
    "0000:81:00.0": (FAR, 1),
    "0000:c1:00.0": ("pci0000:c0", 1),
}
NICS = {
    "mlx5_0": (f"{FAR}/0000:82:00.0", 1),
    "mlx5_1": (f"{SWITCH}/0000:04:00.0", 0),
    "mlx5_2": (f"{SWITCH}/0000:05:00.0", 0),
    "rxe0": ("virtual/net/eth0", -1),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for address, (parent, node) in PLACES.items():
        place = tmp_path / "sys/devices" / parent / address
        place.mkdir(parents=True)
        (place / "class").write_text("0x030200\n")
        (place / "vendor").write_text("0x10de\n")
        (place / "numa_node").write_text(f"{node}\n")
        link(tmp_path / "sys/bus/pci/devices" / address, place)
    for name, (where, node) in NICS.items():
        place = tmp_path / "sys/devices" / where
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        (port / "gids").mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (port / "link_layer").write_text("Ethernet\n")
        (port / "gids/0").write_text("fe80::1\n")
        link(tmp_path / "sys/class/infiniband" / name / "device", place)
    link(tmp_path / "sys/bus/pci/devices/0000:82:00.0", tmp_path / "sys/devices" / NICS["mlx5_0"][0])
    return tmp_path


def link(name: Path, target: Path) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    name.symlink_to(os.path.relpath(target, name.parent))


def here(*names: str) -> list[Port]:
    return [Port(name, 1, "ACTIVE", "Ethernet", gids={0: ("fe80::1", "")}) for name in names or NICS]


def order(root: Path, gpu: str, *names: str) -> list[str]:
    return [port.device for port in nearest_first(here(*names), gpu, root)]


def test_gpus_of_a_switch_take_turns_among_its_nics(root: Path) -> None:
    assert gpus(root) == sorted(PLACES)
    assert order(root, "0000:02:00.0") == ["mlx5_1", "mlx5_2", "mlx5_0", "rxe0"]
    assert order(root, "0000:03:00.0") == ["mlx5_2", "mlx5_1", "mlx5_0", "rxe0"]


def test_where_a_nic_of_the_switch_is_down_both_take_the_other(root: Path) -> None:
    up = ("mlx5_0", "mlx5_1", "rxe0")
    assert order(root, "0000:02:00.0", *up)[0] == order(root, "0000:03:00.0", *up)[0] == "mlx5_1"


def test_one_root_is_nearer_than_one_socket_and_that_than_the_other(root: Path) -> None:
    assert order(root, "0000:81:00.0")[0] == "mlx5_0"
    assert order(root, "0000:c1:00.0")[0] == "mlx5_0"  # another root of the same socket
    assert order(root, "0000:02:00.0", "mlx5_0", "rxe0")[0] == "mlx5_0"  # as far as rxe0: in their order


def test_a_nic_whose_node_is_no_number_is_of_no_socket(root: Path) -> None:
    (root / "sys/devices" / NICS["mlx5_0"][0] / "numa_node").write_text("N/A\n")
    assert order(root, "0000:c1:00.0", "mlx5_0", "mlx5_1") == ["mlx5_0", "mlx5_1"]  # both as far: in their order


def test_an_address_that_is_not_there_changes_no_order(root: Path) -> None:
    assert order(root, "0000:99:00.0") == [*NICS]


def test_without_a_gpu_the_socket_of_the_cores_counts(root: Path) -> None:
    for core in os.sched_getaffinity(0):
        (root / f"sys/devices/system/cpu/cpu{core}/node0").mkdir(parents=True)
    assert order(root, "") == ["mlx5_1", "mlx5_2", "rxe0", "mlx5_0"]


def test_doctor_names_the_port_of_each_gpu(root: Path) -> None:
    ok, detail, fix = gpu_ports(Machine(root, wanted=""))
    assert (ok, detail) == (
        None, "0000:02:00.0: mlx5_1:1, 0000:03:00.0: mlx5_2:1, 0000:81:00.0: mlx5_0:1, 0000:c1:00.0: mlx5_0:1",
    )  # fmt: skip
    assert "LAMINA_RDMA_DEVICE" in fix
    assert "mlx5_0:1, 0000:03:00.0: mlx5_0:1" in gpu_ports(Machine(root, wanted="mlx5_0"))[1]
    assert gpu_ports(Machine(root, wanted="mlx5_9"))[0] is False
    assert gpu_ports(Machine(root, wanted="a:b:c:d"))[0] is False


@pytest.mark.parametrize("text", ["", "no cores", "7000-7001"])
def test_the_cores_next_to_a_nic_are_those_of_this_process(text: str, root: Path) -> None:
    own = sorted(os.sched_getaffinity(0))
    near = root / "sys/devices" / NICS["mlx5_0"][0] / "local_cpulist"
    near.write_text(f"{text}\n")
    assert cores_of("mlx5_0", root) == []
    near.write_text(f"{own[0]},7000-7001,{own[-1]}-{own[-1] + 5}\n")
    assert cores_of("mlx5_0", root) == sorted({own[0], own[-1]})
    assert cores_of("mlx5_9", root) == []
