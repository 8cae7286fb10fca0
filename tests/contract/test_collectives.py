"""The contract of lamina.ops.collective, run over every entry of the table that this machine can open."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from forked import ForkedProgram
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import WAIT_S, on_all
from nccl_over_gloo import open_over_gloo
from torch import Tensor

from lamina import netstack
from lamina.netstack import ChannelError, ChannelTimeout, PeerFault
from lamina.ops import collective
from lamina.ops.collective import COLLECTIVES, Collective, RankLocation, why_unavailable
from lamina.ops.collective.mesh import SLOT_BYTES, MeshCollective, connect_mesh
from lamina.ops.collective.nccl import ONE_SHOT_BYTES

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
SIZES = (2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
GUARDED = "nccl's class over gloo"  # with a guard, and a device that is done at once: all of it but NCCL itself
CPU = torch.device("cpu")
FIRST_GPU = torch.device("cuda", 0)
SOON_S = WAIT_S / 2  # on a busy machine
KEY = b"k" * 32


@pytest.fixture(params=[*COLLECTIVES, GUARDED])
def entry(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    skip_without(name, 2)
    return name


def skip_without(name: str, ranks: int) -> None:
    if (
        name != GUARDED
        and why_unavailable(name, CPU)
        and (why_unavailable(name, FIRST_GPU) or torch.cuda.device_count() < ranks)
    ):
        found = why_unavailable(name, FIRST_GPU) or f"{torch.cuda.device_count()} GPUs here"
        pytest.skip(f"{name} needs a GPU for each of {ranks} ranks, and a torch with NCCL: {found}")


def device_of(name: str, rank: int) -> torch.device:
    return torch.device("cuda", rank) if name in COLLECTIVES and why_unavailable(name, CPU) else CPU


def open_entry(name: str, mesh: MeshCollective, timeout_s: float) -> Collective:
    at = RankLocation(device_of(name, mesh.rank), WAIT_S, timeout_s)
    return collective.open_collective(name, mesh, at) if name in COLLECTIVES else open_over_gloo(mesh, at)


def on_entry(
    name: str, size: int, work: Callable[[Collective], T], *, timeout_s: float = WAIT_S, **how: Any
) -> list[T]:
    """See meshes.on_all."""
    skip_without(name, size)

    def one(mesh: MeshCollective) -> T:
        group = open_entry(name, mesh, timeout_s)
        try:
            return work(group)
        finally:
            group.close()

    return on_all(size, one, timeout_s=timeout_s, **how)


def there(name: str, rank: int, x: Tensor) -> Tensor:
    return x.to(device_of(name, rank))


def own(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of a large range, so that the order of a sum shows."""
    g = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=g) * 10.0 ** torch.randint(-3, 4, shape, generator=g)).to(dtype)


def ordered(parts: list[Tensor]) -> Tensor:
    """The oracle: one after the other, in fp32 at least, and one rounding."""
    dtype = parts[0].dtype
    wide = [x.float() if dtype.itemsize == 2 else x for x in parts]
    total = wide[0]
    for x in wide[1:]:
        total = total + x
    return total.to(dtype)


@pytest.mark.no_retry
@pytest.mark.parametrize("scheme", ["loopback", "shm", "tcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_the_same_everywhere_and_in_the_order_of_ranks(entry: str, scheme: str, dtype: torch.dtype) -> None:
    shape = (5, 1, 64)
    parts = [own(r, shape, dtype) for r in range(3)]
    found = on_entry(entry, 3, lambda g: g.all_reduce(there(entry, g.rank, parts[g.rank])).cpu(), scheme=scheme)
    assert all(torch.equal(x, ordered(parts)) for x in found)
    assert dtype != torch.float32 or not torch.equal(ordered(parts[::-1]), found[0]), "the control: the order shows"


@pytest.mark.parametrize("size", SIZES)
def test_parts_lie_side_by_side(entry: str, size: int) -> None:
    def work(g: Collective) -> Tensor:
        return g.all_gather(there(entry, g.rank, own(g.rank, (3, 1, 8))).transpose(0, 1), size).cpu()

    wanted = torch.cat([own(r, (3, 1, 8)).transpose(0, 1) for r in range(size)], -1)
    found = on_entry(entry, size, work)
    assert all(torch.equal(x, wanted) and x.is_contiguous() for x in found)


@pytest.mark.parametrize("size", SIZES)
def test_all_have_what_rank_0_has(entry: str, size: int) -> None:
    def work(group: Collective) -> list[int]:
        told = [group.broadcast(torch.tensor([group.rank + 7, i])).tolist() for i in range(20)]  # more than slots
        return [x for pair in told for x in pair]

    assert on_entry(entry, size, work) == [[x for i in range(20) for x in (7, i)]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_may_be_long(entry: str, size: int) -> None:
    """Longer than a slot, and than what goes to all at once; of a length that ranks cannot share."""
    count = SLOT_BYTES // 4 * 2 + 5
    assert 4 * count > ONE_SHOT_BYTES
    assert count % size

    def work(g: Collective) -> tuple[Tensor, Tensor]:
        x = there(entry, g.rank, own(g.rank, (1, count)))
        return g.all_reduce(x).cpu(), g.all_gather(x, size).cpu()

    parts = [own(r, (1, count)) for r in range(size)]
    for total, side in on_entry(entry, size, work):
        assert torch.equal(total, ordered(parts))
        assert torch.equal(side, torch.cat(parts, -1))


def test_what_goes_in_stays_and_what_comes_out_is_the_callers(entry: str) -> None:
    def work(g: Collective) -> bool:
        x = there(entry, g.rank, torch.ones(4))
        first, gathered = g.all_reduce(x), g.all_gather(x, 2)
        first += 1.0
        gathered += 1.0
        return bool((x == 1.0).all()) and bool((g.all_reduce(x) == 2.0).all())

    assert on_entry(entry, 2, work) == [True, True]


def test_ranks_without_rows_meet_for_nothing(entry: str) -> None:
    def work(g: Collective) -> tuple[Any, Any]:
        x = there(entry, g.rank, torch.empty(0, 4))
        return g.all_reduce(x).shape, g.all_gather(x, 2).shape

    assert on_entry(entry, 2, work) == [((0, 4), (0, 8))] * 2


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@pytest.mark.no_retry
@settings(max_examples=40, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), size=st.sampled_from([2, 3]), turned=st.booleans())
@pytest.mark.parametrize("one_shot", [True, False])
def test_every_entry_gives_the_bits_of_the_mesh(
    one_shot: bool, shape: tuple[int, ...], dtype: torch.dtype, size: int, turned: bool
) -> None:
    parts = [own(r, shape, dtype) for r in range(size)]
    parts = [x.transpose(0, -1) for x in parts] if turned else parts

    def work(mesh: MeshCollective) -> list[tuple[Tensor, Tensor]]:
        x = parts[mesh.rank]
        known = mesh.all_reduce(x), mesh.all_gather(x, size)
        group = open_entry(GUARDED, mesh, WAIT_S)  # its watchdog reads the mesh from now on, which has one reader
        found = group.all_reduce(x), group.all_gather(x, size)
        group.close()
        return [known, found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamina.ops.collective.nccl.ONE_SHOT_BYTES", ONE_SHOT_BYTES if one_shot else 0)
        for known, found in on_all(size, work):
            assert torch.equal(found[0], known[0])
            assert torch.equal(found[1], known[1])
            assert torch.equal(found[0], ordered(parts))
            exact = torch.stack([x.double() for x in parts]).sum(0)
            bound = torch.stack([x.double().abs() for x in parts]).sum(0) * (
                2.0**-8 if dtype.itemsize == 2 else 2.0**-22
            )
            assert bool(((found[0].double() - exact).abs() <= bound + 1e-12).all())


def test_a_rank_that_does_something_else_is_found_out() -> None:
    """Not with nccl, as its contract says."""
    with pytest.raises(PeerFault, match="out of step|closed|gone|ended"):
        on_entry("mesh", 2, lambda group: group.all_reduce(torch.ones(4 + group.rank)))


def test_a_rank_that_never_comes_is_not_waited_for_for_ever() -> None:
    left = threading.Event()

    def work(group: Collective) -> Tensor | None:
        if group.rank == 0:
            try:
                return group.all_reduce(torch.ones(4))
            finally:
                left.set()
        left.wait(WAIT_S)
        return None

    with pytest.raises(ChannelTimeout):
        on_entry("mesh", 2, work, timeout_s=0.2)


def test_a_rank_that_fails_ends_the_others(entry: str) -> None:
    def work(group: Collective) -> Tensor:
        if group.rank == 1:
            raise RuntimeError("of its own")
        return group.broadcast(group.all_reduce(there(entry, 0, torch.ones(4))).cpu())

    if entry == GUARDED:
        pytest.skip("gloo's own wait, which no guard ends, would last: see test_guard.py")
    start = time.monotonic()
    with pytest.raises(ChannelError):
        on_entry(entry, 2, work)
    assert time.monotonic() - start < SOON_S


RANK = """
import signal, sys
import torch
from lamina import netstack
from lamina.ops.collective.mesh import connect_mesh
fabric = netstack.open(sys.argv[1], key=b"k" * 32)
listener = fabric.listen(reception=netstack.ListenTerms(name="second"))
print(listener.url, flush=True)
names = ["first", "second"]
mesh = connect_mesh(
    fabric, listener, ["", listener.url], names, 1, start_timeout_s=30.0, step_timeout_s=30.0
)
print(mesh.all_reduce(torch.full((3,), 2.0)).tolist(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_the_death_of_a_process_is_noticed(scheme: str) -> None:
    """This is rank 0, which has summed once with the process of rank 1."""
    names = ["first", "second"]
    process = ForkedProgram([scheme], code=RANK)
    assert process.stdout is not None
    with closing(netstack.open(scheme, key=KEY)) as fabric, process.stdout:
        try:
            urls = ["", process.stdout.readline().strip()]
            mesh = connect_mesh(fabric, fabric.listen(), urls, names, 0, start_timeout_s=WAIT_S, step_timeout_s=WAIT_S)
            assert mesh.all_reduce(torch.full((3,), 1.0)).tolist() == [3.0] * 3
            assert process.stdout.readline().strip() == "[3.0, 3.0, 3.0]"
            process.kill()
            process.wait(SOON_S)
            start = time.monotonic()
            with pytest.raises(PeerFault):
                mesh.all_reduce(torch.ones(3))
            assert time.monotonic() - start < SOON_S
        finally:
            process.kill()


def sockets() -> int:
    gc.collect()  # those of earlier tests, which would go at some time in between
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.no_retry
@pytest.mark.long(but=["nccl", "nccl's class over gloo"])
def test_nothing_is_left_behind(entry: str) -> None:
    on_entry(entry, 2, lambda g: g.all_reduce(there(entry, g.rank, torch.ones(4))).cpu())  # what is made once
    gc.collect()
    before = sockets(), tasks()

    def work(group: Collective) -> Collective:
        group.all_reduce(there(entry, group.rank, torch.ones(4)))
        return group

    closed = on_entry(entry, 2, work)
    assert sockets() <= before[0]
    deadline = time.monotonic() + SOON_S
    while tasks() > before[1]:  # the kernel's own end of a thread that has been joined
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(closed) == 2, "which are kept until here: it was not their end that gave everything back"
