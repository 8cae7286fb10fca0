"""When a worker has its weights a second time, in an order by which linear layers are faster, and with whom it shares
them.

Covers: lamina/ops/gemm/packing.py.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina.config.engine_config import DeviceOptions
from lamina.config.topology import TopologyOptions
from lamina.env import PACKED
from lamina.ops.gemm.packed_memory import LINE, PackedMemory, PrivateMemory, SharedMemory
from lamina.ops.gemm.packing import can_share, choose_packing, has_room

GB = 1 << 30


@pytest.mark.parametrize(
    ("needed", "shared", "free", "topology", "kv_memory", "fits"),
    [
        (10, 0, 20, {}, "auto", True),
        (10, 0, 19, {}, "auto", False),  # KV has the other half
        (10, 0, 24, {"memory_workers": 1}, "14GiB", True),
        (10, 0, 23, {"memory_workers": 1}, "14GiB", False),  # which was asked for
        (10, 0, 30, {"memory_workers": 2}, "11GiB", False),
        (10, 0, 39, {"pipeline": 3}, "auto", False),  # two replicas
        (10, 0, 40, {"pipeline": 3}, "auto", True),
        (10, 10, 20, {"pipeline": 3}, "auto", True),  # which have them together
        (10, 10, 19, {"pipeline": 3}, "auto", False),
        (10, 8, 24, {"pipeline": 3}, "auto", True),  # but for some
        (10, 8, 23, {"pipeline": 3}, "auto", False),
        (10, 0, 39, {"prefill_workers": 1}, "auto", False),
        (10, 10, 20, {"prefill_workers": 1}, "auto", True),
        (10, 0, 40, {"prefill_workers": 2, "prefill_pipeline": 2}, "auto", True),  # a half in each
    ],
)
def test_the_host_must_have_room(
    needed: int, shared: int, free: int, topology: dict[str, Any], kv_memory: str, fits: bool
) -> None:
    devices = DeviceOptions(kv_memory=kv_memory)
    assert has_room(needed * GB, shared * GB, free * GB, TopologyOptions(**topology), devices) == fits


@pytest.mark.parametrize(
    ("topology", "may"),
    [
        ({}, False),
        ({"pipeline": 3}, True),
        ({"prefill_workers": 1}, True),
        ({"pipeline": 3, "tensor_parallel_size": 2}, False),  # a rank has a part
        ({"prefill_workers": 2, "prefill_pipeline": 2}, False),  # and so has a stage
    ],
)
def test_several_workers_with_all_weights_share_them(topology: dict[str, Any], may: bool) -> None:
    assert can_share(TopologyOptions(**topology)) == may


def test_a_kernel_without_huge_pages_has_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was built without them refuses every advice."""

    class Plain(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    pages = PrivateMemory()
    first, second = (pages.allocate(torch.zeros(1), size)[0].fill_(size) for size in (LINE + 1, 2 * LINE))
    assert first.eq(LINE + 1).all()
    assert second.eq(2 * LINE).all()
    assert second.data_ptr() - first.data_ptr() == 2 * LINE


@pytest.fixture
def path() -> Iterator[str]:
    """The path of a memory file as a launcher has it."""
    with open(os.memfd_create("packed", os.MFD_ALLOW_SEALING), "rb") as file:
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


@pytest.fixture
def weights(tmp_path: Path) -> list[Tensor]:
    """Two that lie in one file."""
    np.arange(6000, dtype=np.int16).tofile(tmp_path / "weights")
    whole = torch.from_numpy(np.memmap(tmp_path / "weights", dtype=np.int16, mode="c"))
    return [whole[:4000].view(100, 40), whole[4000:].view(50, 40)]


def fill(pages: SharedMemory, weights: list[Tensor]) -> None:
    pages.reserve(sum(w.nbytes + LINE for w in weights))
    for i, w in enumerate(weights):
        room, is_there = pages.allocate(w, w.nbytes)
        assert not is_there
        assert not room.any(), "of somebody who died"
        assert room.data_ptr() % LINE == 0
        room.fill_(i + 1)
    pages.seal()


def test_the_first_worker_packs_for_all_and_nobody_can_change_it(path: str, weights: list[Tensor]) -> None:
    first = SharedMemory(path, 0)
    with pytest.raises(OSError, match="another worker has packed weights for too long"):
        SharedMemory(path, 0.05)
    fill(first, weights)
    other = torch.ones(100, 40, dtype=torch.int16)
    for pages in (first, SharedMemory(path, 0)):
        assert pages.is_filled
        for i, w in enumerate(weights):
            room, is_there = pages.allocate(w, w.nbytes)
            assert is_there
            assert (room == i + 1).all()
        for stranger in (other, weights[0][1:], weights[0].t()):  # in no file, in other places, and in another order
            room, is_there = pages.allocate(stranger, 100)
            assert not is_there
            room.fill_(7)  # the worker's own
        pages.seal()
    for act in (lambda f: os.pwrite(f, b"x", 0), lambda f: os.ftruncate(f, 0)):
        descriptor = os.open(path, os.O_RDWR)
        with pytest.raises(PermissionError):
            act(descriptor)
        os.close(descriptor)


def test_a_worker_that_dies_leaves_its_turn_to_the_next_one(path: str, weights: list[Tensor]) -> None:
    dead = SharedMemory(path, 0)
    dead.reserve(1 << 20)
    dead.allocate(weights[0], weights[0].nbytes)[0].fill_(9)
    os.close(dead.fd)  # as its end does, which takes its view of the file, too
    dead.window = None
    fill(pages := SharedMemory(path, 0), weights)
    assert pages.is_filled


def test_more_than_was_reserved_gets_pages_of_the_workers_own(path: str, weights: list[Tensor]) -> None:
    pages = SharedMemory(path, 0)
    pages.reserve(1)
    assert pages.allocate(weights[0], 2 << 20)[1] is False  # all that is reserved: a huge page
    assert pages.allocate(weights[1], 1)[1] is False
    pages.seal()
    assert SharedMemory(path, 0).allocate(weights[1], 1)[1] is False


class Backend:
    """Packs whatever there is as it lies."""

    def packed_bytes(self, dtype: torch.dtype, cols: int, k_size: int) -> int:
        return cols * k_size * 2


def program(weight: Tensor) -> Any:
    layer = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    module = torch.export.export(layer, (torch.ones(1, 2, dtype=torch.bfloat16),)).module()
    module.weight = torch.nn.Parameter(weight.view(torch.bfloat16), requires_grad=False)
    return SimpleNamespace(slices=[SimpleNamespace(module=module)] * 2)  # one derived from the other


TWO = TopologyOptions(pipeline=3)


def decided(weight: Tensor, free: Callable[[], int], topology: TopologyOptions = TWO) -> PackedMemory | None:
    return choose_packing(program(weight), Backend(), free, topology, DeviceOptions(), 0.0)


def test_a_replica_takes_no_room_of_its_own(path: str, weights: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights[0]
    each = w.nbytes
    monkeypatch.setenv(PACKED, path)
    assert not decided(w, lambda: 2 * each - 1)  # and its turn is over
    first = decided(w, lambda: 2 * each)
    assert first
    first.allocate(w, each)[0].fill_(5)
    first.seal()
    assert decided(w, lambda: 0)  # what is there needs no room
    assert not decided(torch.zeros_like(w), lambda: 8 * each - 1)  # but what lies in no file does
    monkeypatch.setenv(PACKED, "/proc/self/fd/none")
    assert not decided(w, lambda: 8 * each - 1)  # two slices of two replicas, each for itself
    assert decided(w, lambda: 8 * each)
    monkeypatch.delenv(PACKED)
    assert not decided(w, lambda: 8 * each - 1)
    assert decided(w, lambda: 4 * each, TopologyOptions())
