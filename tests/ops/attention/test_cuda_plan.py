"""The plan that a GPU makes of a step: who computes what, whatever the lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_emulation import SMALL, emulated, needs_gxx
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lamina.kv.paged_cache import RowTable
from lamina.ops.attention.cuda import DeviceTable, PlanKey
from lamina.ops.attention.cuda_geometry import Variant, choose

pytestmark = needs_gxx

CHUNK = 128
lengths = st.one_of(st.sampled_from([0, 1, 127, 128, 129, 4096]), st.integers(0, 70_000))
sequences = st.lists(st.tuples(lengths, st.integers(1, 40), st.booleans()), min_size=1, max_size=70)


def table(items: list[tuple[int, int, bool]]) -> RowTable:
    """Makes a table of (stored tokens, rows, whether the first half is out of sight); no blocks, which no plan looks
    at.
    """
    stop, count, half = (np.array(x, np.int64) for x in zip(*items, strict=True))
    seen = np.where(half == 1, stop // 2, 0)
    row = np.cumsum(count) - count
    return RowTable(0, 16, 0, row, stop, count, seen, stop, seen // CHUNK * CHUNK, np.zeros((len(items), 0), np.int64))


def planned(
    items: list[tuple[int, int, bool]], variant: Variant, group: int, kv_heads: int, processors: int, *, stored: bool
) -> tuple[int, NDArray[np.int32], int]:
    """(level, tasks [T, 4], capacity)."""
    backend = emulated(torch.float32, replace(SMALL, processors=processors))
    rows = table(items)
    step = DeviceTable(torch.device("cpu"), len(items), rows.num_rows, 0, 16)
    step.most_rows = int(rows.count.max())
    backend.refill(step, rows)
    key = PlanKey(variant, group, kv_heads, stored)
    capacity = backend.geometry(step, key).capacity
    step.plans[key] = torch.full((4 + 4 * capacity,), -1, dtype=torch.int32)
    backend.refill(step, rows)
    data = step.plans[key].numpy()
    level, count = data[:2].tolist()
    assert (data[4 + 4 * count :] == -1).all(), "nothing is written behind the last task"
    return level, data[4 : 4 + 4 * count].reshape(-1, 4), capacity


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    items=sequences, group=st.integers(1, 9), kv_heads=st.integers(1, 8), processors=st.integers(1, 150),
    stored=st.booleans(),
)  # fmt: skip
def test_every_tile_and_node_has_one_task(
    items: list[tuple[int, int, bool]], group: int, kv_heads: int, processors: int, *, stored: bool
) -> None:
    variant = choose("BFloat16", 64, 64, group * max(count for _, count, _ in items))
    level, tasks, capacity = planned(items, variant, group, kv_heads, processors, stored=stored)
    assert len(tasks) <= capacity
    want = []
    for i, (stop, count, half) in enumerate(items):
        low = stop // 2 // CHUNK if half else 0
        first = low >> level if stored and stop else 0
        last = (-(-stop // CHUNK) - 1) >> level if stored and stop else 0
        for query in reversed(range(0, count * group, variant.tile)):
            want += [(i, query, node, first) for node in range(first, max(first, last) + 1)]
    assert [tuple(t) for t in tasks.tolist()] == want


def rounds(lengths: list[int], processors: int = 132) -> tuple[int, int, int]:
    """(level, tasks of all heads, warps) of a decode step of 8 KV heads of 128, 4 queries each."""
    variant = choose("BFloat16", 128, 128, 4)
    warps = variant.warps(replace(SMALL, processors=processors))
    level, tasks, _ = planned([(n, 1, False) for n in lengths], variant, 4, 8, processors, stored=True)
    return level, len(tasks) * 8, warps


def test_the_warps_of_a_gpu_are_busy() -> None:
    for shape in ([8192] * 64, [4096] * 16, [131072], [32768] * 4, [2048] * 64, [1000, 5000, 20000, 300] * 8):
        level, tasks, warps = rounds(shape)
        chunks = sum(-(-n // CHUNK) for n in shape) * 8
        longest = min(1 << level, max(-(-n // CHUNK) for n in shape))
        assert -(-tasks // warps) * longest * warps < 2.1 * max(chunks, warps), (shape, level, tasks)


def test_heads_enough_for_all_warps_cut_nothing() -> None:
    variant = Variant(element="float")
    _, tasks, _ = planned([(5000, 1, False)], variant, 1, 64, 1, stored=True)
    assert len(tasks) == 1


def test_more_tasks_than_an_int_counts_are_cut_less() -> None:
    """140,000 rows after 2M tokens, one query a tile: 2.2 thousand million tasks of a chunk each."""
    rows, tokens = 140_000, 2_000_000
    level, tasks, capacity = planned([(tokens, rows, False)], Variant(element="float"), 1, 1, 132, stored=True)
    nodes = -(-tokens // (CHUNK << level))
    assert len(tasks) == rows * nodes <= capacity
    assert tasks[0].tolist() == [0, rows - 1, 0, 0]
    assert tasks[-1].tolist() == [0, 0, nodes - 1, 0]
