"""Products by torch of many rows, in blocks of rows whose sizes are few.

oneDNN, which torch calls for bf16 and fp16, makes code for each number of rows. It keeps about 1 MB of code for each
shape of weights. Prompts have any number of rows, so a process would grow by hundreds of megabytes. Blocks of more than
``FEWEST`` rows have 33 sizes, and a few larger ones. The last block begins earlier where its size is rounded up: some
rows are computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

LARGE = 512  # rows; blocks that others follow have so many, or a power of two times as many
FEWEST = 128  # rows; fewer are one block, whatever their number
STEP, STEP_ALONE = 64, 16  # the rows of the last block are a multiple, and those of a block that is alone


def multiply(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor) -> None:
    """Write x [rows, K] times w [N, K] plus b [N] to y [rows, N]; all have one dtype and none needs a gradient."""
    rows, w = x.shape[0], w.t()
    for start, stop in blocks(rows):
        if stop > rows:
            x, whole = F.pad(x, (0, 0, 0, stop - rows)), torch.empty(stop, y.shape[1], dtype=y.dtype)
            _multiply(x, w, b, whole)
            y.copy_(whole[:rows])
        else:
            _multiply(x[start:stop], w, b, y[start:stop])


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return x [..., K] times w [N, K] plus b [N], as torch computes it."""
    rows = x.numel() // max(x.shape[-1], 1)
    if not x.is_cpu or x.dtype.itemsize > 2 or rows <= FEWEST or torch.is_grad_enabled():
        return F.linear(x, w, b)
    y = torch.empty(*x.shape[:-1], w.shape[0], dtype=x.dtype)
    multiply(x.reshape(rows, -1), w, b, y.view(rows, -1))
    return y


def blocks(rows: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each block and the row after its last. One block alone may end after the last row."""
    start = 0
    while (left := rows - start) >= LARGE + FEWEST:
        size = LARGE << (left // LARGE).bit_length() - 1
        if 0 < left - size < FEWEST:
            size //= 2
        yield start, start + size
        start += size
    if not start and left > FEWEST:
        yield 0, _rounded(rows, STEP_ALONE)
    elif left > FEWEST:
        yield rows - _rounded(left, STEP), rows
    elif left:
        yield start, rows


def _multiply(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor) -> None:
    if b is None:
        torch.mm(x, w, out=y)
    else:
        torch.addmm(b, x, w, out=y)


def _rounded(rows: int, step: int) -> int:
    return -(-rows // step) * step
