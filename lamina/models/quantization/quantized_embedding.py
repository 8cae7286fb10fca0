"""Embeddings of tokens whose table stays packed; the layer that computes logits may multiply by the same bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.ops.gemm.quantized import PackedForm
from lamina.ops.gemm.quantized_op import QUANTIZED_ROWS_OP


class QuantizedEmbedding(nn.Module):
    """A torch.nn.Embedding whose table is packed. ``data`` [1, bytes] and ``form`` are as a backend has packed them."""

    data: Tensor

    def __init__(self, data: Tensor, form: str, dtype: torch.dtype) -> None:
        """``dtype``: of what is looked up."""
        super().__init__()
        known = PackedForm.decode(form)
        self.num_embeddings, self.embedding_dim, self.form, self._dtype = known.cols, known.k_size, form, dtype
        self.register_buffer("data", data, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids`` [...] of the table, each number rounded once: [..., embedding_dim]."""
        y: Tensor = QUANTIZED_ROWS_OP(ids, self.data, self.form)
        return y.to(self._dtype)
