"""The native backend's kernels refuse what is no tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamina.kv.paged_cache import RowTable
from lamina.kv.stored_format import StoredRows
from lamina.ops.attention import Operator
from lamina.ops.attention.merge import Partial
from lamina.ops.attention.spec import AttentionSpec

native = pytest.importorskip("lamina.ops.attention.native")


@pytest.mark.parametrize("absent", ["q", "k", "v", "o", "lse"])
def test_attention_without_a_tensor_is_an_error_and_reads_no_address(absent: str) -> None:
    """One new row of one head."""
    one = np.array([0]), np.array([0]), np.array([1]), np.array([0]), np.array([0]), np.array([0])
    rows = RowTable(0, 16, 0, *one, np.zeros((1, 8), np.int64))
    op = Operator(spec=AttentionSpec(scale=1.0), q_heads=1, kv_heads=1, qk_dim=32, v_dim=32)
    given = {name: torch.zeros(1, 1, 32) for name in ("q", "k", "v", "o")} | {"lse": torch.zeros(1, 1)}
    backend = native.NativeAttention(torch.float32)
    tensors = {name: None if name == absent else tensor for name, tensor in given.items()}
    kv, part = StoredRows(tensors["k"], tensors["v"]), Partial(tensors["o"], tensors["lse"])
    with pytest.raises(AttributeError, match="data_ptr"):
        backend.kernels.attend(backend.prepare(rows), op, False, tensors["q"], kv, part, None, 1)
