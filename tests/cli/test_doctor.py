"""lamina-launch doctor: every check tells a good machine from a bad one."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lamina import netstack
from lamina.cli.doctor import lines
from lamina.cli.launch import main
from lamina.netstack import SCHEMES
from lamina.netstack.doctor import CHECKS, Finding, Machine, Verdict, findings

VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.00\nGCC version: none"


@pytest.fixture
def checks() -> dict[str, Callable[[Machine], Verdict]]:
    return {name: check for name, _, check in CHECKS}


def machine(root: Path, kernel: str = "6.1.0-9-amd64", uid: int = 1000, **files: str) -> Machine:
    """A machine with these files; ``__`` in a name stands for ``/``."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root, kernel, uid)


GID = "sys__class__infiniband__mlx5_0__ports__1__gids__3"
PORT = "sys__class__infiniband__mlx5_0__ports__1__state"
NDEV, MTU = "sys__class__infiniband__mlx5_0__ports__1__gid_attrs__ndevs__3", "sys__class__net__eth2__mtu"
VENDOR = "sys__class__infiniband__mlx5_0__device__vendor"
DRIVER = "proc__driver__nvidia__version"
GPU = "sys__bus__pci__devices__0000:15:00.0__"
A_GPU = {GPU + "vendor": "0x10de", GPU + "class": "0x030200"}
GROUPS = GPU + "iommu_group__type", "sys__class__infiniband__mlx5_0__device__iommu_group__type"


@pytest.mark.parametrize(
    ("check", "files", "ok"),
    [
        ("RDMA device", {}, False),
        ("RDMA device", {PORT: "4: ACTIVE", GID: "fe80::1"}, True),
        ("RDMA device", {PORT: "4: ACTIVE"}, False),
        ("RDMA device", {PORT: "1: DOWN"}, False),
        ("ConnectX", {PORT: "4: ACTIVE", VENDOR: "0x8086"}, False),
        ("ConnectX", {PORT: "4: ACTIVE", VENDOR: "0x15b3"}, None),
        ("IOMMU", {}, False),
        ("IOMMU", A_GPU | {VENDOR: "0x15b3"}, True),
        ("IOMMU", A_GPU | {VENDOR: "0x15b3"} | dict.fromkeys(GROUPS, "identity"), True),
        ("IOMMU", A_GPU | {VENDOR: "0x15b3", GROUPS[0]: "DMA-FQ", GROUPS[1]: "identity"}, None),
        ("IOMMU", A_GPU | {VENDOR: "0x15b3", GROUPS[0]: "identity", GROUPS[1]: "DMA"}, None),
        ("IOMMU", {VENDOR: "0x8086", GROUPS[1]: "DMA"}, False),
        ("PCIe bridges", {}, False),
        ("PCIe bridges", A_GPU, True),
        ("verbs device nodes", {}, False),
        ("verbs device nodes", {"dev__infiniband__uverbs0": ""}, True),
        ("CUDA", {}, False),
        ("GPU memory registration", {DRIVER: VERSION}, True),
        ("GPU memory registration", {DRIVER: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.00"}, False),
        ("GPU memory registration", {"proc__modules": "nvidia_peermem 16384 0 - Live"}, True),
        ("GPU memory registration", {"proc__modules": "nvidia 16384 0 - Live"}, False),
        ("doorbell page", {}, False),
        ("doorbell page", {DRIVER: VERSION}, None),
        ("doorbell page", {DRIVER: VERSION, "proc__driver__nvidia__params": 'X: "PeerMappingOverride=1;"'}, True),
        ("packet size", {}, False),
        ("packet size", {PORT: "4: ACTIVE", GID: "fe80::1"}, None),
        ("packet size", {PORT: "4: ACTIVE", GID: "fe80::1", NDEV: "eth2", MTU: "1500"}, None),
        ("packet size", {PORT: "4: ACTIVE", GID: "fe80::1", NDEV: "eth2", MTU: "4191"}, None),
        ("packet size", {PORT: "4: ACTIVE", GID: "fe80::1", NDEV: "eth2", MTU: "4192"}, True),
        ("ordered delivery", {}, False),
        ("ordered delivery", {PORT: "4: ACTIVE"}, None),
    ],
)
def test_checks(
    check: str, files: dict[str, str], ok: bool | None, tmp_path: Path, checks: dict[str, Callable[[Machine], Verdict]]
) -> None:
    found, detail, fix = checks[check](machine(tmp_path, **files))
    assert found is ok
    assert detail
    assert fix or ok, "what is not in order comes with a fix"


def test_packets_are_as_large_as_frames_let_them_be(
    tmp_path: Path, checks: dict[str, Callable[[Machine], Verdict]]
) -> None:
    """Ports that differ agree on the smaller one; a doctor sees one host, and says what this end takes."""
    here = machine(tmp_path, **{PORT: "4: ACTIVE", GID: "fe80::1", NDEV: "eth2", MTU: "1500"})
    assert checks["packet size"](here) == (
        None,
        "mlx5_0:1 by eth2 (MTU 1500): 1024 B",
        "both ends take the smaller one; `ip link set DEVICE mtu 4192` on both, and on switches",
    )


def test_an_iommu_that_translates_is_named_by_device(
    tmp_path: Path, checks: dict[str, Callable[[Machine], Verdict]]
) -> None:
    here = machine(tmp_path, **A_GPU, **{VENDOR: "0x15b3", GROUPS[0]: "DMA-FQ", GROUPS[1]: "DMA"})
    _, detail, fix = checks["IOMMU"](here)
    assert detail == "translates addresses of 0000:15:00.0 (DMA-FQ), mlx5_0 (DMA)"
    assert "iommu=pt" in fix


def bridged(root: Path, config: bytes) -> Machine:
    """A machine whose GPU and ConnectX lie below one bridge of PCIe, with that space of configuration."""
    here, bus = machine(root, **A_GPU, **{VENDOR: "0x15b3"}), root / "sys/devices/pci0000:00/0000:00:01.0"
    bus.mkdir(parents=True)
    (bus / "class").write_text("0x060400\n")
    (bus / "config").write_bytes(config)
    for link in (root / "sys/bus/pci/devices/0000:15:00.0", root / "sys/class/infiniband/mlx5_0/device"):
        place = link.rename(bus / f"0000:15:00.{len(list(bus.iterdir()))}")
        link.symlink_to(place)
    return here


def space(*capabilities: tuple[int, bytes]) -> bytes:
    """Makes a space of configuration, with extended capabilities in 64 bytes each."""
    parts = list[bytes]()
    for n, (number, rest) in enumerate(capabilities, 1):
        following = 0x100 + 64 * n if n < len(capabilities) else 0
        parts.append(((following << 20 | 1 << 16 | number).to_bytes(4, "little") + rest).ljust(64, b"\0"))
    return bytes(0x100) + b"".join(parts) + bytes(0x1000 - 0x100 - 64 * len(parts))


@pytest.mark.parametrize(
    ("config", "ok", "words"),
    [
        (
            space((1, b""), (0xD, b"\x1f\0\x1d\0")),
            None,
            "0000:00:01.0 send what GPU and NIC tell each other by the CPU",
        ),
        (space((1, b""), (0xD, b"\x1f\0\x01\0")), True, "1 above GPUs and NICs, none"),
        (space((0xD, b"\x1f\0\x08\0"), (1, b"")), None, "send what GPU and NIC tell each other by the CPU (ACS)"),
        (space((1, b"\x1f\0\x1d\0")), True, "none"),
        ((0x100 << 20 | 1).to_bytes(4, "little") * 0x400, True, "none"),  # a loop
        (bytes(64), None, "root alone"),
    ],
)
def test_bridges_that_redirect_are_named(
    config: bytes, ok: bool | None, words: str, tmp_path: Path, checks: dict[str, Callable[[Machine], Verdict]]
) -> None:
    verdict = checks["PCIe bridges"](bridged(tmp_path, config))
    assert verdict[0] is ok
    assert words in verdict[1]
    assert bool(verdict[2]) == (ok is not True)


def test_verbs_needs_neither_a_gpu_nor_order() -> None:
    """Messages are host memory, and each is one write with its completion."""
    asked = {name for name, transports, _ in CHECKS if "verbs" in transports}
    assert not asked & {
        "CUDA",
        "NVRTC",
        "IOMMU",
        "PCIe bridges",
        "GPU memory registration",
        "doorbell page",
        "ordered delivery",
    }
    assert asked >= {"RDMA device", "verbs device nodes", "locked memory", "packet size"}


def test_an_old_kernel_has_no_dma_buf(tmp_path: Path, checks: dict[str, Callable[[Machine], Verdict]]) -> None:
    check = checks["GPU memory registration"]
    assert check(machine(tmp_path, "5.12.0", **{DRIVER: VERSION}))[0] is True
    assert check(machine(tmp_path, "5.4.0-200-generic", **{DRIVER: VERSION}))[0] is False


def test_root_may_map_the_doorbell_page(tmp_path: Path, checks: dict[str, Callable[[Machine], Verdict]]) -> None:
    assert checks["doorbell page"](machine(tmp_path, uid=0, **{DRIVER: VERSION}))[0] is None


def test_every_transport_between_processes_is_checked_and_says_whether_it_opens() -> None:
    found = findings(Machine(), [*SCHEMES])
    assert {f.transports[0]: f.ok for f in found if f.check == "opens"}.keys() == {*SCHEMES}
    assert {s for f in found if f.check != "opens" for s in f.transports} >= {"shm", "tcp", "verbs", "mlx5"}
    assert all(f.fix or f.ok for f in found if f.check != "opens")


def test_transports_that_tests_add_are_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert {s for f in findings(Machine()) for s in f.transports} == {*SCHEMES}
    for command in (["doctor"], ["doctor", "--transport", "nic-model"], ["serve", "--help"]):
        with suppress(SystemExit):  # by which --help ends
            main(command)
        text = "".join(capsys.readouterr())
        assert "shm" in text
        assert "nic-model" not in text.replace("--transport 'nic-model' is unknown", "")
    assert netstack.in_process("nic-model") is False, "it is known here"


def test_transports_of_this_machine_open(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--transport", "loopback", "--transport", "tcp", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [f["transports"] for f in printed if f["check"] == "opens"] == [["loopback"], ["tcp"]]
    assert {s for f in printed for s in f["transports"]} == {"loopback", "tcp"}


def test_a_transport_that_does_not_open_is_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINA_LIBCUDA", "/nowhere/libcuda.so.1")
    assert main(["doctor", "--transport", "cuda"]) == 1
    out = capsys.readouterr().out
    assert "missing  opens" in out
    assert "/nowhere/libcuda.so.1" in "".join(out.split())
    assert out.startswith("you can use: none of these\n")
    assert main(["doctor"]) == 0
    usable = [f.transports[0] for f in findings(Machine()) if f.check == "opens" and f.ok]
    assert "cuda" not in usable
    assert "loopback" in usable
    assert capsys.readouterr().out.startswith(f"you can use: {', '.join(usable)}\n")


def test_findings_read_well_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    _, *table = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 100
    for row in table:
        words, check, last = row[:9], row[9:38], row[38:]
        assert words.strip() in ("", "ok", "missing", "unknown")
        assert bool(words.strip()) == bool(check.strip())
        assert check.endswith(" ")
        assert last
        assert last[0] != " "
    said = lines(Finding("opens", ("tcp",), False, "seen " * 30, "do " * 30 + "it"))
    assert max(map(len, said.splitlines())) <= 100
    assert said.startswith("missing  opens                        tcp: ")
    assert f"\n{'fix: do':>45}" in said


def test_cuda_where_it_cannot_be_names_the_flag_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(index: int) -> None:
        raise ImportError("libcuda.so.1 does not load")

    monkeypatch.setattr("lamina.netstack.cuda.cuda.Driver", no_driver)
    with pytest.raises(ImportError, match=r"libcuda.so.1 does not load; use another --transport .*doctor"):
        netstack.open("cuda", key=b"k" * 32)


def test_an_unknown_transport_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--transport", "pigeon"]) == 2
    err = capsys.readouterr().err
    assert "pigeon" in err
    assert err.count("\n") == 1


def test_dry_run_names_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CHECKS)
