"""``torch.ops.lamina.linear_on``: a linear layer of compiled code, on a backend that the code is given."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("lamina::linear_on", mutates_args=())
def linear_on(x: Tensor, w: Tensor, b: Tensor | None, backend: Tensor) -> Tensor:
    """x [..., K], w [N, K], b [N] -> [..., N]. ``backend``: see ``gemm.Inline``; where nothing is compiled, torch's."""
    return F.linear(x, w, b)


@linear_on.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None, backend: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


LINEAR_ON = torch.ops.lamina.linear_on.default
