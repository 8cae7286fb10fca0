"""The operators of layers whose weights are quantized: ``quantized_linear``, ``quantized_experts`` and
``quantized_rows`` of ``torch.ops.lamina``.

They are captured with the model and stay in its slices, where ``lamina.ops.gemm.bind`` gives them the worker's backend.
Until then the backend that has packed the weight computes it on threads of its own, so that a slice can be tried.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .quantized import PackedForm

if TYPE_CHECKING:
    from . import LinearBackend


@torch.library.custom_op("lamina::quantized_linear", mutates_args=())
def quantized_linear(x: Tensor, data: Tensor, b: Tensor | None, form: str) -> Tensor:
    """Return x [..., K] times the packed weight (data, form) [N, K] plus b [N]: [..., N], in x's dtype."""
    return _backend(PackedForm.decode(form).order, torch.get_num_threads()).linear_quantized(x, data, b, form)


@quantized_linear.register_fake
def _(x: Tensor, data: Tensor, b: Tensor | None, form: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], PackedForm.decode(form).cols)


@torch.library.custom_op("lamina::quantized_experts", mutates_args=())
def quantized_experts(x: Tensor, data: Tensor, ids: Tensor, b: Tensor | None, form: str) -> Tensor:
    """Return each row of x [rows, K] times the packed weight data[ids[row]] [N, K], plus b[ids[row]]: [rows, N]."""
    backend = _backend(PackedForm.decode(form).order, torch.get_num_threads())
    return backend.linear_quantized_experts(x, data, ids, b, form)


@quantized_experts.register_fake
def _(x: Tensor, data: Tensor, ids: Tensor, b: Tensor | None, form: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], PackedForm.decode(form).cols)


@torch.library.custom_op("lamina::quantized_rows", mutates_args=())
def quantized_rows(ids: Tensor, data: Tensor, form: str) -> Tensor:
    """Return rows ``ids`` [...], int64 or int32, of the packed weight (data, form) [N, K]: [..., K], in fp32. Raises
    ValueError for ids of another dtype.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids must be int64 or int32, not {ids.dtype}")
    backend = _backend(PackedForm.decode(form).order, torch.get_num_threads())
    return backend.quantized_rows(ids.long(), data, form)


@quantized_rows.register_fake
def _(ids: Tensor, data: Tensor, form: str) -> Tensor:
    return ids.new_empty(*ids.shape, PackedForm.decode(form).k_size, dtype=torch.float32)


@cache
def _backend(name: str, threads: int) -> LinearBackend:
    backend: LinearBackend = import_module(f".{name}", __package__).open_backend(threads)
    return backend


QUANTIZED_LINEAR_OP = torch.ops.lamina.quantized_linear.default
QUANTIZED_EXPERTS_OP = torch.ops.lamina.quantized_experts.default
QUANTIZED_ROWS_OP = torch.ops.lamina.quantized_rows.default
