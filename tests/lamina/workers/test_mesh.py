"""The contract of lamina.collective.Collective, on the mesh over netstack."""

from __future__ import annotations

import pytest
import torch
from meshes import on_all
from torch import Tensor

from lamina.collective.mesh import SLOT_BYTES, Mesh
from lamina.netstack import ChannelError, ChannelTimeout, PeerFault

SIZES = (2, 3, 4)


def own(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of a large range, so that the order of a sum shows."""
    g = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=g) * 10.0 ** torch.randint(-3, 4, shape, generator=g)).to(dtype)


@pytest.mark.parametrize("scheme", ["loopback", "shm", "tcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_the_same_everywhere_and_in_the_order_of_ranks(scheme: str, dtype: torch.dtype) -> None:
    shape = (5, 1, 64)
    wanted = own(0, shape, dtype).float()
    for rank in (1, 2):
        wanted = wanted + own(rank, shape, dtype).float()
    found = on_all(3, lambda mesh: mesh.all_reduce(own(mesh.rank, shape, dtype)), scheme=scheme)
    assert all(torch.equal(x, wanted.to(dtype)) for x in found)
    backwards = (own(2, shape, dtype).float() + own(1, shape, dtype).float() + own(0, shape, dtype).float()).to(dtype)
    assert dtype != torch.float32 or not torch.equal(backwards, wanted), "the control: the order shows"


@pytest.mark.parametrize("size", SIZES)
def test_parts_lie_side_by_side(size: int) -> None:
    found = on_all(size, lambda mesh: mesh.all_gather(own(mesh.rank, (3, 1, 8)).transpose(0, 1), size))
    wanted = torch.cat([own(r, (3, 1, 8)).transpose(0, 1) for r in range(size)], -1)
    assert all(torch.equal(x, wanted) for x in found)


@pytest.mark.parametrize("size", SIZES)
def test_all_have_what_rank_0_has(size: int) -> None:
    def work(mesh: Mesh) -> list[int]:
        told = [
            mesh.broadcast(torch.tensor([mesh.rank + 7, i])).tolist() for i in range(20)
        ]  # more than there are slots
        return [x for pair in told for x in pair]

    assert on_all(size, work) == [[x for i in range(20) for x in (7, i)]] * size


def test_a_tensor_may_be_longer_than_a_slot() -> None:
    count = SLOT_BYTES // 4 * 2 + 3
    sums, parts = zip(
        *on_all(2, lambda m: (m.all_reduce(own(m.rank, (count,))), m.all_gather(own(m.rank, (1, count)), 2))),
        strict=True,
    )
    assert all(torch.equal(x, own(0, (count,)) + own(1, (count,))) for x in sums)
    assert all(torch.equal(x, torch.cat([own(0, (1, count)), own(1, (1, count))], -1)) for x in parts)


def test_a_rank_that_does_something_else_is_found_out() -> None:
    def work(mesh: Mesh) -> Tensor:
        return mesh.all_reduce(torch.ones(4 + mesh.rank))

    with pytest.raises(PeerFault, match="out of step|closed|gone|ended"):
        on_all(2, work)


def test_a_rank_that_never_comes_is_not_waited_for_for_ever() -> None:
    def work(mesh: Mesh) -> Tensor | None:
        return mesh.all_reduce(torch.ones(4)) if mesh.rank == 0 else None

    with pytest.raises(ChannelTimeout):
        on_all(2, work, timeout_s=0.2)


def test_a_rank_that_fails_ends_the_others() -> None:
    def work(mesh: Mesh) -> Tensor:
        if mesh.rank == 1:
            raise RuntimeError("of its own")
        return mesh.all_reduce(torch.ones(4))

    with pytest.raises(ChannelError):
        on_all(2, work)
