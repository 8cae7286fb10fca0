"""The cuda transport over a stand-in of the driver: what goes through kernels, graphs, other processes' memory.

The kernels are those of the product, compiled for this CPU; the contract suite and test_processes run over it too."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import cuda_stand_in
import pytest
from wiring import HERE, KEY, ROOT, SOON_S, connect, send

from lamina import netstack
from lamina.netstack import Channel, Geometry, cuda_driver
from lamina.netstack.cuda import CREDIT_AT, SLOTS_AT, CudaChannel, inbox_bytes, receive_card, stride
from lamina.netstack.cuda_driver import SIGNATURES, AllocationProperties, CudaError, Driver, Pinned, Shared, Stream
from lamina.netstack.handshake import drive

SMALL = Geometry(slots=3, slot_bytes=200)
LONG_NS = 5_000_000_000
CUDA_H = Path("/usr/local/cuda/include/cuda.h")


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[ctypes.CDLL]:
    with cuda_stand_in.scheme_of(cuda_stand_in.STAND_IN):
        library = ctypes.CDLL(os.environ["LAMINA_LIBCUDA"])
        before = library.fake_cuda_live()
        yield library
        gc.collect()
        assert library.fake_cuda_live() == before, "something of the driver's was not given back"


def ends(epoch: int = 0) -> tuple[netstack.Fabric, CudaChannel, CudaChannel]:
    fabric = netstack.open("cuda", key=KEY)
    a, b = connect(fabric, geometry=SMALL, epoch=epoch)
    assert isinstance(a, CudaChannel)
    assert isinstance(b, CudaChannel)
    return fabric, a, b


@pytest.mark.skipif(not CUDA_H.exists(), reason=f"no {CUDA_H}: install the CUDA toolkit")
def test_the_stand_in_has_the_functions_of_cuda_h(tmp_path: Path) -> None:
    flags = ["-std=c++17", "-DWITH_CUDA_H", f"-I{CUDA_H.parent}", f"-I{ROOT / 'csrc'}", "-fsyntax-only"]
    done = subprocess.run(
        ["g++", *flags, str(HERE / "fake_cuda.cpp")], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    declared = CUDA_H.read_text()
    for name in SIGNATURES:
        assert f"{name.removesuffix('_v2').removesuffix('WithFlags')}(" in declared, name
    layout = tmp_path / "layout.cpp"
    layout.write_text(
        "#include <cuda.h>\n#include <cstddef>\n"
        "static_assert(sizeof(CUmemAllocationProp) == SIZE && offsetof(CUmemAllocationProp, location) == 8);\n"
        "static_assert(sizeof(CUmemAccessDesc) == 12 && offsetof(CUmemAccessDesc, flags) == 8);\n"
        "static_assert(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED == 102);\n"
        "static_assert(CU_STREAM_NON_BLOCKING == 1);\n"
        "static_assert(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED == 103);\n"
        "static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == 75 && CU_MEM_ALLOCATION_TYPE_PINNED == 1);\n"
        "static_assert(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR == 1 && CU_MEM_LOCATION_TYPE_DEVICE == 1);\n"
        "static_assert(CU_MEM_ACCESS_FLAGS_PROT_READWRITE == 3 && CU_STREAM_CAPTURE_MODE_RELAXED == 2);\n"
        "static_assert(CU_MEMHOSTREGISTER_PORTABLE == 1 && CU_MEMHOSTREGISTER_DEVICEMAP == 2);\n"
    )
    size = f"-DSIZE={ctypes.sizeof(AllocationProperties)}"
    subprocess.run(
        ["g++", "-std=c++17", size, f"-I{CUDA_H.parent}", "-fsyntax-only", str(layout)], check=True, timeout=60
    )


def test_the_layout_of_an_inbox_is_that_of_the_headers() -> None:
    native = pytest.importorskip("lamina.netstack._mlx5", reason="the native module _mlx5 is not built")
    for slots, slot_bytes in ((1, 1), (3, 63), (3, 64), (3, 65), (1024, 4096)):
        assert inbox_bytes(Geometry(slots=slots, slot_bytes=slot_bytes)) == native.inbox_bytes(slots, slot_bytes)


def test_one_graph_is_replayed_over_many_laps() -> None:
    """What changes from one replay to the next is in device memory: seqno, slot, length, tag."""
    fabric, a, b = ends(epoch=65535)
    driver = a.device.driver
    memory = [Pinned(driver, 4096) for _ in range(2)]
    streams = [Stream(driver) for _ in range(2)]
    out, into = (m.address for m in memory)
    graphs = []
    for view, stream, base in ((a.device, streams[0], out), (b.device, streams[1], into)):
        with stream.capture() as graph:  # bytes, tag, status, payload
            if base == out:
                view.send(stream, base + 256, base, base + 8, LONG_NS, base + 40)
            else:
                view.receive(stream, base + 256, SMALL.slot_bytes, base, base + 8, LONG_NS, base + 40)
        graphs.append(graph)
    sent, got = (m.view for m in memory)
    for n in range(1000):
        length = n * 13 % (SMALL.slot_bytes + 1)
        sent[:16] = length.to_bytes(8, "little") + n.to_bytes(8, "little")
        sent[256 : 256 + length] = bytes([n % 251]) * length
        for graph, stream in zip(graphs, streams, strict=True):
            graph.replay(stream)
        for stream in streams:
            stream.synchronize()
        assert int.from_bytes(sent[40:44], "little") == int.from_bytes(got[40:44], "little") == 0
        assert got[:16] == sent[:16]
        assert got[256 : 256 + length] == bytes([n % 251]) * length
    for part in (*graphs, *streams, *memory):
        part.close()
    fabric.close()


@pytest.mark.parametrize(
    ("at", "value", "call"),
    [
        (0, 7, "wait_signal"), (0, 1 << 60, "wait_signal"), (SLOTS_AT, 2, "wait_signal"),
        (SLOTS_AT + 8, 201, "wait_signal"), (CREDIT_AT, 1, "reserve"), (CREDIT_AT, 1 << 63, "reserve"),
    ],
)  # fmt: skip
def test_what_no_honest_peer_writes_ends_the_channel(at: int, value: int, call: str) -> None:
    fabric, a, b = ends()
    victim = b if call == "wait_signal" else a
    if at >= SLOTS_AT:
        send(a, b"x")
    if call == "reserve":
        for _ in range(SMALL.slots):
            a.reserve(1)  # of nothing that was put
    inbox = int.from_bytes(victim.device.driver.read(victim.device.channel + 8, 8), "little")
    victim.device.driver.write(inbox + at, value.to_bytes(8, "little"))
    with pytest.raises(netstack.PeerFault, match="protocol"):
        victim.wait_signal(timeout_s=SOON_S) if call == "wait_signal" else victim.reserve(1, timeout_s=SOON_S)
    with pytest.raises(netstack.PeerFault):
        victim.reserve(1)
    fabric.close()


def test_a_channel_that_is_dropped_gives_its_memory_back(stand_in: ctypes.CDLL) -> None:
    fabric, a, b = ends()
    held = stand_in.fake_cuda_live()
    del a, b
    gc.collect()
    assert stand_in.fake_cuda_live() < held
    fabric.close()


def test_memory_outlives_its_maker() -> None:
    """Unlike IPC handles: the reader of a peer that is gone reads what was there."""
    driver = Driver()
    mine = Shared(driver, 100)
    driver.write(mine.address, b"still here")
    fd = mine.export()
    theirs = Shared(driver, 100, fd)
    os.close(fd)
    mine.close()
    assert driver.read(theirs.address, 10) == b"still here"
    theirs.close()
    small = Shared(driver, 1)
    fd = small.export()
    with pytest.raises(CudaError, match="cuMemMap"):
        Shared(driver, 2 * small.size, fd)
    os.close(fd)
    small.close()
    driver.close()


@pytest.mark.parametrize("spoil", ["size", "magic", "no descriptor", "not device memory"])
def test_a_card_that_is_not_what_the_terms_say_is_refused(spoil: str, tmp_path: Path) -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    card = b"CUDX" if spoil == "magic" else b"CUDA"
    card += (99 if spoil == "size" else 100).to_bytes(8, "big")
    with here, there, (tmp_path / "file").open("w+b") as file:
        socket.send_fds(there, [card], [] if spoil == "no descriptor" else [file.fileno()])
        if spoil != "not device memory":
            with pytest.raises(OSError):
                drive(here, receive_card(here, 100), "peer", deadline=monotonic() + SOON_S)
            return
        fd = drive(here, receive_card(here, 100), "peer", deadline=monotonic() + SOON_S)
        driver = Driver()
        with pytest.raises(CudaError, match="cuMemImport"):
            Shared(driver, 100, fd)
        driver.close()
        os.close(fd)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_CUDA_SHARES_NOTHING", "1")
        with pytest.raises(ImportError, match="cannot be shared"):
            netstack.open("cuda", key=KEY)
    with monkeypatch.context() as patch:
        patch.setenv("LAMINA_CUDA_DEVICE", "7")
        with pytest.raises(ImportError, match="no GPU that can be used: cuDeviceGet"):
            netstack.open("cuda", key=KEY)
    monkeypatch.setenv("LAMINA_LIBCUDA", "/nowhere/libcuda.so.1")
    with pytest.raises(ImportError, match="'cuda'.*/nowhere/libcuda.so.1 does not load"):
        netstack.open("cuda", key=KEY)


def test_what_is_too_old_or_too_new_for_the_driver_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of an import, so that other transports can be taken; nothing is held."""
    with monkeypatch.context() as patch:
        patch.setenv("LAMINA_LIBNVRTC", "libm.so.6")
        with pytest.raises(ImportError, match="libm.so.6 does not load .*undefined symbol: nvrtc"):
            netstack.open("cuda", key=KEY)
    monkeypatch.setattr(cuda_driver, "compiled", lambda *_: b"of a later version")
    with pytest.raises(ImportError, match="'cuda'.*cuModuleLoadData.*fits the driver"):
        netstack.open("cuda", key=KEY)


def test_a_driver_that_fails_ends_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, a, b = ends()
    send(a, b"before")

    def fails(*_: object) -> None:
        raise CudaError("cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED (719)")

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "launch", fails)
        with pytest.raises(netstack.PeerFault, match="719"):
            b.wait_signal(timeout_s=SOON_S)
    with pytest.raises(netstack.PeerFault, match="719"):
        b.reserve(1)
    fabric.close()


@pytest.mark.parametrize("races", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_of_several_threads_are_free_of_races(races: bool, tmp_path: Path) -> None:
    """And a store in place of a release is a race that the sanitizer sees."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    shutil.copytree(ROOT / "csrc" / "netstack", tmp_path / "netstack")
    if races:
        header = tmp_path / "netstack" / "memory_channel.h"
        header.write_text(header.read_text().replace("bus.release(", "bus.put("))
    program = tmp_path / "threads"
    command = ["g++", "-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread", "-Wno-tsan", f"-I{tmp_path}"]
    built = subprocess.run(
        [*command, str(HERE / "kernel_threads.cpp"), "-o", str(program)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    if "cannot find -l" in built.stderr:
        pytest.skip("needs the thread sanitizer's runtime")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), "300"], capture_output=True, text=True, timeout=100, check=False)
    assert ("data race" in done.stderr) is races, done.stderr
    assert races or done.stdout == "messages 300 status 0\n"


def test_views_of_a_closed_channel_are_still_memory() -> None:
    fabric, a, b = ends()
    slot = a.reserve(5)
    slot.data[:] = b"hello"
    a.put_signal(slot, b"")
    arrival = b.wait_signal(timeout_s=SOON_S)
    ended: list[Channel] = [a, b]
    for channel in ended:
        channel.close()
    assert bytes(arrival.data) == b"hello"
    assert stride(SMALL) == 320
    fabric.close()
