"""The numba backend's own promises: the tree of ``merge``, exp to the last bits, odd sizes of its unrolled loops.

Covers: lamina/ops/attention/numba.py.
"""

from __future__ import annotations

import fcntl
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lamina.ops.attention import numba as backend
from lamina.ops.attention import numba_kernels as kernels

Floats = NDArray[np.float32]


def parts(n: int, seed: int) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 3, 5), np.float32), 3 * rng.standard_normal((n, 3), np.float32)


def tree(o: Floats, lse: Floats, chunks: list[int]) -> int:
    """Merge entries ``chunks`` (number -> place by position) by the definition; the place of the root."""
    level = dict(zip(chunks, range(len(chunks)), strict=True))
    while len(level) > 1:
        above: dict[int, int] = {}
        for number, place in sorted(level.items()):
            if number >> 1 in above:
                kernels.merge(o, lse, above[number >> 1], place)
            else:
                above[number >> 1] = place
        level = above
    return next(iter(level.values()))


@pytest.mark.long
@given(start=st.integers(0, 20), length=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_chunks_are_merged_in_the_aligned_tree(start: int, length: int) -> None:
    o, lse = parts(length, start)
    want_o, want_lse = o.copy(), lse.copy()
    place = tree(want_o, want_lse, list(range(start, start + length)))
    kernels.merge_to_root(o, lse, np.arange(start, start + length), np.empty(length, np.int64))
    assert place == 0
    assert np.array_equal(o[0], want_o[0])
    assert np.array_equal(lse[0], want_lse[0])


def test_another_tree_would_show() -> None:
    """The control: chunks 1, 2, 3 are (1), (2, 3), not (1, 2), (3)."""
    o, lse = parts(3, 1)
    other_o, other_lse = o.copy(), lse.copy()
    kernels.merge_to_root(o, lse, np.array([1, 2, 3]), np.empty(3, np.int64))
    kernels.merge_to_root(other_o, other_lse, np.array([0, 1, 2]), np.empty(3, np.int64))
    assert not (np.array_equal(o[0], other_o[0]) and np.array_equal(lse[0], other_lse[0]))


def test_exp_is_good_to_the_last_bits() -> None:
    x = -np.linspace(0, 87, 20001, dtype=np.float32)
    got = np.array([kernels.exp(v) for v in x], np.float32)
    want = np.exp(x.astype(np.float64))
    assert np.abs(got / want - 1).max() < 2.5e-7
    assert got[0] == 1
    assert 0 <= kernels.exp(np.float32(-np.inf)) < 1e-37
    assert np.isnan(kernels.exp(np.float32(np.nan)))


@pytest.mark.parametrize("groups", range(1, 10))
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8])
def test_all_sizes_of_the_unrolled_loops(groups: int, tokens: int) -> None:
    rng = np.random.default_rng(groups)
    q, k = rng.standard_normal((groups, 7), np.float32), rng.standard_normal((2, 3, 8, 7), np.float32)
    score, o = np.full((groups, 12), 9, np.float32), np.ones((groups, 7), np.float32)
    start = 8 - tokens
    kernels.score_block(q, k, 1, 2, start, 8, 2, score)
    assert np.allclose(score[:, 2 : 2 + tokens], q @ k[1, 2, start:].T, atol=1e-5)
    assert (np.delete(score, range(2, 2 + tokens), 1) == 9).all()
    kernels.accumulate_block(score, 2, k, 1, 2, start, 8, o)
    assert np.allclose(o, 1 + score[:, 2 : 2 + tokens] @ k[1, 2, start:], atol=1e-4)


def test_of_processes_that_start_together_one_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """And who waits in vain for one that stands still compiles in its place."""
    refused = list[bool]()

    def compile_here(self: Any, store: torch.dtype) -> None:
        with open(kernels.__file__) as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                refused.append(False)
            except BlockingIOError:
                refused.append(True)

    monkeypatch.setattr(backend.NumbaAttention, "compile_kernels", compile_here)
    backend.NumbaAttention(torch.float32)
    assert refused == [True]
    monkeypatch.setattr(backend, "COMPILE_S", 0.1)
    with open(kernels.__file__) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        backend.NumbaAttention(torch.float32)
    assert len(refused) == 2
