"""The cuda transport over a stand-in of the driver: what goes through kernels, graphs, other processes' memory.

The kernels are those of the product, compiled for this CPU; the contract suite and test_processes run over it too.

Covers: netstack/bootstrap/lifeline.py, netstack/cuda/channel_memory.py, netstack/cuda/driver.py,
netstack/cuda/kernel_launches.py.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import cuda_stand_in
import pytest
from wiring import KEY, ROOT, SOON_S, connect, send

from lamina import netstack
from lamina.netstack import Channel, DeviceChannel, Geometry
from lamina.netstack.bootstrap.handshake import drive
from lamina.netstack.cuda import driver as cuda_driver
from lamina.netstack.cuda.channel_memory import clear_inbox, inbox_bytes, stride
from lamina.netstack.cuda.cuda import (
    CudaChannel,
    receive_descriptor,
)
from lamina.netstack.cuda.driver import SIGNATURES, AllocationProperties, CudaError, CudaStream, Driver, Pinned, Shared
from lamina.netstack.cuda.kernel_launches import COPY_BLOCKS, LONG_BYTES
from lamina.netstack.host.native_module import ABORTED, CREDIT_AT, FAULT, OK, SLOTS_AT, TIMEOUT

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


@pytest.mark.long
@pytest.mark.skipif(not CUDA_H.exists(), reason=f"no {CUDA_H}: install the CUDA toolkit")
def test_the_stand_in_has_the_functions_of_cuda_h(tmp_path: Path) -> None:
    flags = ["-std=c++17", "-DWITH_CUDA_H", f"-I{CUDA_H.parent}", f"-I{ROOT / 'csrc'}"]
    flags += [f"-I{cuda_stand_in.HEADERS}", "-fsyntax-only"]
    done = subprocess.run(
        ["g++", *flags, str(cuda_stand_in.SOURCE)], capture_output=True, text=True, timeout=110, check=False
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
    native = pytest.importorskip("soft_nic._native", reason="its native module is not built")
    for slots, slot_bytes in ((1, 1), (3, 63), (3, 64), (3, 65), (1024, 4096)):
        assert inbox_bytes(Geometry(slots=slots, slot_bytes=slot_bytes)) == native.inbox_bytes(slots, slot_bytes)


def test_what_was_written_is_there_before_a_peer_hears_of_it() -> None:
    """A copy from pageable memory, and a memset, may be in flight when the driver returns, and would come after a
    peer's first signal.
    """
    driver = Driver()
    at = driver.allocate(b"old", SLOTS_AT)
    assert ctypes.string_at(at, 3) == b"old"
    driver.call("cuMemsetD8_v2", at, 7, SLOTS_AT)
    assert ctypes.string_at(at, 3) == b"old", "the stand-in does it no sooner than it has to"
    driver.write(at, b"new")
    assert ctypes.string_at(at, 4) == b"new\7"
    clear_inbox(driver, at, 5)
    assert ctypes.string_at(at, SLOTS_AT) == (5).to_bytes(8, "little") * 3 + bytes(SLOTS_AT - 24)
    driver.free(at)
    driver.close()


def test_one_graph_is_replayed_over_many_laps() -> None:
    """The values that change from one replay to the next are in device memory: seqno, slot, length, tag."""
    fabric, a, b = ends(epoch=65535)
    driver = a.hand_to_device().driver
    memory = [Pinned(driver, 4096) for _ in range(2)]
    streams = [CudaStream(driver) for _ in range(2)]
    out, into = (m.address for m in memory)
    graphs = []
    for view, stream, base in ((a.hand_to_device(), streams[0], out), (b.hand_to_device(), streams[1], into)):
        with stream.capture() as graph:  # bytes, tag, status, payload
            if base == out:
                view.send(stream.number, base + 256, base, base + 8, LONG_NS, base + 40)
            else:
                view.receive(stream.number, base + 256, SMALL.slot_bytes, base, base + 8, LONG_NS, base + 40)
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


def test_many_blocks_copy_a_long_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left over of words and of blocks, and wherever its two parts begin; one block copies a short one."""
    fabric = netstack.open("cuda", key=KEY)
    a, b = connect(fabric, geometry=Geometry(slots=2, slot_bytes=2 * LONG_BYTES))
    assert isinstance(a, CudaChannel)
    assert isinstance(b, CudaChannel)
    driver, launched, launch = a.hand_to_device().driver, list[tuple[str, int]](), Driver.launch

    def told(self: Driver, stream: int, kernel: str, *arguments: int, blocks: int = 1) -> None:
        launched.append((kernel, blocks))
        launch(self, stream, kernel, *arguments, blocks=blocks)

    monkeypatch.setattr(Driver, "launch", told)
    memory, stream = (
        Pinned(driver, 4 * LONG_BYTES),
        CudaStream(driver),
    )  # lengths, tag, statuses, note; parts, and what came
    view, at, came = memory.view, memory.address, 3 * LONG_BYTES - 1024
    view[1024:came] = random.Random(1).randbytes(came - 1024)
    rest = at, at + 16, LONG_NS, at + 48

    def moved(first: int, second: int, start: int, most: int) -> list[tuple[str, int]]:
        view[:16] = first.to_bytes(8, "little") + second.to_bytes(8, "little")
        view[came : came + LONG_BYTES + 64] = bytes(LONG_BYTES + 64)
        launched.clear()
        parts = (start, start + first)
        if second:
            a.hand_to_device().send_two(stream.number, at + parts[0], at + parts[1], *rest, most)
        else:
            a.hand_to_device().send(stream.number, at + parts[0], *rest, most)
        stream.synchronize()
        view[:8] = (first + second).to_bytes(8, "little")
        b.hand_to_device().receive_due(stream.number, at + came, at, at + 16, at + 64, LONG_NS, at + 52, most)
        stream.synchronize()
        assert bytes(view[48:56]) == bytes(8)
        total = first + second
        assert view[came : came + total] == view[start : start + total]
        assert not any(view[came + total : came + LONG_BYTES + 64])
        return [*launched]

    by_parts = [("send_begin", 1), ("send_fill", COPY_BLOCKS), ("send_end", 1)]
    by_parts += [("due_begin", 1), ("receive_drain", COPY_BLOCKS), ("receive_end", 1)]
    for first, second, start in ((LONG_BYTES, 0, 1024), (LONG_BYTES - 5, 0, 1025), (99, 0, 1024), (7, 4099, 1030)):
        said = moved(first, second, start, LONG_BYTES)
        assert said == [(f"memory_{kernel}", blocks) for kernel, blocks in by_parts]
        said = moved(first, second, start, LONG_BYTES - 1)
        assert said == [(f"memory_send{'_two' if second else ''}", 1), ("memory_receive_due", 1)]
    for part in (stream, memory, fabric):
        part.close()


class Mail:
    """The arguments of kernels, in memory that they reach: two lengths, a tag, a status, a payload."""

    def __init__(self, driver: Driver) -> None:
        self._memory = Pinned(driver, 4096)
        self.view, base = self._memory.view, self._memory.address
        self.nbytes, self.tag, self.status, self.payload = base, base + 16, base + 48, base + 64
        self.close = self._memory.close

    def result(self) -> int:
        return int.from_bytes(self.view[48:52], "little")


def test_two_runs_of_bytes_are_one_message() -> None:
    """Whatever the lengths, which are read when the kernel runs; more than a slot holds goes nowhere."""
    fabric, a, b = ends()
    assert isinstance(a, DeviceChannel)
    assert not isinstance(netstack.open("loopback", key=KEY).listen(), DeviceChannel)
    driver, side = a.hand_to_device().driver, a.hand_to_device()
    assert a.gpu == 0
    mail, stream = Mail(driver), CudaStream(driver)
    mail.view[64:264], mail.view[512:712] = bytes(range(200)), bytes(range(200, 0, -1))
    mail.view[16:20] = b"tag!"
    with stream.capture() as graph:
        side.send_two(stream.number, mail.payload, mail.payload + 448, mail.nbytes, mail.tag, LONG_NS, mail.status)
    lengths = [(0, 0), (7, 0), (0, 9), (64, 16), (33, 167), (200, 0), (1, 199), (199, 2)]
    for first, second in lengths:
        mail.view[:16] = first.to_bytes(8, "little") + second.to_bytes(8, "little")
        graph.replay(stream)
        stream.synchronize()
        if first + second > SMALL.slot_bytes:
            assert mail.result() == FAULT
            continue
        assert mail.result() == OK
        arrival = b.wait_signal(timeout_s=SOON_S)
        assert bytes(arrival.data) == bytes(range(200))[:first] + bytes(range(200, 0, -1))[:second]
        assert arrival.tag == b"tag!".ljust(32, b"\0")
        b.release(arrival)
    with pytest.raises(netstack.PeerFault, match="protocol"):
        side.check(mail.result())
    for part in (graph, stream, mail):
        part.close()
    fabric.close()


@pytest.mark.parametrize("wrong", ["nothing", "tag", "longer", "shorter"])
def test_a_message_that_is_not_due_is_told_and_not_taken(wrong: str) -> None:
    fabric, a, b = ends()
    side, mail, stream = b.hand_to_device(), Mail(b.hand_to_device().driver), CudaStream(b.hand_to_device().driver)
    note, target = mail.view[512:592], mail.view[1024:1224]
    mail.view[:8], mail.view[16:20] = (9).to_bytes(8, "little"), b"due!"
    came = bytes(9 + (wrong == "longer") - (wrong == "shorter")).replace(b"\0", b"x")
    send(a, came, b"new!" if wrong == "tag" else b"due!")
    send(a, b"y" * 9, b"due!")
    for place in (960, 1069):
        rest = mail.nbytes, mail.tag, mail.payload + 448, LONG_NS, mail.status
        side.receive_due(stream.number, mail.payload + place, *rest)
    stream.synchronize()
    if wrong == "nothing":
        assert (mail.result(), bytes(note)) == (OK, bytes(80))
        assert bytes(target[:9]) == b"x" * 9
        assert bytes(target[109:118]) == b"y" * 9
        side.check(OK)
    else:
        assert mail.result() == FAULT
        assert bytes(target) == bytes(200), "nor is what comes behind it"
        tag = b"new!" if wrong == "tag" else b"due!"
        told = len(came).to_bytes(8, "little") + tag.ljust(32, b"\0"), (9).to_bytes(8, "little") + b"due!"
        assert bytes(note) == told[0] + told[1].ljust(40, b"\0")
    stream.close()
    mail.close()
    fabric.close()


def test_what_is_launched_once_the_channel_is_closed_touches_no_memory() -> None:
    """A worker's thread may still be launching while the fabric is closed by another."""
    fabric, _, b = ends()
    driver, side = b.hand_to_device().driver, b.hand_to_device()
    mail, stream, launched = Mail(driver), CudaStream(driver), list[str]()
    b.close()
    launch, read = driver.launch, driver.read
    driver.launch = lambda stream, kernel, *_, **__: launched.append(kernel)  # type: ignore[method-assign]
    driver.read = lambda *place: pytest.fail("memory was read that is given back")  # type: ignore[method-assign]
    side.receive_due(stream.number, mail.payload, mail.nbytes, mail.tag, mail.payload + 448, LONG_NS, mail.status)
    side.send(stream.number, mail.payload, mail.nbytes, mail.tag, LONG_NS, mail.status)
    b.take_from_device()
    driver.launch, driver.read = launch, read  # type: ignore[method-assign]
    assert not launched
    with pytest.raises(netstack.ChannelAborted):
        side.check(mail.result())
    stream.close()
    mail.close()
    fabric.close()


def test_a_channel_that_is_closed_is_not_lent() -> None:
    fabric, a, b = ends()
    b.hand_to_device()
    for end in (a, b):
        end.close()
        with pytest.raises(netstack.ChannelAborted):
            end.hand_to_device()
    fabric.close()


def test_a_graph_is_launched_before_its_channel_is_closed_or_not_at_all() -> None:
    """A close waits for who is about to launch one, and finds its kernels; later ones find it closed."""
    fabric, a, b = ends()
    side, mail, stream = b.hand_to_device(), Mail(b.hand_to_device().driver), CudaStream(b.hand_to_device().driver)
    with stream.capture() as graph:
        side.receive_due(stream.number, mail.payload, mail.nbytes, mail.tag, mail.payload + 448, LONG_NS, mail.status)
    closing = threading.Thread(target=b.close)
    with side.launching() as is_open:
        assert is_open
        closing.start()
        with pytest.raises(netstack.PeerFault, match="closed the channel"):
            a.wait_signal(timeout_s=SOON_S)
        graph.replay(stream)
    closing.join()
    assert mail.result() == ABORTED
    with side.launching() as is_open:
        assert not is_open
    with pytest.raises(netstack.ChannelAborted):
        side.check(OK)
    for part in (graph, stream, mail):
        part.close()
    fabric.close()


@pytest.mark.parametrize("end", ["peer aborts", "we abort", "peer is dropped", "time"])
def test_a_kernel_that_waits_ends_with_its_peer_and_says_why(end: str) -> None:
    """Long before its own time has passed: a thread waits for the end of the life line."""
    fabric, a, b = ends()
    side, mail, stream = b.hand_to_device(), Mail(b.hand_to_device().driver), CudaStream(b.hand_to_device().driver)
    timeout_ns = LONG_NS // 50 if end == "time" else 100 * LONG_NS
    side.receive(stream.number, mail.payload, 200, mail.nbytes, mail.tag, timeout_ns, mail.status)
    if end == "peer aborts":
        a.abort("no more heads")
    elif end == "we abort":
        b.abort("enough")
    elif end == "peer is dropped":
        del a
        gc.collect()
    stream.synchronize()
    assert mail.result() == (TIMEOUT if end == "time" else ABORTED)
    error = {"time": netstack.ChannelTimeout, "we abort": netstack.ChannelAborted}.get(end, netstack.PeerFault)
    text = {"peer aborts": "no more heads", "peer is dropped": "gone", "time": "within its time"}.get(end, "this side")
    with pytest.raises(error, match=f"cuda://.*{text}"):
        side.check(mail.result())
    side.receive(stream.number, mail.payload, 200, mail.nbytes, mail.tag, timeout_ns, mail.status)
    stream.synchronize()  # at once: the status is sticky
    side.check(0)
    stream.close()
    mail.close()
    fabric.close()


def test_kernels_that_use_a_channel_have_ended_when_it_is_closed() -> None:
    fabric, _, b = ends()
    mail, stream = Mail(b.hand_to_device().driver), CudaStream(b.hand_to_device().driver)
    b.hand_to_device().receive(stream.number, mail.payload, 200, mail.nbytes, mail.tag, 100 * LONG_NS, mail.status)
    b.close()
    assert mail.result() == ABORTED
    stream.close()
    mail.close()
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
    inbox = int.from_bytes(victim.hand_to_device().driver.read(victim.hand_to_device().channel + 8, 8), "little")
    victim.hand_to_device().driver.write(inbox + at, value.to_bytes(8, "little"))
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
    assert driver.pci_address == "0000:a0:00.0"  # in the letters of /sys
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
                drive(receive_descriptor(here, 100), "peer", deadline=monotonic() + SOON_S)
            return
        fd = drive(receive_descriptor(here, 100), "peer", deadline=monotonic() + SOON_S)
        driver = Driver()
        with pytest.raises(CudaError, match="cuMemImport"):
            Shared(driver, 100, fd)
        driver.close()
        os.close(fd)


def test_a_fabric_is_of_the_gpu_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu(asked: int | None) -> int:
        fabric = netstack.open("cuda", key=KEY, gpu=asked)
        a, _ = connect(fabric, geometry=SMALL)
        fabric.close()
        assert isinstance(a, DeviceChannel)
        return a.gpu

    assert [gpu(None), gpu(0), gpu(1)] == [0, 0, 1]
    netstack.open("loopback", key=KEY, gpu=1).close()
    monkeypatch.setenv("LAMINA_CUDA_DEVICE", "0")
    assert gpu(1) == 0, "as somebody has asked"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_CUDA_SHARES_NOTHING", "1")
        with pytest.raises(ImportError, match="cannot be shared"):
            netstack.open("cuda", key=KEY)
    with monkeypatch.context() as patch:
        patch.setenv("LAMINA_CUDA_DEVICE", "7")
        with pytest.raises(ImportError, match="no GPU that can be used: cuDeviceGet"):
            netstack.open("cuda", key=KEY)
    with monkeypatch.context() as patch:
        patch.setenv("LAMINA_CUDA_DEVICE", "first")
        with pytest.raises(ImportError, match="LAMINA_CUDA_DEVICE is the number of a GPU, such as 0, not 'first'"):
            netstack.open("cuda", key=KEY)
    monkeypatch.setenv("LAMINA_LIBCUDA", "/nowhere/libcuda.so.1")
    with pytest.raises(ImportError, match="'cuda'.*/nowhere/libcuda.so.1 does not load"):
        netstack.open("cuda", key=KEY)


def test_what_is_too_old_or_too_new_for_the_driver_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of an import, so that other transports can be taken; nothing is held."""
    with monkeypatch.context() as patch:
        patch.setenv("LAMINA_LIBNVRTC", "libm.so.6")
        with pytest.raises(ImportError, match="undefined symbol: nvrtc.*; pip install nvidia-cuda-nvrtc; use"):
            netstack.open("cuda", key=KEY)
    monkeypatch.setattr(cuda_driver, "compiled", lambda *_: b"of a later version")
    with pytest.raises(ImportError, match="'cuda'.*cuModuleLoadData.*fits the driver"):
        netstack.open("cuda", key=KEY)


def test_a_driver_that_fails_ends_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, a, b = ends()
    send(a, b"before")

    def fails(*_: object, **__: object) -> None:
        raise CudaError("cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED (719)")

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "launch", fails)
        with pytest.raises(netstack.PeerFault, match="719"):
            b.wait_signal(timeout_s=SOON_S)
    with pytest.raises(netstack.PeerFault, match="719"):
        b.reserve(1)
    fabric.close()


@pytest.mark.long
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
        [*command, str(Path(__file__).with_name("kernel_threads.cpp")), "-o", str(program)],
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
