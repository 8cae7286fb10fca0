"""What ranks do together: each has a part of the weights, and all run the same slices in the same order.

Contract, the same for every implementation (tests/lamina/workers/test_mesh.py):

- All ranks make the same calls in the same order, with tensors of the same shape and dtype; a rank that is out of step
  is found out and raises PeerFault.
- ``all_reduce`` sums in the order of ranks, in fp32 for narrower dtypes and with one rounding at the end. So every rank
  has the same bits, and no row's sum depends on where it stands among others.
- Every wait has a deadline: ChannelTimeout. A rank that has died is noticed as a peer of any channel is: PeerFault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.converter import SlicedProgram


class Joining(Protocol):
    """What slices call. Tensors may be strided; what is returned is contiguous and the caller's own."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``."""
        ...

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """All ranks' ``x`` [..., n] side by side in the order of ranks, [..., size * n]; ``size`` ranks there are."""
        ...


class Collective(Joining, Protocol):
    """One rank's end of its group."""

    rank: int
    size: int

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for other ranks."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``; that of others is of the same shape and dtype, its contents do not matter."""
        ...


def bind(program: SlicedProgram, collective: Joining) -> SlicedProgram:
    """The program with its ``lamina::all_reduce`` and ``lamina::all_gather`` on ``collective``. The one given is used
    up.
    """
    from lamina.converter import redirect

    from .op import ALL_GATHER_OP, ALL_REDUCE_OP

    return redirect(program, "collective", collective, {ALL_REDUCE_OP: "all_reduce", ALL_GATHER_OP: "all_gather"})
