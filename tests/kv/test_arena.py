"""Memory for KV blocks that one store gives up for the next one."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import pytest
import torch

from lamina.kv import arena as module
from lamina.kv.arena import HUGE_PAGE, HugePageArena, huge_page_zeros, prefault
from lamina.kv.paged_cache import allocate_layer

CPU = torch.device("cpu")
MANY = 24 << 20  # numbers of 2 bytes: above what anything else here takes meanwhile


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_next_layer_lies_where_the_last_one_was() -> None:
    slabs = HugePageArena()
    old = allocate_layer(40, 4, 16, 8, 24, torch.int8, CPU)
    for each in old.tensors:
        each.fill_(7)
    where = {x.data_ptr() for x in old.tensors}
    slabs.release(old.tensors)
    assert slabs.nbytes == sum(x.nbytes for x in old.tensors)
    new = allocate_layer(80, 2, 16, 8, 24, torch.int8, CPU, slabs)
    assert {x.data_ptr() for x in new.tensors} == where
    assert slabs.nbytes == 0
    assert new.scales is not None
    assert new.scales.k.dtype == torch.float32
    assert all((x[:80] == 7).all() for x in new.tensors), "numbers of the same dtype lie there, not bytes of others"
    assert all((x[80] == 0).all() for x in new.tensors), "the null block"


def test_a_little_more_fits_and_more_than_that_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    made, right = list[int](), huge_page_zeros
    monkeypatch.setattr(
        module,
        "huge_page_zeros",
        lambda shape, dtype, *slack: (made.append(prod(shape)), right(shape, dtype, *slack))[1],
    )
    slabs = HugePageArena()
    slabs.prepare([((HUGE_PAGE - 100,), torch.int8), ((50,), torch.int16)])
    made.clear()
    assert slabs.allocate((HUGE_PAGE,), torch.int8).shape == (HUGE_PAGE,)
    assert not made
    assert (slabs.allocate((HUGE_PAGE // 2 + 1,), torch.int16) == 0).all()
    assert made == [HUGE_PAGE // 2 + 1]
    assert slabs.allocate((4, 10), torch.float16).shape == (4, 10)
    assert len(made) == 2, "what is of another dtype is left alone"
    slabs.clear()
    assert slabs.nbytes == 0


def test_what_is_touched_is_there_and_what_is_not_needed_goes_back() -> None:
    slab, before = huge_page_zeros((MANY,), torch.int16), resident()
    prefault([slab], lambda: False)
    assert resident() - before < 8 << 20, "nobody wanted it any more"
    prefault([slab])
    assert resident() - before > 40 << 20
    slab.fill_(1)
    slabs = HugePageArena()
    slabs.release([slab])
    taken = slabs.allocate((MANY // 4,), torch.int16)
    del slab
    assert resident() - before < 20 << 20
    assert (taken == 1).all()


def test_what_is_ready_serves_what_has_a_little_more_in_any_order_of_sizes() -> None:
    """And pages that were never asked for are not there."""
    slabs, before = HugePageArena(), resident()
    shapes = [((MANY,), torch.int16), ((MANY // 2,), torch.int16), ((50,), torch.float32)]
    slabs.prepare(shapes, HUGE_PAGE)
    assert 68 << 20 < resident() - before < 80 << 20
    more = HUGE_PAGE // 2  # numbers of 2 bytes
    assert slabs.can_allocate([((MANY + more,), torch.int16), ((MANY // 2 + more,), torch.int16)])
    assert slabs.can_allocate([((MANY // 2,), torch.int16), ((MANY,), torch.int16), ((50,), torch.float32)])
    assert not slabs.can_allocate([((MANY + more,), torch.int16)] * 2), "there is one"
    assert not slabs.can_allocate([((MANY + 2 * more,), torch.int16)])
    assert not slabs.can_allocate([((50,), torch.float16)])
    assert slabs.nbytes == 2 * (MANY + MANY // 2) + 200, "a question takes nothing"
    taken = [slabs.allocate(shape, dtype) for shape, dtype in shapes]
    assert slabs.nbytes == 0
    assert resident() - before < 80 << 20
    assert all((x == 0).all() for x in taken)
