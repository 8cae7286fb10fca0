"""What collectives over a process group of torch have in common: parts are gathered, and summed where they are.

A library's own all-reduce sums in an order of its own, and not the same for every size: so all parts come to all ranks,
as bytes, and each adds them up in the order of ranks. Of few bytes that takes one message, as the mesh does; of many,
each rank sums its share of the elements and the sums are gathered, with the same bits, since elements do not meet.

No group of torch's own is made (``init_process_group``): ranks may be threads of one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.netstack import ChannelError, PeerFault
from lamina.netstack.contract.fabric import DEATH_NOTICED_S

from . import RankPlace
from .mesh import Mesh
from .sums import ordered_sum, side_by_side

# Of a rank; above, all parts at all ranks would be more to send and to hold than what sums of shares take. For two
# ranks both send the same.
ONE_SHOT_BYTES = 256 << 10


class Opened(NamedTuple):
    """A torch.distributed Backend of these ranks, and what its threads may look at as long as it lives."""

    group: Any
    store: Any


class OfGroup(ABC):
    """One rank's end of a process group of torch. A subclass says in ``_do`` how an operation is waited for."""

    recordable = False

    def __init__(self, mesh: Mesh, opened: Opened) -> None:
        self.rank, self.size = mesh.rank, mesh.size
        self._mesh = mesh
        self._group, self._store = opened

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for other ranks over the mesh."""
        return self._mesh.wait_s

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, in the order of ranks. Raises ChannelError."""
        x = x.contiguous()
        if not x.numel():
            return x.clone()
        flat = x.view(-1)
        if self.size > 2 and x.nbytes > ONE_SHOT_BYTES:
            return self._two_shots(flat).view(x.shape)
        return ordered_sum(self._gather(flat).unbind()).to(x.dtype).view(x.shape)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """All ranks' ``x`` side by side, in the order of ranks. Raises ChannelError."""
        x = x.contiguous()
        if not x.numel():
            return x.new_empty(*x.shape[:-1], size * x.shape[-1])
        return side_by_side(self._gather(x.view(-1)), x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``, a tensor of the host. Raises ChannelError."""
        return self._mesh.broadcast(x)

    def close(self) -> None:
        """Lets the group go. Idempotent."""
        self._group = None  # its sockets and threads go with it

    @abstractmethod
    def _do(self, start: Callable[[Any], Any], nbytes: int) -> None:
        """``start`` an operation of the group with ``nbytes`` of each rank; the tensors it fills may be used after.
        Raises ChannelError.
        """

    def _gather(self, flat: Tensor) -> Tensor:
        """[n] of each rank -> [ranks, n]."""
        gathered = torch.empty(self.size * flat.nbytes, dtype=torch.uint8, device=flat.device)
        sent = flat.view(torch.uint8)
        self._do(lambda group: group._allgather_base(gathered, sent, _all_gather_options()), flat.nbytes)
        return gathered.view(flat.dtype).view(self.size, -1)

    def _two_shots(self, flat: Tensor) -> Tensor:
        """The sum of all ranks' ``flat`` [n]: each rank sums a share, padded to the same size."""
        share = -(-flat.numel() // self.size)
        padded = flat.new_zeros(self.size * share)
        padded[: flat.numel()] = flat
        received, sent = torch.empty_like(padded), padded.view(torch.uint8)
        theirs = received.view(torch.uint8)
        self._do(lambda group: group.alltoall_base(theirs, sent, [], [], _all_to_all_options()), flat.nbytes)
        total = ordered_sum(received.view(self.size, share).unbind()).to(flat.dtype)
        return self._gather(total).view(-1)[: flat.numel()]


def open_group(mesh: Mesh, at: RankPlace, make: Callable[[Any], Any]) -> Opened:
    """The group that ``make`` opens over a torch.distributed.Store of ``mesh``, once all ranks have opened theirs.
    Raises ChannelError.
    """
    from .store import MeshStore  # where torch has process groups

    store = MeshStore(mesh, at.start_timeout_s)
    try:
        group = make(store)
        store.close()
    except ChannelError:
        raise
    except RuntimeError as error:  # of the library
        raise failed(mesh, error) from error
    return Opened(group, store)


def failed(mesh: Mesh, error: RuntimeError) -> ChannelError:
    """The cause of a library's ``error``: the rank that has gone, which the mesh may learn of a little later."""
    try:
        mesh.check(within_s=DEATH_NOTICED_S)
    except ChannelError as known:
        return known
    said, _, _ = str(error).partition("\n")
    return PeerFault(f"rank {mesh.rank}: its connections to other ranks failed: {said}")


def _all_gather_options() -> Any:
    return _in_order(torch._C._distributed_c10d.AllgatherOptions())


def _all_to_all_options() -> Any:
    return _in_order(torch._C._distributed_c10d.AllToAllOptions())


def _in_order(options: Any) -> Any:
    """On a GPU: on the stream that computes, and no other one."""
    options.asyncOp = False
    return options
