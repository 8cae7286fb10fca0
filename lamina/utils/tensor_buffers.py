"""Tensors over the bytes of messages, without a copy."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_NONE = torch.empty(0, dtype=torch.uint8)


def tensor_over(data: memoryview, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor that shares ``data``. Over the read-only bytes of a received message, only read it."""
    return torch.frombuffer(data, dtype=dtype)


def bytes_of(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, shared."""
    return x.view(-1).view(torch.uint8).numpy().data


def part_of(flat: Tensor, start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
    """Return the elements ``start .. stop`` of ``flat`` [N] as a tensor of ``shape``, shared, or an empty tensor."""
    return flat[start:stop].view(shape) if start < stop else _NONE


def pick(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return the rows ``rows`` of ``x``, as a copy; None: all of them, without a copy."""
    return x if rows is None else x[rows]


def _be_quiet_about_read_only() -> None:
    # torch warns of read-only buffers once per process: suppress it here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)


_be_quiet_about_read_only()
