"""A lack of a host for mlx5 is one line with its fix, by doctor and before a server starts. Machines have stand-ins for
NIC, kernel and GPU, which lack one thing each.

Covers: netstack/rdma/mtu.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx5_stand_in
import pytest
from wiring import PATH, ROOT

NIC = f"sys/class/infiniband/{mlx5_stand_in.DEVICE}"
MODEL = str(ROOT / "examples" / "tiny_lm" / "model")


@dataclass(frozen=True)
class Lack:
    """``spoil``: the folder of the machine's files; ``words``: what both say, ``fix``: what to do. ``variables``: None
    where one is not set.
    """

    words: str
    fix: str
    variables: dict[str, str | None] = field(default_factory=dict)
    spoil: Callable[[Path], None] = lambda folder: None


def _no_device(folder: Path) -> None:
    for name in ("infiniband", "infiniband_verbs"):
        shutil.rmtree(folder / "sys" / "class" / name)


def _no_gid(folder: Path) -> None:
    (folder / NIC / "ports/1/gids/0").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    (folder / NIC / "ports/1/gid_attrs/types/0").unlink()


def _down(folder: Path) -> None:
    (folder / NIC / "ports/1/state").write_text("1: DOWN\n")


LACKS = {
    "no NIC": Lack("none in /sys/class/infiniband", "load the NIC's driver (mlx5_ib)", spoil=_no_device),
    "no link": Lack("mlx5_0:1 is DOWN", "ip link set DEVICE up", spoil=_down),
    "no RoCE": Lack("has no GID", "set an IP address on its network device, and switch RoCE on", spoil=_no_gid),
    "no such GID": Lack(
        "mlx5_0:1 has no GID 7", "choose from 0 (RoCE v2 fe80::1)", {"LAMINA_RDMA_DEVICE": "mlx5_0:1:7"}
    ),
    "no such level": Lack(
        "mlx5_0:1 is RoCE, whose packets carry 3 bits of priority", "LAMINA_RDMA_SERVICE_LEVEL is 0 to 7 there, not 8",
        {"LAMINA_RDMA_SERVICE_LEVEL": "8"},
    ),
    "another device": Lack("names 'mlx5_1', which is not here", "choose from mlx5_0", {"LAMINA_RDMA_DEVICE": "mlx5_1"}),
    "neither dma-buf nor peermem": Lack(
        "bytes with mlx5_0: Bad address", "`modprobe nvidia-peermem`",
        {"FAKE_CUDA_EXPORTS_NOTHING": "1", "FAKE_MLX5_KNOWS_NO_GPU": "1"},
    ),
    "a dma-buf that the kernel does not take": Lack(
        "its dma-buf: Operation not supported", "`modprobe nvidia-peermem`",
        {"FAKE_MLX5_TAKES_NO_EXPORT": "1", "FAKE_MLX5_KNOWS_NO_GPU": "1"},
    ),
    "locked memory": Lack(
        "completions on mlx5_0: Cannot allocate memory", "is `ulimit -l` (locked memory) too low?",
        {"FAKE_MLX5_LOCKS_NOTHING": "1"},
    ),
    "a GPU that orders nothing": Lack(
        "its kernels may see a NIC's writes in another order", "take --transport verbs",
        {"FAKE_CUDA_ORDERS_NOTHING": "1"},
    ),
}  # fmt: skip
OF_NICS = ["no NIC", "no link", "no RoCE", "no such GID", "no such level", "another device", "locked memory"]
WITHOUT = {
    "no doorbell": ({"FAKE_CUDA_RINGS_NOTHING": "1"}, ["so a thread of this host does", "PeerMappingOverride=1"]),
    "no commands to firmware": ({"FAKE_MLX5_HAS_FIRMWARE": None}, ["rings of queue pairs lie in the host's memory"]),
    "nvidia-peermem alone": ({"FAKE_CUDA_EXPORTS_NOTHING": "1"}, ["its driver exports none to NICs (dma-buf)"]),
    "large packets": (
        {"FAKE_MLX5_PACKETS": "3"},
        ["packets of mlx5_0:1 carry 1024 bytes, not 4096: `ip link set DEVICE mtu 4192` on both hosts and on switches"],
    ),
}  # fmt: skip
NAMED = Lack("names 'mlx5_1', which is not here", "choose from mlx5_0", {"LAMINA_RDMA_DEVICE": "mlx5_0"})


def launch(
    arguments: Sequence[str], lack: Lack | None, folder: Path, scheme: str = "mlx5"
) -> subprocess.CompletedProcess[str]:
    places = mlx5_stand_in.environment(folder) | {"PYTHONPATH": PATH, "LAMINA_RDMA_DEVICE": None}
    if lack:
        places |= lack.variables
        lack.spoil(folder)
    environment = {name: value for name, value in places.items() if value is not None}
    command = [sys.executable, "-m", "lamina.cli.launch", *arguments, "--transport", scheme]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def opens(output: str) -> str:
    """Checks doctor's message about it, whose lines are wrapped."""
    return " ".join(output[output.index(" opens ") :].split())


def test_on_a_whole_machine_it_opens(tmp_path: Path) -> None:
    done = launch(["doctor"], None, tmp_path)
    assert opens(done.stdout) == "opens mlx5: yes", done.stdout + done.stderr


@pytest.mark.parametrize("name", WITHOUT)
def test_where_it_does_without_something_doctor_says_so(name: str, tmp_path: Path) -> None:
    """It works, at a price."""
    changes, words = WITHOUT[name]
    done = launch(["doctor"], Lack("", "", changes), tmp_path)
    assert done.returncode == 0
    said = opens(done.stdout)
    assert said.startswith("opens mlx5: yes; ")
    assert [said.count(word) for word in words] == [1] * len(words), said
    assert done.stdout.startswith("you can use: mlx5\n")


@pytest.mark.long
def test_auto_says_so_of_its_ways(tmp_path: Path) -> None:
    small = Lack("", "", {"FAKE_MLX5_PACKETS": "3", "LAMINA_RDMA_DEVICE": "mlx5_0"})
    done = launch(["doctor"], small, tmp_path, "auto")
    assert "auto: yes; verbs: packets of mlx5_0:1 carry 1024 bytes" in " ".join(done.stdout.split()), done.stdout


@pytest.mark.long(but=["large packets"])
@pytest.mark.parametrize("name", WITHOUT)
def test_a_server_says_so_before_it_starts(name: str, tmp_path: Path) -> None:
    """Before it looks for its model, which is not there: that spares seconds."""
    changes, words = WITHOUT[name]
    done = launch(["serve", str(tmp_path / "model"), "--dry-run"], Lack("", "", changes), tmp_path)
    said, refused, *more = done.stderr.splitlines()
    assert not more, done.stderr
    assert [said.count(word) for word in words] == [1] * len(words), said
    assert "model" in refused


@pytest.mark.long
@pytest.mark.timeout(320)
def test_a_server_starts_all_the_same(tmp_path: Path) -> None:
    done = launch(["serve", MODEL, "--dry-run"], Lack("", "", WITHOUT["large packets"][0]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout.startswith("would start ")


@pytest.mark.long(but=["no NIC", "no link", "no such GID", "no such level"])
@pytest.mark.parametrize("name", LACKS)
def test_doctor_says_in_one_line_what_is_missing(name: str, tmp_path: Path) -> None:
    lack = LACKS[name]
    done = launch(["doctor"], lack, tmp_path)
    assert done.returncode == 1
    said = opens(done.stdout)
    assert lack.words in said
    assert lack.fix in said
    assert done.stdout.startswith("you can use: none of these\n")


@pytest.mark.long
@pytest.mark.parametrize("command", [["doctor"], ["serve", MODEL, "--dry-run"]], ids=["doctor", "serve"])
@pytest.mark.parametrize("name", OF_NICS)
def test_verbs_says_the_same_of_its_nic(name: str, command: list[str], tmp_path: Path) -> None:
    lack = LACKS[name]
    done = launch(command, lack, tmp_path, "verbs")
    assert done.returncode != 0
    said = done.stderr or opens(done.stdout)
    assert lack.words in said
    assert lack.fix in said


@pytest.mark.parametrize("command", [["doctor"], ["serve", MODEL, "--dry-run"]])
def test_the_flag_names_the_device_of_all_hosts(command: list[str], tmp_path: Path) -> None:
    """Before that of this host, which is there."""
    done = launch([*command, "--rdma-device", "mlx5_1"], NAMED, tmp_path)
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    assert f"--rdma-device or LAMINA_RDMA_DEVICE {NAMED.words}" in said
    assert NAMED.fix in said


@pytest.mark.long
@pytest.mark.parametrize("name", LACKS)
def test_a_server_says_the_same_before_it_starts(name: str, tmp_path: Path) -> None:
    lack = LACKS[name]
    done = launch(["serve", MODEL, "--dry-run"], lack, tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert lack.words in done.stderr
    assert lack.fix in done.stderr
