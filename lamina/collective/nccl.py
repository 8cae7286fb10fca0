"""Ranks over NCCL: GPUs gather each other's parts by themselves, also as a part of CUDA graphs.

The host only says what is to be done. So that no GPU waits for ever, a guard looks at the mesh and at the clock, and
ends NCCL's waits; what ranks do out of step is found by that clock alone. HARDWARE-UNVERIFIED: this module has been run
over gloo on CPUs, with its guard; NCCL's own calls have not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from . import Facts, RankPlace
from .expect import NO_GPU, for_gpus
from .guard import Guard
from .mesh import Mesh
from .process_group import OfGroup, Opened, failed, open_group

LAST_RESORT_S = 30.0  # behind the guard's deadline, torch ends the process
INTERFACE = "NCCL_SOCKET_IFNAME"  # NCCL's own variable

# Of what the device was given until now: whether it is done. None while a graph is recorded, which does nothing yet.
Mark = Callable[[], Callable[[], bool] | None]


class Nccl(OfGroup):
    """One rank's end of a group that NCCL carries. Tensors of another device go over the mesh."""

    recordable = True

    def __init__(self, mesh: Mesh, opened: Opened, device: torch.device, timeout_s: float, mark: Mark) -> None:
        """``timeout_s``: until the device has done what it was given."""
        super().__init__(mesh, opened)
        self._device, self._mark = device, mark
        self._guard = Guard(mesh, self._abort, timeout_s)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, in the order of ranks. Raises ChannelError."""
        if x.device.type == self._device.type:
            return super().all_reduce(x)
        with self._guard.mesh() as mesh:
            return mesh.all_reduce(x)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """All ranks' ``x`` side by side, in the order of ranks. Raises ChannelError."""
        if x.device.type == self._device.type:
            return super().all_gather(x, size)
        with self._guard.mesh() as mesh:
            return mesh.all_gather(x, size)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``, a tensor of the host. Raises ChannelError."""
        with self._guard.mesh() as mesh:
            return mesh.broadcast(x)

    def launched(self) -> None:
        """The device was given a graph that holds calls of this rank: it has a deadline, too. Raises ChannelError."""
        self._guard.check()
        self._watch()

    def close(self) -> None:
        """Ends the watch over the device, then the group. Idempotent."""
        self._guard.close()
        self._abort()

    def _do(self, start: Callable[[Any], Any], nbytes: int) -> None:
        group = self._group
        self._guard.check()  # behind the line above: the guard says why before it takes the group away
        try:
            if (work := start(group)) is not None:
                work.wait()  # later work of the stream waits, not the host
        except RuntimeError as error:
            with self._guard.mesh() as mesh:
                raise failed(mesh, error) from error
        self._watch()

    def _watch(self) -> None:
        if (done := self._mark()) is not None:
            self._guard.watch(done)

    def _abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):  # its communicator may be over
                group.abort()


def lacks(device: torch.device) -> str:
    """Why ranks on ``device`` cannot use NCCL; "": they can, as far as one of them knows."""
    if device.type != "cuda":
        return for_gpus(str(device))
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return ""
    return f": torch {torch.__version__} was built without NCCL: use --collective mesh, or a torch for CUDA on Linux"


def unfit(ranks: Sequence[Facts]) -> str:
    """Why these ranks cannot use NCCL together; "": they can."""
    sharing = [[r for r, other in enumerate(ranks) if other.gpu == own.gpu] for own in ranks]
    if not all(own.gpu for own in ranks):
        return NO_GPU
    if twice := next((group for group in sharing if len(group) > 1), None):
        return f"ranks {' and '.join(map(str, twice))} have one GPU, and NCCL takes one for each"
    return "" if all(own.usable for own in ranks) else "not every rank's torch has NCCL"


def open_collective(mesh: Mesh, at: RankPlace) -> Nccl:
    """One rank's end. Ranks of one host find each other over its loopback interface."""
    if at.together:
        os.environ.setdefault(INTERFACE, "lo")

    def make(store: Any) -> Any:
        kind: Any = torch._C._distributed_c10d.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = timedelta(seconds=at.step_timeout_s + LAST_RESORT_S)
        group = kind(store, mesh.rank, mesh.size, options)
        group.eager_connect_single_device(at.device)
        return group

    return Nccl(mesh, open_group(mesh, at, make), at.device, at.step_timeout_s, lambda: _event(at.device))


def _event(device: torch.device) -> Callable[[], bool] | None:
    if torch.cuda.is_current_stream_capturing():
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    query: Callable[[], bool] = event.query
    return query
