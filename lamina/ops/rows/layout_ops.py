"""Operators that only reorder and convert elements; most of them cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .instructions import TYPES, Operation, UnsupportedError, View, packed
from .lowering import Lowering, Rule, check_no_options, name_of


def _convert(self: Lowering, node: fx.Node, x: Any, *_: Any) -> View:
    """Convert to another dtype. Wider floats are exact, so they are read in place; others are rounded."""
    check_no_options(node, "dtype", "device", "layout", "pin_memory", "non_blocking", "memory_format", "copy")
    view, dtype = self.view(x), node.meta["val"].dtype
    if node.meta["val"].device.type != "cpu":
        raise UnsupportedError("another device")
    before = x.meta["val"].dtype
    if dtype == before or (dtype == torch.float32 and before in TYPES):
        return view
    if dtype == torch.int64:
        raise UnsupportedError("integers of floats")
    return self.compute(node, [Operation("load", view=view)])


def _reshape(self: Lowering, node: fx.Node, x: Any, *_: Any) -> View:
    view, static = self.view(x), self.is_static(node)
    if static != self.is_static(x) or node.meta["val"].dtype != x.meta["val"].dtype:
        raise UnsupportedError("rows that come or go")
    shape = tuple(node.meta["val"].shape) if static else self.shape_of(node)
    if not view.is_contiguous:
        if static or view.dtype == torch.int64:
            raise UnsupportedError("a weight out of order")
        view = self.elementwise([Operation("load", view=view)], view.dtype, self.new(view.dtype, view.shape))
    return replace(view, shape=shape, strides=packed(shape))


def _moved(names: Callable[..., tuple[int, ...]]) -> Callable[..., View]:
    """Return the rule of an operator that only reorders dimensions. ``names``: the old dimension of each new one."""

    def rule(self: Lowering, node: fx.Node, x: Any, *args: Any) -> View:
        view, static = self.view(x), self.is_static(x)
        dims = x.meta["val"].dim()
        order = [d % dims for d in names(dims, *args)]
        if not static:
            if order[0] != 0:
                raise UnsupportedError("rows that move")
            order = [d - 1 for d in order[1:]]
        return replace(view, shape=tuple(view.shape[d] for d in order), strides=tuple(view.strides[d] for d in order))

    return rule


def _transposed(dims: int, a: int = 0, b: int = 1) -> tuple[int, ...]:
    order = list(range(dims))
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _dim(self: Lowering, x: Any, dim: int, more: int = 0) -> int:
    """Return a dimension of a row. Raises UnsupportedError for the dimension of rows."""
    dims: int = x.meta["val"].dim()
    axis = dim % (dims + more) - (not self.is_static(x))
    if axis < 0:
        raise UnsupportedError("rows that move")
    return axis


def _unsqueeze(self: Lowering, node: fx.Node, x: Any, dim: int) -> View:
    view, at = self.view(x), _dim(self, x, dim, 1)
    shape, steps = [*view.shape], [*view.strides]
    shape.insert(at, 1)
    steps.insert(at, 1)
    return replace(view, shape=tuple(shape), strides=tuple(steps))


def _part(self: Lowering, x: Any, dim: int, start: int, size: int, step: int = 1) -> View:
    view, at = self.view(x), _dim(self, x, dim)
    shape, steps = [*view.shape], [*view.strides]
    offset = view.offset + start * steps[at]
    shape[at], steps[at] = size, steps[at] * step
    return replace(view, offset=offset, shape=tuple(shape), strides=tuple(steps))


def _slice(
    self: Lowering, node: fx.Node, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> View:
    n = self.view(x).shape[_dim(self, x, dim)]
    first, last, step = slice(start, end, step).indices(n)
    return _part(self, x, dim, first, max(0, -(-(last - first) // step)), step)


def _select(self: Lowering, node: fx.Node, x: Any, dim: int, index: int) -> View:
    at = _dim(self, x, dim)
    view = _part(self, x, dim, index % self.view(x).shape[at], 1)
    return replace(
        view, shape=view.shape[:at] + view.shape[at + 1 :], strides=view.strides[:at] + view.strides[at + 1 :]
    )


def _split(self: Lowering, node: fx.Node, x: Any, sizes: Any, dim: int = 0) -> list[View]:
    dim = int(node.kwargs.get("dim", dim))  # type: ignore[arg-type]
    n = self.view(x).shape[_dim(self, x, dim)]
    if name_of(node) == "chunk":
        sizes = -(-n // sizes)
    if isinstance(sizes, int) and sizes < 1:
        raise UnsupportedError("parts of nothing")
    each = list(sizes) if isinstance(sizes, list | tuple) else [min(sizes, n - at) for at in range(0, n, sizes)]
    return [_part(self, x, dim, sum(each[:i]), size) for i, size in enumerate(each)]


def _expand(self: Lowering, node: fx.Node, x: Any, *_: Any) -> View:
    if self.is_static(node) != self.is_static(x):
        raise UnsupportedError("rows that come")
    return self.view(x).broadcast(tuple(node.meta["val"].shape) if self.is_static(node) else self.shape_of(node))


def _copy(self: Lowering, node: fx.Node, x: Any, *_: Any) -> View:
    return self.view(x)  # nothing here writes to existing memory


def _cat(self: Lowering, node: fx.Node, parts: Any, dim: int = 0) -> View:
    dim = int(node.kwargs.get("dim", dim))  # type: ignore[arg-type]
    stack = name_of(node) == "stack"
    at = _dim(self, parts[0], dim, int(stack))
    if any(self.is_static(p) for p in parts):
        raise UnsupportedError("weights next to rows")
    dtype = node.meta["val"].dtype
    if dtype == torch.int64 or any(p.meta["val"].dtype != dtype for p in parts):
        raise UnsupportedError(f"{node.target} of several dtypes")
    to, start = self.new(dtype, self.shape_of(node)), 0
    for part in parts:
        view = _unsqueeze(self, node, part, dim) if stack else self.view(part)
        target = replace(to, offset=start * to.strides[at], shape=view.shape)
        self.elementwise([Operation("load", view=view)], dtype, target)
        start += view.shape[at]
    return to


def _repeat_interleave(self: Lowering, node: fx.Node, x: Any, repeats: Any, dim: Any = None) -> View:
    if dim is None or not isinstance(repeats, int) or self.is_static(x):
        raise UnsupportedError("repeats")
    at, view = _dim(self, x, dim), self.view(x)
    steps = (*view.strides[: at + 1], 0, *view.strides[at + 1 :])
    wide = replace(view, shape=(*view.shape[: at + 1], repeats, *view.shape[at + 1 :]), strides=steps)
    dtype = node.meta["val"].dtype
    copied = self.elementwise([Operation("load", view=wide)], dtype, self.new(dtype, wide.shape))
    shape = self.shape_of(node)
    return replace(copied, shape=shape, strides=packed(shape))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("to", "_to_copy", "type_as"), _convert),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten"), _reshape),
    **dict.fromkeys(("clone", "contiguous", "alias", "detach"), _copy),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("t", "numpy_T"), _moved(lambda dims: tuple(range(dims))[::-1])),
    "transpose": _moved(_transposed), "mT": _moved(lambda dims: _transposed(dims, -2, -1)),
    "permute": _moved(lambda dims, order: tuple(order)),
    "unsqueeze": _unsqueeze, "slice": _slice, "select": _select, "expand": _expand,
    "repeat_interleave": _repeat_interleave,
}  # fmt: skip
