"""Calls that ranks make together: each has a part of the weights, and all run the same slices in the same order.

Contract, the same for every entry of the table (tests/contract/test_collectives.py):

- All ranks make the same calls in the same order, with tensors of the same shape and dtype; a rank that is out of step
  is found out and raises PeerFault. Not so with nccl: nobody compares what GPUs send, and ranks whose sizes differ wait
  for each other until the deadline.
- ``all_reduce`` sums in the order of ranks, in fp32 for narrower dtypes and with one rounding at the end. So every rank
  has the same bits, and no row's sum depends on where it stands among others; and every entry gives the same ones.
- Every wait has a deadline: ChannelTimeout. A rank that has died is noticed as a peer of any channel is: PeerFault.

Every entry stands on a mesh of authenticated channels: it carries small tensors of the host for each entry, and the
addresses by which another library finds the ranks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from lamina.converter import SlicedProgram

    from .mesh import MeshCollective

AUTO = "auto"
# name -> module of this package with ``why_unavailable(device)``, ``why_unusable_together(ranks)`` and
# ``open_collective(mesh, at)``, for the functions of these names below; imported when first used. For --collective the
# names stand in config, too.
COLLECTIVES: dict[str, str] = {"mesh": "mesh", "nccl": "nccl"}


class RankCollectives(Protocol):
    """What slices call. Tensors may be strided; what is returned is contiguous and the caller's own."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``."""
        ...

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """All ranks' ``x`` [..., n] side by side in the order of ranks, [..., size * n]; ``size`` ranks there are."""
        ...


class Collective(RankCollectives, Protocol):
    """One rank's end of its group."""

    rank: int
    size: int

    @property
    def recordable(self) -> bool:
        """Whether ranks' devices do it by themselves, in the order of their streams: then the tensors of slices lie
        there, and calls may be part of a graph. Else tensors are the host's.
        """
        ...

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for other ranks, as far as the host does."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``, of the host; that of others is of the same shape and dtype, its contents do not matter."""
        ...

    def on_graph_launched(self) -> None:
        """A graph that calls are part of was given to the device: it is to end in time, too. Raises ChannelError."""
        ...

    def close(self) -> None:
        """Give back what it has beside the channels of its fabric. Idempotent."""
        ...


class RankFacts(NamedTuple):
    """What a rank says of where it is."""

    host: bytes  # the same for ranks of one host, and of one network there
    gpu: bytes  # the same for ranks on one GPU; empty: it computes on none
    usable: bool  # whether its torch can join GPUs


class RankLocation(NamedTuple):
    """Where a rank is, for itself."""

    device: torch.device
    start_timeout_s: float
    step_timeout_s: float
    same_process: bool = True  # whether all ranks are on one host


def why_unavailable(name: str, device: torch.device) -> str:
    """Why ranks on ``device`` cannot use ``name``, and what to do about it; "": they can, as far as one of them knows.
    Raises ValueError for an unknown name.
    """
    if name == AUTO:
        return ""
    reason: str = _module(name).why_unavailable(device)
    return f"--collective {name}{reason}" if reason else ""


def why_unusable_together(name: str, ranks: Sequence[RankFacts]) -> str:
    """Why ``ranks``, all there are and in their order, cannot use ``name`` together; "": they can."""
    reason: str = _module(name).why_unusable_together(ranks)
    return reason


def open_collective(name: str, mesh: MeshCollective, at: RankLocation) -> Collective:
    """Entry ``name`` over the ranks of ``mesh``, all of which call this. Raises ValueError, ChannelError."""
    opened: Collective = _module(name).open_collective(mesh, at)
    return opened


def bind(program: SlicedProgram, collective: RankCollectives) -> SlicedProgram:
    """The program with its ``lamina::all_reduce`` and ``lamina::all_gather`` on ``collective``. The one given is used
    up.
    """
    from lamina.converter import redirect

    from .op import ALL_GATHER_OP, ALL_REDUCE_OP

    return redirect(program, "collective", collective, {ALL_REDUCE_OP: "all_reduce", ALL_GATHER_OP: "all_gather"})


def _module(name: str) -> Any:
    if name not in COLLECTIVES:
        raise ValueError(f"--collective must be one of {AUTO}, {', '.join(COLLECTIVES)}, not {name!r}")
    return import_module(f"{__name__}.{COLLECTIVES[name]}")
