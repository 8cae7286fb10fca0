"""A device that waits for other ranks by itself: its waits end when a rank goes, or after a time, and it hears of that.

Covers: lamina/ops/collective/mesh.py, lamina/ops/collective/nccl.py.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from meshes import WAIT_S, on_all
from stand_in_device import RecordingCapture
from torch import Tensor

from lamina import netstack
from lamina.netstack import ChannelAborted, ChannelTimeout, ListenTerms, PeerFault
from lamina.ops.collective.mesh import MeshCollective, connect_mesh
from lamina.ops.collective.nccl import NcclCollective, Opened, failed
from lamina.ops.collective.watchdog import DeviceWatchdog
from lamina.workers.cuda_graphs import GraphedSlice

SOON_S = WAIT_S / 2  # on a busy machine
CPU = torch.device("cpu")


class Device:
    """Stands in for a process group whose device waits for a rank that never comes, until it is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.aborts = 0

    def _allgather_base(self, found: Tensor, mine: Tensor, options: Any) -> None:
        assert not options.asyncOp
        assert not self.aborted.is_set(), "nothing is given to a group that is over"

    def abort(self) -> None:
        self.aborts += 1
        self.aborted.set()

    def done(self) -> bool:
        return self.aborted.is_set()

    def wait(self) -> bool:
        """Waits as a host waits for its device."""
        return self.aborted.wait(WAIT_S)


def test_the_waits_of_a_device_end_when_a_rank_goes_and_the_next_call_tells() -> None:
    launched, found = threading.Event(), list[tuple[bool, float, int]]()

    def work(mesh: MeshCollective) -> None:
        if mesh.rank == 1:
            assert launched.wait(WAIT_S)
            raise RuntimeError("of its own")
        device = Device()
        group = NcclCollective(mesh, Opened(device, None), CPU, WAIT_S, lambda: device.done)
        try:
            group.all_reduce(torch.ones(4))
            launched.set()
            start = time.monotonic()
            ended = device.wait()
            for call in (
                lambda: group.all_reduce(torch.ones(4)),
                lambda: group.all_gather(torch.ones(4), 2),
                lambda: group.broadcast(torch.ones(4)),
            ):
                with pytest.raises(PeerFault, match="closed"):
                    call()
            found.append((ended, time.monotonic() - start, device.aborts))
        finally:
            group.close()
            assert device.aborts == 1

    with pytest.raises(RuntimeError, match="of its own"):
        on_all(2, work)
    ((ended, seconds, aborts),) = found
    assert ended
    assert aborts == 1
    assert seconds < SOON_S


def test_a_device_does_not_wait_longer_than_a_step_may_take() -> None:
    def work(mesh: MeshCollective) -> str:
        device = Device()
        group = NcclCollective(mesh, Opened(device, None), CPU, 0.2, lambda: device.done)
        try:
            group.all_reduce(torch.ones(4))
            assert device.wait()
            with pytest.raises(ChannelTimeout, match=r"rank \d: the device has waited 0.2 s") as error:
                group.broadcast(torch.ones(1))
            return str(error.value)
        finally:
            group.close()

    assert len(on_all(2, work)) == 2


class Recorded(Device):
    """Waits for a rank that never comes in what was recorded alone."""

    def __init__(self, capture: RecordingCapture) -> None:
        super().__init__()
        self.capture, self.waits = capture, False

    def _allgather_base(self, found: Tensor, mine: Tensor, options: Any) -> None:
        found.zero_()
        if self.capture.recording:
            self.capture.add(self.begin)

    def begin(self) -> None:
        self.waits = True

    def done(self) -> bool:
        return not self.waits or super().done()


def test_nor_in_a_graph() -> None:
    """Nothing of the group is called while one is replayed."""

    def work(mesh: MeshCollective) -> None:
        capture = RecordingCapture()
        device = Recorded(capture)
        group = NcclCollective(mesh, Opened(device, None), CPU, 0.2, lambda: None if capture.recording else device.done)
        graphed = GraphedSlice(lambda x: (group.all_reduce(x),), capture, joined=group)
        try:
            graphed(torch.ones(2, 4))
            assert device.wait()
            with pytest.raises(ChannelTimeout, match=r"rank \d: the device has waited 0.2 s"):
                graphed(torch.ones(2, 4))
        finally:
            group.close()

    on_all(2, work)


def test_the_end_of_this_ranks_fabric_ends_its_device() -> None:
    """The driver may have gone, which a thread of the service notices."""
    fabrics = [netstack.open("loopback", key=b"k" * 32) for _ in range(2)]
    names = ["first", "second"]
    listeners = [f.listen(reception=ListenTerms(name=name)) for f, name in zip(fabrics, names, strict=True)]
    urls = [x.url for x in listeners]
    meshes: dict[int, MeshCollective] = {}

    def meet(rank: int) -> None:
        meshes[rank] = connect_mesh(
            fabrics[rank], listeners[rank], urls, names, rank, start_timeout_s=WAIT_S, step_timeout_s=WAIT_S
        )

    threads = [threading.Thread(target=meet, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    device = Device()
    group = NcclCollective(meshes[0], Opened(device, None), CPU, WAIT_S, lambda: device.done)
    group.all_reduce(torch.ones(4))
    fabrics[0].close()
    assert device.wait()
    with pytest.raises(ChannelAborted):
        group.all_reduce(torch.ones(4))
    group.close()
    fabrics[1].close()


def test_what_is_done_in_time_is_no_error() -> None:
    def work(mesh: MeshCollective) -> None:
        asked, ended = threading.Event(), threading.Event()

        def done() -> bool:
            asked.set()
            return True

        guard = DeviceWatchdog(mesh, ended.set, 0.01)
        guard.watch(done)
        assert asked.wait(WAIT_S)
        guard.watch(lambda: True)
        guard.check()
        guard.close()
        assert not ended.is_set()

    on_all(2, work)


def test_what_comes_while_somebody_looks_is_kept_in_its_order() -> None:
    ahead = threading.Event()

    def work(mesh: MeshCollective) -> list[int]:
        if mesh.rank == 0:
            told = [int(mesh.broadcast(torch.tensor([i]))) for i in range(3)]
            ahead.set()
        else:
            assert ahead.wait(WAIT_S)
            for _ in range(2):
                mesh.check()
            told = [int(mesh.broadcast(torch.tensor([9]))) for _ in range(3)]
        return [*told, int(mesh.all_reduce(torch.tensor([mesh.rank + 1])))]

    assert on_all(2, work) == [[0, 1, 2, 3]] * 2


def test_a_rank_that_has_gone_is_named_where_a_library_knows_of_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def work(mesh: MeshCollective) -> str:
        if mesh.rank == 1:
            assert asked.wait(WAIT_S)
            raise RuntimeError("of its own")
        (channel,) = mesh.peers
        wait_signal = channel.wait_signal

        def first_asked(*, timeout_s: float) -> Any:
            try:
                return wait_signal(timeout_s=timeout_s)
            finally:
                asked.set()

        monkeypatch.setattr(channel, "wait_signal", first_asked)
        found.append(str(failed(mesh, RuntimeError("Connection closed by peer"))))
        return found[0]

    found = list[str]()
    with pytest.raises(RuntimeError, match="of its own"):
        on_all(2, work)
    assert "closed the channel" in found[0]
