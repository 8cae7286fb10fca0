"""Products of rows by the packed weights of their experts: rows of one expert are multiplied together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .quantized import PackedForm

Linear = Callable[[Tensor, Tensor, Tensor | None, str], Tensor]


def by_expert(linear: Linear, x: Tensor, data: Tensor, ids: Tensor, b: Tensor | None, form: str) -> Tensor:
    """Return each row of x [rows, K] times the packed weight data[ids[row]] [1, bytes] plus b[ids[row]], by ``linear``:
    [rows, N]. Raises ValueError for operands that do not fit.
    """
    if x.dim() != 2 or ids.shape != x.shape[:1] or (b is not None and len(b) != len(data)):
        raise ValueError(f"{tuple(ids.shape)} numbers of experts do not fit rows {tuple(x.shape)}")
    counts = torch.bincount(ids, minlength=len(data)).tolist()
    if len(counts) > len(data):
        raise ValueError(f"there are {len(data)} experts, and a row names number {len(counts) - 1}")
    order = ids.argsort(stable=True)
    taken, y = x[order], x.new_empty(len(x), PackedForm.decode(form).cols)
    first = 0
    for expert, count in enumerate(counts):
        if count:
            own = slice(first, first := first + count)
            y[order[own]] = linear(taken[own], data[expert : expert + 1], None if b is None else b[expert], form)
    return y
