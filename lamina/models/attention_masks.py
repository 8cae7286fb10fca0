"""The meaning of a model's attention masks.

Models build masks from rules that say which keys a query sees. A rule is evaluated here on integer indices, without
tensors, so it can be read while a model is being traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

MaskRule = Callable[[Any, Any, Any, Any], Any]  # (batch, head, query position, key position) -> visible

_QUERIES = 24  # query positions to evaluate, in addition to the last one


class _Indices(np.ndarray):
    """An array of positions as the rules of transformers expect it, with the few tensor methods that they call."""

    __array_priority__ = 2000.0  # above a tensor's, so that operations with tensors return arrays
    device = "cpu"

    def to(self, *args: Any, **kwargs: Any) -> _Indices:
        return self

    def new_ones(self, shape: tuple[int, ...], dtype: Any = None) -> _Indices:
        return np.ones(shape, dtype=bool).view(_Indices)

    def new_zeros(self, shape: tuple[int, ...], dtype: Any = None) -> _Indices:
        return np.zeros(shape, dtype=bool).view(_Indices)


def sliding_window_of(rule: MaskRule, length: int) -> int | None:
    """Return the window of a causal rule over ``length`` positions: tokens that a query sees, itself included; 0 for
    all. None if the rule is not causal with one window, or depends on data.
    """
    keys = np.arange(length, dtype=np.int32).view(_Indices)
    queries = np.unique(np.linspace(0, length - 1, min(length, _QUERIES)).astype(np.int32)).view(_Indices)
    try:
        visible = np.asarray(rule(0, 0, queries[:, None], keys[None, :]))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, NotImplementedError):
        return None
    if visible.dtype != np.bool_:
        return None
    visible = np.broadcast_to(visible, (len(queries), length))
    seen = int(visible[-1].sum())
    age = np.asarray(queries)[:, None] - np.asarray(keys)[None, :]
    if seen == 0 or not np.array_equal(visible, (age >= 0) & (age < seen)):
        return None
    return 0 if seen == length else seen


class WholeMask(Tensor):
    """A mask of which a slice that has all of it is the same mask. Any other result is an altered one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and _takes_all(args[0].shape, args[1]):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _takes_all(shape: Sequence[int], index: Any) -> bool:
    """Return whether an index takes all of a shape, by what it says: a slice of the last 32 does not, however few there
    are.
    """
    parts = index if isinstance(index, tuple) else (index,)
    return len(parts) <= len(shape) and all(
        isinstance(p, slice) and p.start in (None, 0) and p.stop in (None, size) and p.step in (None, 1)
        for p, size in zip(parts, shape, strict=False)
    )
