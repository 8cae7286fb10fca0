"""The size of launches on a GPU, computed without one."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
from cuda_emulation import SMALL, library, needs_gxx
from hypothesis import given
from hypothesis import strategies as st

from lamina.ops.attention.cuda import SEQUENCE_INTS
from lamina.ops.attention.cuda_geometry import (
    CHUNK_TOKENS,
    HEAD_DIMS,
    LANES,
    LEVELS,
    MOST_TOKENS,
    SPLITS,
    GpuLimits,
    LaunchShape,
    Variant,
    choose,
)  # fmt: skip
from lamina.ops.attention.merge import CHUNK_TOKENS as MERGED_TOKENS

H200 = GpuLimits(processors=132, shared_bytes=228 << 10, block_shared_bytes=227 << 10)
A100 = GpuLimits(processors=108, shared_bytes=164 << 10, block_shared_bytes=163 << 10)

VARIANTS = [
    Variant(element="float"),
    choose("BFloat16", 64, 64, 4),
    choose("BFloat16", 64, 64, 12),
    choose("BFloat16", 80, 72, 4, "Fp8"),
    pytest.param(choose("Half", 128, 128, 12, "Int8"), marks=pytest.mark.slow),
    pytest.param(choose("Half", 72, 80, 4), marks=pytest.mark.slow),
    pytest.param(choose("BFloat16", 256, 192, 4), marks=pytest.mark.slow),
]


@pytest.mark.long
@needs_gxx
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_sizes_are_those_of_the_kernels(variant: Variant) -> None:
    found = (ctypes.c_int * 9)()
    library(variant).emulate_sizes(found)
    sizes = variant.tile, variant.node_numbers, variant.shared_bytes, variant.register_warps, LEVELS, CHUNK_TOKENS
    assert tuple(found) == (*sizes, 4 * SEQUENCE_INTS, 16, 16)
    assert CHUNK_TOKENS == MERGED_TOKENS


@pytest.mark.long(but=["-8-184-device1", "-8-192-device0", "-8-200-device0", "-8-200-device1", "-9-64-device0"])
@pytest.mark.parametrize("device", [H200, A100])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("queries", [1, 8, 9, 64])
@pytest.mark.parametrize("stored", ["", "Int8"])
def test_every_head_size_has_room_for_two_warps(device: GpuLimits, dim: int, queries: int, stored: str) -> None:
    variant = choose("BFloat16", dim, dim, queries, stored)
    warps = variant.warps(device) // device.processors
    assert 2 <= warps <= (12 if queries <= 8 and dim <= 128 else 8)
    assert warps * (variant.shared_bytes + 1024) <= device.shared_bytes
    more = variant.warps(H200) > 8 * H200.processors
    assert (variant.register_warps > 8) == more, "fewer registers a lane only where more warps have room"
    ahead = warps * (variant.stages - 1) * 16 * 2 * dim * (1 if stored else 2)
    assert ahead >= 32 << 10, "bytes on their way that hide the latency of memory, of a multiprocessor"


def test_a_small_gpu_says_what_is_missing() -> None:
    tiny = replace(SMALL, block_shared_bytes=48 << 10)
    with pytest.raises(ValueError, match=r"heads of 256 and 256 needs \d+ bytes of shared memory, this GPU has 49152"):
        LaunchShape.of(choose("Half", 256, 256, 1), tiny, sequences=1, rows=1, group=1, kv_heads=1)


@pytest.mark.parametrize(
    ("element", "dims", "queries", "columns"),
    [
        ("BFloat16", (128, 128), 1, 1), ("BFloat16", (128, 128), 8, 1), ("Half", (128, 128), 9, 2),
        ("Half", (136, 64), 9, 1), ("float", (128, 128), 9, 0), ("Half", (60, 64), 4, 0), ("Half", (64, 32), 4, 0),
        ("Half", (68, 68), 4, 0),
    ],
)  # fmt: skip
def test_which_core_takes_what(element: str, dims: tuple[int, int], queries: int, columns: int) -> None:
    for stored in ("", "Int8", "Fp8"):
        assert choose(element, *dims, queries, stored).columns == columns


def test_heads_that_are_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="up to 256, not 264"):
        choose("Half", 128, 264, 1)


@given(
    sequences=st.integers(1, 600), more_rows=st.integers(0, 3000), group=st.integers(1, 16), kv_heads=st.integers(1, 64)
)
def test_there_is_a_place_for_every_tile_and_no_idle_grid(
    sequences: int, more_rows: int, group: int, kv_heads: int
) -> None:
    variant = choose("BFloat16", 128, 128, (more_rows + 1) * group)
    rows = sequences + more_rows
    found = LaunchShape.of(variant, H200, sequences=sequences, rows=rows, group=group, kv_heads=kv_heads)
    one_has_all = -(-(more_rows + 1) * group // variant.tile) + (sequences - 1) * -(-group // variant.tile)
    assert found.capacity >= one_has_all
    assert found.capacity <= one_has_all + sequences * group + SPLITS * variant.warps(H200)
    assert found.blocks == min(variant.warps(H200), found.capacity * kv_heads)


def test_sizes_of_the_usual_shape() -> None:
    """8 query heads a tile, 128 numbers: 3 stages of 16 tokens, rows 16 bytes longer, and 2 nodes."""
    variant = choose("BFloat16", 128, 128, 4)
    assert variant.node_numbers == 2 * 17 * LANES
    assert variant.shared_bytes == 3 * 16 * 2 * 272 + 2 * variant.node_numbers * 4
    assert variant.warps(H200) == 6 * 132
    assert variant.defines()[-1] == "-DLAMINA_WARPS=8"
    for dim, stored, warps in ((64, "", 12), (128, "Fp8", 11), (64, "Fp8", 12), (136, "", 6)):
        assert choose("BFloat16", dim, dim, 4, stored).warps(H200) == warps * 132
    assert MOST_TOKENS == 1 << 21
