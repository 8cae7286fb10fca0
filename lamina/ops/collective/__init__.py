"""Collectives: calls that ranks make together. Each rank has a part of the weights; all run the same slices in order.

Contract, the same for every entry of the table (tests/contract/test_collectives.py):

- All ranks make the same calls in the same order, with tensors of the same shape and dtype. A rank that is out of step
  is noticed and raises PeerFault. With nccl it is not: tensors of GPUs are not compared, and ranks whose sizes differ
  wait for each other until the deadline.
- ``all_reduce`` sums in the order of ranks, in fp32 for narrower dtypes, with one rounding at the end. So every rank
  has the same bits, no row's sum depends on its place among others, and every entry gives the same bits.
- Every wait has a deadline: ChannelTimeout. A rank that has died is noticed like a peer of any channel: PeerFault.

Every entry uses a mesh of authenticated channels. The mesh carries small tensors of the host, and the addresses by
which another library finds the ranks.
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
# ``open_collective(mesh, at)``, which the functions of these names below call; imported when first used. The config
# lists the names for --collective, too.
COLLECTIVES: dict[str, str] = {"mesh": "mesh", "nccl": "nccl"}


class RankCollectives(Protocol):
    """The collectives that slices call. Tensors may be strided; a result is contiguous and belongs to the caller."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``."""
        ...

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """Return the ``x`` [..., n] of all ``size`` ranks, concatenated in the order of ranks, [..., size * n]."""
        ...


class Collective(RankCollectives, Protocol):
    """One rank's end of its group."""

    rank: int
    size: int

    @property
    def recordable(self) -> bool:
        """True if the ranks' devices make the calls by themselves, in the order of their streams. Then tensors of
        slices lie on the devices, and calls may be part of a graph. Otherwise tensors are the host's.
        """
        ...

    @property
    def wait_s(self) -> float:
        """The seconds that the host has spent waiting for other ranks."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's ``x``, a tensor of the host. Other ranks pass one of the same shape and dtype, with any
        contents.
        """
        ...

    def on_graph_launched(self) -> None:
        """Watch a graph with calls that was launched on the device, and must end in time. Raises ChannelError."""
        ...

    def close(self) -> None:
        """Release all resources except the channels of its fabric. Idempotent."""
        ...


class RankFacts(NamedTuple):
    """The facts of a rank's place that the choice of a collective depends on."""

    host: bytes  # equal for ranks of one host and network
    gpu: bytes  # equal for ranks on one GPU; empty if it has none
    usable: bool  # if its torch can connect GPUs


class RankLocation(NamedTuple):
    """The device, the timeouts and the neighbourhood of a rank."""

    device: torch.device
    start_timeout_s: float
    step_timeout_s: float
    same_process: bool = True  # if all ranks are on one host


def why_unavailable(name: str, device: torch.device) -> str:
    """Return the reason why ranks on ``device`` cannot use ``name``, and the fix; "" if one rank knows of none. Raises
    ValueError for an unknown name.
    """
    if name == AUTO:
        return ""
    reason: str = _module(name).why_unavailable(device)
    return f"--collective {name}{reason}" if reason else ""


def why_unusable_together(name: str, ranks: Sequence[RankFacts]) -> str:
    """Return the reason why all ``ranks``, given in order, cannot use ``name`` together; "" if they can."""
    reason: str = _module(name).why_unusable_together(ranks)
    return reason


def open_collective(name: str, mesh: MeshCollective, at: RankLocation) -> Collective:
    """Open entry ``name`` over the ranks of ``mesh``, all of which call this. Raises ValueError, ChannelError."""
    opened: Collective = _module(name).open_collective(mesh, at)
    return opened


def bind(program: SlicedProgram, collective: RankCollectives) -> SlicedProgram:
    """Return the program with its ``lamina::all_reduce`` and ``lamina::all_gather`` on ``collective``. ``program`` must
    not be used again.
    """
    from lamina.converter import redirect

    from .op import ALL_GATHER_OP, ALL_REDUCE_OP

    return redirect(program, "collective", collective, {ALL_REDUCE_OP: "all_reduce", ALL_GATHER_OP: "all_gather"})


def _module(name: str) -> Any:
    if name not in COLLECTIVES:
        raise ValueError(f"--collective must be one of {AUTO}, {', '.join(COLLECTIVES)}, not {name!r}")
    return import_module(f"{__name__}.{COLLECTIVES[name]}")
