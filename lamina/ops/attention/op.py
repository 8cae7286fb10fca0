"""The opaque operator at which the converter cuts a model: ``torch.ops.lamina.attention``.

It is captured, never executed: a slice ends at its inputs, the next slice begins at its output, and memory workers do
the work between the two.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("lamina::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, layer: int, spec: str, sinks: Tensor | None, slopes: Tensor | None
) -> Tensor:
    """Compute causal self-attention of one layer over a sequence's stored and new tokens; never executed. Shapes, with
    R rows (one token each): q [R, Hq, 1, D], k [R, Hkv, 1, D], v [R, Hkv, 1, Dv] -> [R, 1, Hq, Dv], in q's dtype. Query
    head h reads KV head h // (Hq / Hkv). ``spec`` is ``AttentionSpec.encode()``; ``sinks`` and ``slopes`` are [Hq].
    """
    raise RuntimeError("lamina::attention is a place to cut, it is never executed: run the model through its slices")


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: int, spec: str, sinks: Tensor | None, slopes: Tensor | None) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


ATTENTION_OP = torch.ops.lamina.attention.default
