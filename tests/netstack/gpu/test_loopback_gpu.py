"""Channels of ``loopback`` on a GPU that a CPU stands in for, beyond the contract: nothing on it waits for a host."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from cuda_stand_in import STAND_IN, scheme_of
from wiring import KEY, SOON_S, connect, send

from lamina import netstack
from lamina.netstack import Channel, DeviceChannel, Geometry, Terms
from lamina.netstack.cuda.cuda import CudaChannel
from lamina.netstack.cuda.driver import CudaError, CudaStream, Driver, Pinned
from lamina.netstack.cuda.loopback_gpu import LoopbackGpuChannel

SMALL = Geometry(slots=3, slot_bytes=200)
LONG_NS = 60_000_000_000


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[ctypes.CDLL]:
    with scheme_of(STAND_IN):
        library = ctypes.CDLL(os.environ["LAMINA_LIBCUDA"])
        before = library.fake_cuda_live()
        yield library
        gc.collect()
        assert library.fake_cuda_live() == before, "something of the driver's was not given back"


def ends() -> tuple[netstack.Fabric, LoopbackGpuChannel, LoopbackGpuChannel]:
    fabric = netstack.open("loopback", key=KEY, gpu=0)
    a, b = connect(fabric, geometry=SMALL)
    assert isinstance(a, LoopbackGpuChannel)
    assert isinstance(b, LoopbackGpuChannel)
    return fabric, a, b


class Both:
    """Both ends of a channel, each with a stream and memory of its own: what one sends, the other receives."""

    def __init__(self) -> None:
        self.fabric, a, b = ends()
        self.sides, self.driver = (a.hand_to_device(), b.hand_to_device()), Driver()
        self.mails = [Pinned(self.driver, 4096) for _ in range(2)]
        self.streams = [CudaStream(self.driver) for _ in range(2)]

    def send(self) -> None:
        at = self.mails[0].address
        self.sides[0].send(self.streams[0].number, at + 1024, at, at + 16, LONG_NS, at + 48)

    def receive(self) -> None:
        at = self.mails[1].address
        self.sides[1].receive_due(self.streams[1].number, at + 1024, at, at + 16, at + 64, LONG_NS, at + 48)

    def check(self) -> None:
        for side, mail in zip(self.sides, self.mails, strict=True):
            side.check(int.from_bytes(mail.view[48:52], "little"))

    def close(self) -> None:
        for part in (*self.streams, *self.mails, self.fabric, self.driver):
            part.close()


@contextmanager
def busy(both: Both, end: int) -> Iterator[Callable[[], None]]:
    """A kernel of ``cuda``, which polls, is on the stream of that end until what this gives is called."""
    other = netstack.open("cuda", key=KEY)
    key, lock = connect(other, geometry=SMALL)
    assert isinstance(lock, CudaChannel)
    at = both.mails[end].address + 2048
    lock.hand_to_device().receive(both.streams[end].number, at, 200, at, at + 8, LONG_NS, at + 48)
    yield lambda: send(key, b"go on")
    other.close()


def test_nothing_on_the_gpu_waits_for_a_message_that_no_host_has_sent() -> None:
    """A wait for the whole GPU, or for a kernel to be loaded, therefore ends."""
    both = Both()
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(both.receive)
        both.driver.call("cuCtxSynchronize")
        assert not waits.done()
        both.send()
        waits.result(SOON_S)
    both.driver.call("cuCtxSynchronize")
    both.check()
    both.close()


@pytest.mark.parametrize("end", [0, 1], ids=["sender", "receiver"])
def test_a_kernel_comes_behind_what_it_needs_however_long_its_stream_is_busy(end: int) -> None:
    """A kernel has no time to wait: it would fail."""
    both = Both()
    with busy(both, end) as let_go:
        for n in range(SMALL.slots + 1):  # the last one takes the slot that the one kernel that receives hands back
            both.send()
            if n == 0:
                both.receive()
        let_go()
        for stream in both.streams:
            stream.synchronize()
    both.check()
    both.close()


def test_a_message_is_received_while_the_next_one_is_still_computed() -> None:
    """A layer's Q is received while its K and V are computed."""
    both = Both()
    both.send()
    with busy(both, 0) as let_go, ThreadPoolExecutor(1) as threads:
        both.send()
        both.receive()
        received = threads.submit(both.streams[1].synchronize)
        try:
            received.result(SOON_S)
        finally:
            let_go()
        both.streams[0].synchronize()
    both.check()
    both.close()


def test_what_is_sent_to_an_end_that_has_left_is_told() -> None:
    fabric, a, b = ends()
    side, driver = a.hand_to_device(), Driver()
    mail, stream = Pinned(driver, 4096), CudaStream(driver)
    b.abort("no more heads")
    side.send(stream.number, mail.address + 1024, mail.address, mail.address + 16, LONG_NS, mail.address + 48)
    with pytest.raises(netstack.PeerFault, match="no more heads"):
        side.check(0)
    for part in (stream, mail, fabric, driver):
        part.close()


@pytest.mark.parametrize("dropped", [False, True])
def test_memory_is_there_until_both_ends_have_left(dropped: bool, stand_in: ctypes.CDLL) -> None:
    fabric, a, b = ends()
    before = stand_in.fake_cuda_live()
    assert a.hand_to_device() is not a.hand_to_device()
    lent = stand_in.fake_cuda_live()
    assert lent > before, "made when it is lent, not before"
    b.close()
    with pytest.raises(netstack.ChannelAborted):
        b.hand_to_device()
    with pytest.raises(netstack.PeerFault, match="closed"):
        a.hand_to_device()
    assert stand_in.fake_cuda_live() == lent
    if dropped:
        del a
        gc.collect()
    else:
        a.close()
        a.close()
    assert stand_in.fake_cuda_live() == before
    fabric.close()


def test_ends_on_different_gpus_or_on_none_are_for_hosts() -> None:
    fabrics = [netstack.open("loopback", key=KEY, gpu=gpu) for gpu in (0, 1, None)]
    for here, there in ((0, 1), (0, 2), (2, 0)):
        listener = fabrics[there].listen()
        with ThreadPoolExecutor(1) as threads:
            accepted = threads.submit(listener.accept, timeout_s=SOON_S)
            connected = fabrics[here].connect(listener.url, Terms(outbound=SMALL, inbound=SMALL), timeout_s=SOON_S)
            both: list[Channel] = [connected, accepted.result(SOON_S)]
        assert not [x for x in both if isinstance(x, DeviceChannel)]
    for fabric in fabrics:
        fabric.close()


def test_where_kernels_cannot_be_had_hosts_send_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LAMINA_LIBNVRTC", "/nowhere/libnvrtc.so")
    with caplog.at_level(logging.WARNING):
        fabric = netstack.open("loopback", key=KEY, gpu=0)
    assert not isinstance(connect(fabric)[0], DeviceChannel)
    assert "/nowhere/libnvrtc.so does not load" in caplog.text
    fabric.close()


def test_a_fabric_that_is_closed_ends_what_it_accepted() -> None:
    fabric, a, b = ends()
    fabric.close()
    for channel in (a, b):
        with pytest.raises(netstack.ChannelAborted):
            channel.reserve(1)


def test_a_driver_that_fails_is_told_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, a, _ = ends()
    side, driver = a.hand_to_device(), Driver()
    stream = CudaStream(driver)

    def fails(*_: object, **__: object) -> None:
        raise CudaError("cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED (719)")

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "launch", fails)
        side.send(stream.number, 0, 0, 0, LONG_NS, 0)
    with pytest.raises(netstack.PeerFault, match="719"):
        side.check(0)
    for part in (stream, fabric, driver):
        part.close()
