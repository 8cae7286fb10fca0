"""Operators that compute; each result is rounded to its dtype, as torch rounds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from lamina.ops.gemm.native import native_form
from lamina.ops.gemm.quantized_op import QUANTIZED_LINEAR_OP, QUANTIZED_ROWS_OP

from .instructions import ROUND, Instruction, Operation, UnsupportedError, View
from .lowering import Lowering, Rule, check_no_options, name_of

UNARY = {
    "neg": "neg", "silu": "silu", "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "cos": "cos", "sin": "sin",
    "rsqrt": "rsqrt", "sqrt": "sqrt", "exp": "exp", "square": "square", "reciprocal": "reciprocal",
}  # fmt: skip
POWERS = {2: "square", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
BINARY = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "maximum": "max", "minimum": "min"}
WITH_NUMBER = {"add": "add_to", "mul": "mul_by", "div": "div_by"}


def _unary(op: str) -> Callable[..., View]:
    def rule(self: Lowering, node: fx.Node, x: Any) -> View:
        return self.compute(node, [self.load(x, self.shape_of(node)), Operation(op, 0)])

    return rule


def _binary(name: str) -> Callable[..., View]:
    def rule(self: Lowering, node: fx.Node, x: Any, y: Any) -> View:
        check_no_options(node)
        if node.meta["val"].dtype == torch.int64:
            return _add_int(self, node, x, y)
        _refuse_mixtures(node, x, y)
        shape = self.shape_of(node)
        if isinstance(x, fx.Node) and isinstance(y, fx.Node):
            steps = [self.load(x, shape), self.load(y, shape), Operation(BINARY[name], 0, 1)]
        elif isinstance(x, fx.Node) and isinstance(y, int | float):
            op, value = ("add_to", -y) if name == "sub" else (WITH_NUMBER[name], y)
            if op == "add_to":  # torch rounds it first
                value = torch.tensor(value, dtype=node.meta["val"].dtype).item()
            steps = [self.load(x, shape), Operation(op, 0, value=float(value))]
        else:
            raise UnsupportedError(f"{node.target} of numbers")
        return self.compute(node, steps)

    return rule


def _refuse_mixtures(node: fx.Node, *operands: Any) -> None:
    """Raise UnsupportedError for operands that torch first rounds to the dtype of the result."""
    given = [n.meta["val"] for n in operands if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), Tensor)]
    narrow = node.meta["val"].dtype in ROUND
    if narrow and any(t.dtype == torch.int64 or (t.dim() == 0 and t.dtype == torch.float32) for t in given):
        raise UnsupportedError(f"{node.target} of {[t.dtype for t in given]}")


def _add_int(self: Lowering, node: fx.Node, x: Any, y: Any) -> View:
    if name_of(node) not in ("add", "sub") or not isinstance(y, int) or abs(y) > 1 << 53 or self.is_static(node):
        raise UnsupportedError(f"{node.target} of integers")
    view, to = self.view(x), self.new(torch.int64, self.shape_of(node))
    value = y if name_of(node) == "add" else -y
    self.instructions.append(Instruction("add_int", view.shape, views=[view, to], value=float(value)))
    return to


def _pow(self: Lowering, node: fx.Node, x: Any, exponent: Any) -> View:
    if exponent not in POWERS:
        raise UnsupportedError(f"a power of {exponent}")
    load = self.load(x, self.shape_of(node))
    if exponent == 3 and node.meta["val"].dtype == torch.bfloat16:  # torch rounds it twice
        return self.compute(node, [load, Operation("square", 0), Operation("round_bf16", 1), Operation("mul", 2, 0)])
    return self.compute(node, [load, Operation(POWERS[exponent], 0)])


def _gelu(self: Lowering, node: fx.Node, x: Any) -> View:
    check_no_options(node, "approximate")
    op = "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    return self.compute(node, [self.load(x, self.shape_of(node)), Operation(op, 0)])


def _clamp(self: Lowering, node: fx.Node, x: Any, low: Any = None, high: Any = None) -> View:
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    if not all(v is None or isinstance(v, int | float) for v in (low, high)):
        raise UnsupportedError("clamp by tensors")
    steps = [self.load(x, self.shape_of(node))]
    steps += [Operation("max_to", len(steps) - 1, value=float(low))] if low is not None else []
    steps += [Operation("min_to", len(steps) - 1, value=float(high))] if high is not None else []
    return self.compute(node, steps)


def _mean(self: Lowering, node: fx.Node, x: Any, dims: Any = None, keep: bool = False) -> View:
    check_no_options(node)
    view = self.view(x)
    if dims is None or [d % x.meta["val"].dim() for d in dims] != [x.meta["val"].dim() - 1] or not view.shape:
        raise UnsupportedError("a mean over several dimensions")
    if self.is_static(x) or view.dtype == torch.int64 or node.meta["val"].dtype != torch.float32:
        raise UnsupportedError("a mean of other than floats")
    to = self.new(torch.float32, (*view.shape[:-1], 1))
    self.instructions.append(Instruction("mean", view.shape, views=[view, to]))
    return to if keep else replace(to, shape=to.shape[:-1], strides=to.strides[:-1])


def _layer_norm(
    self: Lowering, node: fx.Node, x: Any, shape: Any, w: Any = None, b: Any = None, eps: float = 1e-5, *_: Any
) -> View:
    view = self.view(x)
    if len(shape) != 1 or w is None or self.is_static(x):
        raise UnsupportedError("a norm over several dimensions, or without weights")
    if view.dtype == torch.int64 or node.meta["val"].dtype != x.meta["val"].dtype:
        raise UnsupportedError("a norm of other than floats")
    to = self.new(node.meta["val"].dtype, self.shape_of(node))
    views = [view, to, *(self.weight(n) for n in (w, b) if n is not None)]
    self.instructions.append(Instruction("layer_norm", view.shape, views=views, value=float(eps)))
    return to


def _linear(self: Lowering, node: fx.Node, x: Any, w: Any, b: Any = None) -> View:
    weight = self.weight(w)
    return _product(self, node, x, w, weight, b)


def _matmul(self: Lowering, node: fx.Node, x: Any, w: Any) -> View:
    """Multiply by a weight that is stored transposed."""
    weight = self.weight(w)
    if len(weight.shape) != 2:
        raise UnsupportedError("a product of rows")
    return _product(self, node, x, w, replace(weight, shape=weight.shape[::-1], strides=weight.strides[::-1]), None)


def _product(self: Lowering, node: fx.Node, x: Any, w: Any, weight: View, b: Any) -> View:
    dtype = node.meta["val"].dtype
    whole = len(weight.shape) == 2 and weight.strides[-1] == 1 and weight.strides[0] and weight.numel
    if self.is_static(x) or not whole or weight.offset or weight.dtype != dtype:
        raise UnsupportedError("a product of rows")
    given = [x.meta["val"].dtype, w.meta["val"].dtype] + ([b.meta["val"].dtype] if b is not None else [])
    if any(d != dtype for d in given) or dtype == torch.int64:
        raise UnsupportedError("a product of several dtypes")
    bias = [self.weight(b)] if b is not None else []
    _check_bias(bias, weight.shape[0], dtype)
    packed_x, to = self.packed(self.view(x), dtype), self.new(dtype, self.shape_of(node))
    views = [packed_x, to, weight, *bias]
    each = Instruction("linear", packed_x.shape, views=views, n=weight.shape[0], leading=weight.strides[0])
    self.instructions.append(each)
    return to


def _quantized_linear(self: Lowering, node: fx.Node, x: Any, w: Any, b: Any, form: str) -> View:
    try:
        known = native_form(form)
    except ValueError as e:
        raise UnsupportedError(str(e)) from e
    weight, dtype = self.quantized_weight(w), node.meta["val"].dtype
    if self.is_static(x) or x.meta["val"].dtype != dtype or self.view(x).shape[-1:] != (known.form.k_size,):
        raise UnsupportedError("a quantized product of other rows")
    bias = [self.weight(b)] if b is not None else []
    _check_bias(bias, known.form.cols, dtype)
    packed_x, to = self.packed(self.view(x), dtype), self.new(dtype, self.shape_of(node))
    views = [packed_x, to, weight, *bias]
    self.instructions.append(Instruction("linear", packed_x.shape, views=views, n=known.form.cols, form=known))
    return to


def _check_bias(bias: Sequence[View], cols: int, dtype: torch.dtype) -> None:
    if any(v.shape != (cols,) or not v.is_contiguous or v.offset or v.dtype != dtype for v in bias):
        raise UnsupportedError("a bias with gaps")


def _embedding(self: Lowering, node: fx.Node, table: Any, ids: Any, *_: Any) -> View:
    weight, view = self.weight(table), self.view(ids)
    if self.is_static(ids) or view.dtype != torch.int64 or weight.strides[-1] != 1:
        raise UnsupportedError("a table that has rows")
    to = self.new(weight.dtype, self.shape_of(node))
    each = Instruction(
        "look_up",
        (*view.shape, weight.shape[1]),
        views=[view, to, weight],
        n=weight.shape[0],
        leading=weight.strides[0],
    )
    self.instructions.append(each)
    return to


def _quantized_rows(self: Lowering, node: fx.Node, ids: Any, table: Any, form: str) -> View:
    try:
        known = native_form(form)
    except ValueError as e:
        raise UnsupportedError(str(e)) from e
    weight, view = self.quantized_weight(table), self.view(ids)
    if self.is_static(ids) or view.dtype != torch.int64:
        raise UnsupportedError("a table that has rows")
    to, shape = self.new(torch.float32, self.shape_of(node)), (*view.shape, known.form.k_size)
    views = [view, to, weight]
    self.instructions.append(Instruction("look_up", shape, views=views, n=known.form.cols, form=known))
    return to


RULES: dict[str, Rule] = {
    **{name: _unary(op) for name, op in UNARY.items()},
    **{name: _binary(name) for name in BINARY},
    "pow": _pow, "gelu": _gelu, "clamp": _clamp, "mean": _mean, "layer_norm": _layer_norm, "linear": _linear,
    "matmul": _matmul, "embedding": _embedding, str(QUANTIZED_LINEAR_OP): _quantized_linear,
    str(QUANTIZED_ROWS_OP): _quantized_rows,
}  # fmt: skip
