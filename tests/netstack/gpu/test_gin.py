"""The transport gin without NCCL, a NIC or a GPU: over stand-ins; and its kernels and structs beside NCCL's headers.

The contract runs over it in tests/contract/test_transports.py, as "gin on a CPU"."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import cuda_stand_in
import pytest
from programs import CSRC, build, run
from wiring import KEY, ROOT, SOON_S, connect, send

from lamina import netstack
from lamina.netstack.contract.fabric import DEATH_NOTICED_S
from lamina.netstack.gin import gin, nccl

SMALL = netstack.Geometry(slots=3, slot_bytes=257)
HERE = Path(__file__).resolve().parent


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """The stand-in, of which a test leaves nothing behind."""
    with cuda_stand_in.scheme_of(cuda_stand_in.GIN_STAND_IN):
        library = ctypes.CDLL(os.environ["LAMINA_LIBNCCL"])
        before = library.fake_cuda_live(), library.fake_nccl_live()
        yield library
        deadline = time.monotonic() + SOON_S  # what was begun in vain is given back by a thread
        while (after := (library.fake_cuda_live(), library.fake_nccl_live())) != before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert after == before


@pytest.fixture
def fabric(library: ctypes.CDLL) -> Iterator[netstack.Fabric]:
    with closing(netstack.open("gin", key=KEY)) as fabric:
        yield fabric


def headers() -> list[Path]:
    """NCCL's own, and CUDA's. Skips where they are not."""
    folders = [*nccl.header_folders(), Path("/usr/local/cuda/include"), Path("/usr/local/cuda/include/cccl")]
    if not any((folder / "nccl_device.h").is_file() for folder in folders):
        pytest.skip("no NCCL headers: pip install nvidia-nccl-cu13")
    return folders


def test_two_processes_move_bytes(library: ctypes.CDLL) -> None:
    """By the command with which two hosts would, calls and kernels: every payload is compared."""
    line = [sys.executable, "-m", "lamina.netstack", "bench", "--transport", "gin", "--pattern", "rtt", "--json"]
    flags = ["--sizes", "8,4KiB", "--count", "20", "--warm-up", "2"]
    for more in ([], ["--device", "cuda"]):
        done = subprocess.run(
            [*line, *flags, *more], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        rows = [json.loads(row) for row in done.stdout.splitlines()]
        drivers = ["device", "kernel"] if more else ["python"]
        assert [(row["driver"], row["size"]) for row in rows] == [(d, s) for d in drivers for s in (8, 4096)]
        assert all(row["verified"] for row in rows)


@pytest.mark.parametrize("weakened", [False, True])
def test_messages_are_in_order_where_the_network_is_not(weakened: bool, tmp_path: Path) -> None:
    """A weak signal, which follows its own put alone, counts a message that came before another one."""
    headers = CSRC
    if weakened:
        headers = tmp_path / "csrc"
        shutil.copytree(CSRC / "netstack", headers / "netstack")
        header = headers / "netstack" / "gin_channel.h"
        text = header.read_text()
        header.write_text(text.replace("ncclGin_StrongVASignalAdd", "ncclGin_WeakVASignalAdd"))
        assert header.read_text() != text
    flags = ["-O1", "-Wno-unknown-pragmas", "-Wno-unused-function", f"-I{HERE}", f"-I{cuda_stand_in.HEADERS}"]
    program = build(tmp_path, HERE / "gin_order.cpp", *flags, headers=headers)
    if not weakened:
        assert run(program, "200") == "messages 200\n"
        return
    done = subprocess.run([str(program), "200"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "out of its order" in done.stdout or "a byte came wrong" in done.stdout


def test_what_nccl_reports_ends_the_channel_on_both_sides(library: ctypes.CDLL, fabric: netstack.Fabric) -> None:
    a, b = connect(fabric, geometry=SMALL)
    library.fake_nccl_fail(6)
    start = time.monotonic()
    try:
        with pytest.raises(netstack.PeerFault, match="NCCL reports: remote process exited") as fault:
            a.wait_signal(timeout_s=SOON_S)
        assert "\n" not in str(fault.value)
    finally:
        library.fake_nccl_fail(0)
    with pytest.raises(netstack.PeerFault, match="the peer aborted: NCCL reports"):
        b.wait_signal(timeout_s=SOON_S)
    assert time.monotonic() - start < 10 * DEATH_NOTICED_S


def test_a_close_waits_for_what_was_put_and_for_a_dead_network_not_long(
    library: ctypes.CDLL, fabric: netstack.Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = connect(fabric, geometry=SMALL)
    send(a, b"last words")
    a.close()
    assert b.wait_signal(timeout_s=SOON_S).data == b"last words"
    library.fake_nccl_stop(True)
    try:
        a, b = connect(fabric, geometry=SMALL)
        send(a, b"nobody carries this")
        monkeypatch.setattr("lamina.netstack.cuda.kernel_channel.STALL_NS", 10**4)
        a.close()
        with pytest.raises(netstack.PeerFault, match="the peer closed the channel"):
            b.wait_signal(timeout_s=SOON_S)
    finally:
        library.fake_nccl_stop(False)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FAKE_NCCL_VERSION", "22903", "NCCL is 22903, whose device API is too old: 23200 is the least"),
        ("LAMINA_LIBNCCL", "/nowhere/lib/libnccl.so.2", r"libnccl.so.2 does not load"),
        ("LAMINA_NVCC", "/bin/false", r"kernels.cu does not compile for sm_90: "),
        ("LAMINA_LIBCUDA", "/nowhere/libcuda.so.1", r"libcuda.so.1 does not load"),
        ("LAMINA_RDMA_TRAFFIC_CLASS", "many", r"LAMINA_RDMA_TRAFFIC_CLASS is a number"),
    ],
)
def test_what_is_missing_is_one_line_with_the_fix(
    variable: str, value: str, words: str, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ImportError, match=words) as refusal:
        netstack.open("gin", key=KEY)
    fix = "pip install nvidia-nccl-cu13 and a CUDA toolkit with nvcc, or take --transport mlx5 or verbs"
    assert str(refusal.value).endswith(fix)
    assert "\n" not in str(refusal.value)


def test_a_peer_whose_nccl_finds_no_nic_is_told_why(fabric: netstack.Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_HAS_NO_GIN", "1")
    with pytest.raises(netstack.HandshakeError, match=r"NCCL finds no NIC that kernels can use.*NCCL_DEBUG=INFO"):
        connect(fabric, geometry=SMALL)


def test_a_peer_that_comes_to_no_communicator_is_given_up(
    fabric: netstack.Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NCCL_MEETS_NOBODY", "1")
    monkeypatch.setattr(gin, "MAKE_S", 0.2)
    with pytest.raises(netstack.HandshakeError, match=r"ncclCommInitRankConfig: the peer did not come to it in time"):
        connect(fabric, geometry=SMALL)


def test_a_peer_of_another_nccl_is_refused_by_name(fabric: netstack.Fabric) -> None:
    """Each of the two would take a struct of the other's version for its own."""
    listener = fabric.listen()
    with closing(netstack.open("gin", key=KEY)) as other, ThreadPoolExecutor(1) as pool:
        assert isinstance(other, gin.GinFabric)
        assert isinstance(other._way, gin.GinWay)
        other._way._nccl.version = 23301
        accepted = pool.submit(listener.accept, timeout_s=3.0)
        with pytest.raises(netstack.HandshakeError):
            other.connect(listener.url, netstack.Terms(outbound=SMALL, inbound=SMALL), timeout_s=SOON_S)
        with pytest.raises(netstack.ChannelTimeout, match="its NCCL is 23301, ours is 23203: install one on both"):
            accepted.result(SOON_S)


def test_structs_and_functions_are_those_of_the_headers(tmp_path: Path) -> None:
    """Field by field, of the version that is installed."""
    structs: dict[str, type[ctypes.Structure]] = {
        "ncclConfig_t": nccl.Config, "ncclDevCommRequirements_t": nccl.Requirements,
        "ncclCommProperties_t": nccl.Properties,
    }  # fmt: skip
    lines = [
        line
        for name, struct in structs.items()
        for line in (f"STRUCT({name});", *(f"FIELD({name}, {field[0]});" for field in struct._fields_))
    ]
    (tmp_path / "fields.h").write_text("\n".join(lines))
    includes = [f"-I{folder}" for folder in headers()]
    program = build(tmp_path, HERE / "nccl_check.cpp", *includes, f'-DFIELDS="{tmp_path}/fields.h"', headers=tmp_path)
    there = [
        line
        for name, struct in structs.items()
        for line in (
            f"{name} {ctypes.sizeof(struct)}",
            *(f"{f[0]} {getattr(struct, f[0]).offset} {getattr(struct, f[0]).size}" for f in struct._fields_),
        )
    ]
    assert run(program).splitlines() == there


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_compile_with_the_headers(architecture: int) -> None:
    """By the very call of the product, and without a word of warning."""
    headers()
    try:
        image = nccl.build(architecture)
    except ImportError as error:
        pytest.skip(str(error))
    assert image[:4] == b"\x7fELF"
    for name in ("send", "send_two", "receive", "receive_due", "reserve", "put", "take", "release", "rounds", "flush"):
        assert f"lamina_gin_{name}".encode() in image
