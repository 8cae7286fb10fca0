"""Ranks over NCCL: GPUs gather each other's parts by themselves, also as a part of CUDA graphs.

NCCL's own all-reduce sums in an order that depends on the size. So all ranks receive all parts, as bytes, and add them
up in the order of ranks. Few bytes take one message, as on the mesh. Of many bytes, each rank sums its share of the
elements, and the sums are gathered. Elements are independent, so the bits are the same.

The host only enqueues. So that no GPU waits without end, a watchdog checks the mesh and the clock, and ends NCCL's
waits. Ranks that are out of step are noticed by that clock alone. HARDWARE-UNVERIFIED: this module was run over gloo on
CPUs, with its watchdog; NCCL's own calls were not.

No process group of torch is opened (``init_process_group``): ranks may be threads of one process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.netstack import ChannelError, ChannelTimeout, PeerFault
from lamina.netstack.contract.fabric import DEATH_NOTICED_S

from . import RankFacts, RankLocation
from .expected_collective import NO_GPU, for_gpus
from .mesh import MeshCollective
from .reduce import concatenate_last_dim, ordered_sum
from .watchdog import DeviceWatchdog

# Bytes of a rank. Above, sending and holding all parts on all ranks costs more than summing shares. For two ranks both
# send the same.
ONE_SHOT_BYTES = 256 << 10
OVERTIME_S = 1.0  # seconds after the deadline of the ranks' store, when opening is given up
LAST_RESORT_S = 30.0  # seconds after the watchdog's deadline, when torch ends the process
INTERFACE = "NCCL_SOCKET_IFNAME"  # a variable of NCCL

# Marks the work given to the device so far, and returns a function that is true once it is done. None while a graph is
# recorded.
Mark = Callable[[], Callable[[], bool] | None]


class Opened(NamedTuple):
    """A torch.distributed Backend of these ranks, and the store that its threads may read as long as it exists."""

    group: Any
    store: Any


class NcclCollective:
    """One rank's end of a group over NCCL. Tensors of another device go over the mesh."""

    recordable = True

    def __init__(
        self, mesh: MeshCollective, opened: Opened, device: torch.device, timeout_s: float, mark: Mark
    ) -> None:
        """``timeout_s``: seconds for the device to finish its work."""
        self.rank, self.size = mesh.rank, mesh.size
        self._mesh = mesh
        self._group, self._store = opened
        self._device, self._mark = device, mark
        self.guard = DeviceWatchdog(mesh, self._abort, timeout_s)

    @property
    def wait_s(self) -> float:
        """The seconds spent waiting for other ranks over the mesh."""
        return self._mesh.wait_s

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, in the order of ranks. Raises ChannelError."""
        if x.device.type != self._device.type:
            with self.guard.mesh() as mesh:
                return mesh.all_reduce(x)
        x = x.contiguous()
        if not x.numel():
            return x.clone()
        flat = x.view(-1)
        if self.size > 2 and x.nbytes > ONE_SHOT_BYTES:
            return self._two_shots(flat).view(x.shape)
        return ordered_sum(self._gather(flat).unbind()).to(x.dtype).view(x.shape)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """Return all ranks' ``x``, concatenated in the order of ranks. Raises ChannelError."""
        if x.device.type != self._device.type:
            with self.guard.mesh() as mesh:
                return mesh.all_gather(x, size)
        x = x.contiguous()
        if not x.numel():
            return x.new_empty(*x.shape[:-1], size * x.shape[-1])
        return concatenate_last_dim(self._gather(x.view(-1)), x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's ``x``, a tensor of the host. Raises ChannelError."""
        with self.guard.mesh() as mesh:
            return mesh.broadcast(x)

    def on_graph_launched(self) -> None:
        """Watch a graph with calls of this rank that was launched: it has a deadline, too. Raises ChannelError."""
        self.guard.check()
        self._watch()

    def close(self) -> None:
        """End the watchdog, then the group. Idempotent."""
        self.guard.close()
        self._abort()

    def _gather(self, flat: Tensor) -> Tensor:
        """Gather [n] of each rank into [ranks, n]."""
        gathered = torch.empty(self.size * flat.nbytes, dtype=torch.uint8, device=flat.device)
        sent = flat.view(torch.uint8)
        self._enqueue(lambda group: group._allgather_base(gathered, sent, _all_gather_options()))
        return gathered.view(flat.dtype).view(self.size, -1)

    def _two_shots(self, flat: Tensor) -> Tensor:
        """Return the sum of all ranks' ``flat`` [n]: each rank sums a share, padded to the same size."""
        share = -(-flat.numel() // self.size)
        padded = flat.new_zeros(self.size * share)
        padded[: flat.numel()] = flat
        received, sent = torch.empty_like(padded), padded.view(torch.uint8)
        theirs = received.view(torch.uint8)
        self._enqueue(lambda group: group.alltoall_base(theirs, sent, [], [], _all_to_all_options()))
        total = ordered_sum(received.view(self.size, share).unbind()).to(flat.dtype)
        return self._gather(total).view(-1)[: flat.numel()]

    def _enqueue(self, start: Callable[[Any], Any]) -> None:
        """Call ``start`` for an operation of the group; later work of the stream waits for it. Raises ChannelError."""
        group = self._group
        self.guard.check()  # after the line above: the watchdog sets its error before it removes the group
        try:
            if (work := start(group)) is not None:
                work.wait()  # later work of the stream waits, not the host
        except RuntimeError as error:
            with self.guard.mesh() as mesh:
                raise failed(mesh, error) from error
        self._watch()

    def _watch(self) -> None:
        if (done := self._mark()) is not None:
            self.guard.watch(done)

    def _abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):  # its communicator may have ended
                group.abort()


def why_unavailable(device: torch.device) -> str:
    """Return the reason why ranks on ``device`` cannot use NCCL; "" if one rank knows of none."""
    if device.type != "cuda":
        return for_gpus()
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return ""
    return f": torch {torch.__version__} was built without NCCL: use --collective mesh, or a torch for CUDA on Linux"


def why_unusable_together(ranks: Sequence[RankFacts]) -> str:
    """Return the reason why these ranks cannot use NCCL together; "" if they can."""
    sharing = [[r for r, other in enumerate(ranks) if other.gpu == own.gpu] for own in ranks]
    if not all(own.gpu for own in ranks):
        return NO_GPU
    if twice := next((group for group in sharing if len(group) > 1), None):
        return f"ranks {' and '.join(map(str, twice))} have one GPU, and NCCL takes one for each"
    return "" if all(own.usable for own in ranks) else "not every rank's torch has NCCL"


def open_collective(mesh: MeshCollective, at: RankLocation) -> NcclCollective:
    """Open one rank's end. Ranks of one host find each other over its loopback interface."""
    if at.same_process:
        os.environ.setdefault(INTERFACE, "lo")

    def make(store: Any) -> Any:
        torch.cuda.set_device(at.device)  # of the thread that opens
        kind: Any = torch._C._distributed_c10d.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = timedelta(seconds=at.step_timeout_s + LAST_RESORT_S)
        group = kind(store, mesh.rank, mesh.size, options)
        group.eager_connect_single_device(at.device)
        return group

    return NcclCollective(mesh, open_group(mesh, at, make), at.device, at.step_timeout_s, lambda: _event(at.device))


def open_group(mesh: MeshCollective, at: RankLocation, make: Callable[[Any], Any]) -> Opened:
    """Return the group that ``make`` opens over a MeshStore of ``mesh``, after all ranks have opened theirs. Raises
    ChannelError.
    """
    from .rendezvous_store import MeshStore  # only imported where torch has process groups

    store = MeshStore(mesh, at.start_timeout_s)

    def meet() -> Any:
        group = make(store)
        store.close()
        return group

    try:
        group = _within(meet, at.start_timeout_s + OVERTIME_S)
    except TimeoutError:
        said = f"its connections to other ranks did not open within {at.start_timeout_s:g} s"
        raise ChannelTimeout(f"rank {mesh.rank}: {said}: one of them is stopped, or a network drops packets") from None
    except ChannelError:
        raise
    except RuntimeError as error:  # raised by the library
        raise failed(mesh, error) from error
    return Opened(group, store)


def _within(call: Callable[[], Any], seconds: float) -> Any:
    """Return what ``call`` does, or raise TimeoutError. It runs on a thread of its own, which may outlive this call: a
    library that waits for a rank cannot be interrupted.
    """
    result = Future[Any]()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            result.set_exception(error)

    threading.Thread(target=run, name="lamina-meet", daemon=True).start()
    return result.result(seconds)


def failed(mesh: MeshCollective, error: RuntimeError) -> ChannelError:
    """Return the cause of a library's ``error``: the rank that has ended, which the mesh may notice a little later."""
    try:
        mesh.check(within_s=DEATH_NOTICED_S)
    except ChannelError as known:
        return known
    said, _, _ = str(error).partition("\n")
    return PeerFault(f"rank {mesh.rank}: its connections to other ranks failed: {said}")


def _event(device: torch.device) -> Callable[[], bool] | None:
    if torch.cuda.is_current_stream_capturing():
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    query: Callable[[], bool] = event.query
    return query


def _all_gather_options() -> Any:
    return _in_order(torch._C._distributed_c10d.AllgatherOptions())


def _all_to_all_options() -> Any:
    return _in_order(torch._C._distributed_c10d.AllToAllOptions())


def _in_order(options: Any) -> Any:
    """Set the options so that work runs on the stream that computes, and on no other one."""
    options.asyncOp = False
    return options
