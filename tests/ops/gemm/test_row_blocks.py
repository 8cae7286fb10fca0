"""Products of many rows by torch: blocks of rows have few sizes, so that a worker's memory does not grow with them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from lamina.ops.gemm import row_blocks

MANY = 5000


@given(st.integers(1, MANY))
def test_blocks_cover_all_rows(rows: int) -> None:
    covered = set[int]()
    for start, stop in row_blocks.blocks(rows):
        assert 0 <= start < stop
        assert start == 0 or stop <= rows, "only a block that is alone is padded"
        covered.update(range(start, stop))
    assert covered >= set(range(rows))


def test_blocks_have_few_sizes_for_any_number_of_rows() -> None:
    sizes = {stop - start for rows in range(row_blocks.FEWEST + 1, MANY) for start, stop in row_blocks.blocks(rows)}
    assert len(sizes) <= 36, "33 up to 640 rows, and 1024, 2048 and 4096"
    assert all(size % row_blocks.STEP_ALONE == 0 for size in sizes)
    assert list(row_blocks.blocks(2048)) == [(0, 2048)], "a whole chunk is one product"


@pytest.mark.parametrize("rows", [128, 129, 144, 300, 511, 639, 640, 641, 1000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_in_blocks_are_those_of_torch(rows: int, has_bias: bool) -> None:
    torch.manual_seed(rows)
    x, w = torch.randn(rows, 96, dtype=torch.bfloat16), torch.randn(40, 96, dtype=torch.bfloat16)
    b = torch.randn(40, dtype=torch.bfloat16) if has_bias else None
    with torch.no_grad():
        y = row_blocks.linear(x, w, b)
    right = F.linear(x.double(), w.double(), None if b is None else b.double())
    torch.testing.assert_close(y.double(), right, rtol=2**-7, atol=2**-5)


def test_leading_dimensions_and_strides_are_kept() -> None:
    x, w = torch.randn(3, 100, 192, dtype=torch.bfloat16)[..., ::2], torch.randn(40, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        y = row_blocks.linear(x, w, None)
    assert y.shape == (3, 100, 40)
    torch.testing.assert_close(y.double(), F.linear(x.double(), w.double()), rtol=2**-7, atol=2**-5)
