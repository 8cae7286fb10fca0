"""Embeddings of tokens whose table stays packed; the layer that computes logits may multiply by the same bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.ops.gemm.quantized import PackedForm
from lamina.ops.gemm.quantized_op import QUANTIZED_ROWS_OP

_SCALE = "scalar_embed_scale"  # where transformers' classes have it as a number


class QuantizedEmbedding(nn.Module):
    """Embeddings whose table is packed. ``data`` [1, bytes] and ``form`` are as a backend has packed them."""

    data: Tensor

    def __init__(self, data: Tensor, form: str, dtype: torch.dtype, scale: float = 1.0) -> None:
        """``dtype``: of what is looked up. ``scale``: rows are multiplied by it, rounded to ``dtype``."""
        super().__init__()
        self._scale = float(torch.tensor(scale, dtype=dtype, device="cpu"))
        known = PackedForm.decode(form)
        self.num_embeddings, self.embedding_dim, self.form, self._dtype = known.cols, known.k_size, form, dtype
        self.register_buffer("data", data, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids`` [...] of the table, [..., embedding_dim]. Numbers are rounded, and their products by
        the scale once more.
        """
        rows: Tensor = QUANTIZED_ROWS_OP(ids, self.data, self.form)
        y = rows.to(self._dtype)
        return y if self._scale == 1 else y * self._scale


def is_table(module: object) -> bool:
    """Return whether a module looks rows up, and changes them by no more than one scale."""
    is_known = type(module) is nn.Embedding or hasattr(module, _SCALE)
    return isinstance(module, nn.Embedding) and module.max_norm is None and is_known


def scale_of(module: nn.Embedding) -> float:
    """Return the scale of rows of a module that ``is_table``."""
    return float(getattr(module, _SCALE, 1.0))
