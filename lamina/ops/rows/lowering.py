"""The lowering of a unit of ATen operators to instructions on rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lamina.converter.capture import size_expression

from .instructions import ROUND, STORED, TYPES, Instruction, Operation, UnsupportedError, View, packed

OVERLOADS = (
    "default", "Tensor", "Tensor_Scalar", "Scalar", "int", "using_ints", "dim", "self_int", "dtype", "device", "sizes",
)  # fmt: skip
Rule = Callable[..., Any]  # takes a Lowering, a node and its arguments; returns the view, or views, of the node


class SlotShape(NamedTuple):
    """A slot. ``numel``: elements of a row; of all of a weight, which has no rows."""

    dtype: torch.dtype
    numel: int
    with_rows: bool


class Lowering:
    """Turns the graph of one unit into instructions. ``slots``: those of placeholders come first."""

    def __init__(self, unit: fx.Graph, weights: int, rules: Mapping[str, Rule]) -> None:
        """``weights``: how many placeholders, the first ones, are weights, with their own strides. ``rules``: by
        operator. Raises UnsupportedError.
        """
        self._rules = rules
        self.placeholders = [n for n in unit.nodes if n.op == "placeholder"]
        self._rows = rows_of(self.placeholders)
        self.slots: list[SlotShape] = []
        self.instructions: list[Instruction] = []
        self.values: dict[fx.Node, Any] = {}
        for i, node in enumerate(self.placeholders):
            self.values[node] = self._given(node.meta["val"], i < weights)
        for node in unit.nodes:
            if node.op == "call_function":
                self.lower(node)
        (results,) = next(n for n in unit.nodes if n.op == "output").args
        self.results: list[View] = []
        for result in results:
            self.results.append(self._result(result))

    def lower(self, node: fx.Node) -> None:
        """Lower one operator. Raises UnsupportedError."""
        if node.target is operator.getitem:
            source, item = node.args
            self.values[node] = self.values[source][item]  # type: ignore[index]
            return
        name = name_of(node)
        if name == "sym_size":
            return
        rule = self._rules.get(name)
        if rule is None or any(isinstance(a, fx.Node) and not _is_value(a) for a in node.args):
            raise UnsupportedError(str(node.target))
        try:
            _signature(rule).bind(self, node, *node.args)
        except TypeError as e:
            raise UnsupportedError(f"{node.target} with {len(node.args)} arguments") from e
        self.values[node] = rule(self, node, *node.args)
        if any(not view.numel for each in self.instructions[-1:] for view in each.views):
            raise UnsupportedError(f"{node.target} of nothing")
        if isinstance(value := self.values[node], View):
            dtype = node.meta["val"].dtype
            if value.shape != self.shape_of(node) or value.dtype != dtype != torch.float32:
                raise UnsupportedError(f"{node.target} with dimensions of rows that move")

    def shape_of(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of one row of a node's tensor. Raises UnsupportedError if rows are not dimension 0."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            raise UnsupportedError(f"{node.target} gives no tensor")
        return row_shape(value, self._rows)

    def is_static(self, node: fx.Node) -> bool:
        """Return whether a node's tensor has no rows: a weight, or a view of one."""
        value = node.meta.get("val")
        return isinstance(value, Tensor) and not any(isinstance(n, torch.SymInt) for n in value.shape)

    def weight(self, node: Any) -> View:
        """Return the view of a weight. Raises UnsupportedError for an operand that is computed."""
        view = self.view(node)
        if self.slots[view.slot].with_rows:
            raise UnsupportedError("a weight that is computed")
        return view

    def quantized_weight(self, node: Any) -> View:
        """Return the view of a weight's bytes. Raises UnsupportedError for other operands."""
        view = self._operand(node)
        if view.dtype != torch.uint8 or not view.is_contiguous or view.offset:
            raise UnsupportedError("a quantized weight that is no row of bytes")
        return view

    def view(self, node: Any) -> View:
        """Return the view of an operand. Raises UnsupportedError if it is no tensor of numbers."""
        view = self._operand(node)
        if view.dtype not in TYPES:
            raise UnsupportedError(str(view.dtype))
        return view

    def _operand(self, node: Any) -> View:
        value = self.values.get(node) if isinstance(node, fx.Node) else None
        if not isinstance(value, View):
            raise UnsupportedError("an operand that is no tensor")
        return value

    def new(self, dtype: torch.dtype, shape: Sequence[int]) -> View:
        """Return a view of a new slot."""
        if dtype not in TYPES:
            raise UnsupportedError(str(dtype))
        view = View(len(self.slots), dtype, 0, tuple(shape), packed(shape))
        self.slots.append(SlotShape(dtype, view.numel, True))
        return view

    def compute(self, node: fx.Node, steps: Sequence[Operation]) -> View:
        """Run ``steps`` over the elements of ``node``; the last one is its value. Values of weights alone are computed
        for each row.
        """
        dtype = node.meta["val"].dtype
        return self.elementwise(steps, dtype, self.new(dtype, self.shape_of(node)))

    def elementwise(self, steps: Sequence[Operation], dtype: torch.dtype, to: View) -> View:
        """Run ``steps`` over all of ``to``, rounded to ``dtype``."""
        if torch.int64 in (dtype, to.dtype):
            raise UnsupportedError("integers that move")
        if not to.numel:
            return to
        operations = list(steps)
        if dtype in ROUND:
            operations.append(Operation(ROUND[dtype], len(operations) - 1))
        operations.append(Operation("store", len(operations) - 1, view=to))
        self.instructions.append(Instruction("elements", to.shape, operations))
        return to

    def load(self, node: Any, shape: Sequence[int]) -> Operation:
        """Return a load of the operand ``node``, broadcast to ``shape``."""
        view = self.view(node)
        if not self.is_static(node) and len(view.shape) != len(shape):
            raise UnsupportedError("rows that do not line up")
        return Operation("load", view=view.broadcast(shape))

    def packed(self, view: View, dtype: torch.dtype) -> View:
        """Return the same elements as ``dtype`` without gaps, alone in their slot."""
        slot = self.slots[view.slot]
        if view.is_contiguous and slot.dtype == dtype and slot.numel == view.numel:
            return view
        return self.elementwise([Operation("load", view=view)], dtype, self.new(dtype, view.shape))

    def _given(self, value: Any, as_it_lies: bool) -> View:
        with_rows = isinstance(value, Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)
        if not isinstance(value, Tensor) or value.dtype not in (TYPES if with_rows else STORED):
            raise UnsupportedError(f"is given {getattr(value, 'dtype', type(value).__name__)}")
        shape = row_shape(value, self._rows) if with_rows else tuple(value.shape)
        strides = value.stride() if as_it_lies and not with_rows else packed(shape)
        view = View(len(self.slots), value.dtype, 0, shape, tuple(strides))
        self.slots.append(SlotShape(value.dtype, view.numel, with_rows))
        return view

    def _result(self, node: fx.Node) -> View:
        """Return a result in a slot that belongs to no placeholder and no other result."""
        if self.is_static(node):
            raise UnsupportedError("a result without rows")
        view, dtype = self.view(node), node.meta["val"].dtype
        target = self.packed(view, dtype)
        taken = {v.slot for v in self.results}
        if target.slot < len(self.placeholders) or target.slot in taken:
            target = self.elementwise([Operation("load", view=target)], dtype, self.new(dtype, target.shape))
        return target


_signature = cache(signature)  # caches the signatures of rules


def _is_value(node: fx.Node) -> bool:
    """Return whether a node gives tensors, and not a number that is only known when slices run."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and all(isinstance(v, Tensor) for v in value))


def rows_of(placeholders: Sequence[fx.Node]) -> Any:
    """Return the number of rows, as a symbol; None if all are weights."""
    shapes = [n.meta["val"].shape for n in placeholders if isinstance(n.meta["val"], Tensor)]
    symbols = (size_expression(shape[0]) for shape in shapes if shape)
    return next((s for s in symbols if s is not None), None)


def row_shape(value: Tensor, rows: Any) -> tuple[int, ...]:
    """Return the shape of one row; for a tensor without rows, all of it. Raises UnsupportedError if rows are not
    dimension 0.
    """
    shape = list(value.shape)
    first = size_expression(shape[0]) if shape else None
    if first is not None and first != rows:
        raise UnsupportedError("several rows of one")
    rest = shape if first is None else shape[1:]
    if any(size_expression(n) is not None for n in rest):
        raise UnsupportedError("rows that are not dimension 0")
    return tuple(int(n) for n in rest)


def name_of(node: fx.Node) -> str:
    """Return ``linear`` for aten.linear.default, ``add`` for aten.add.Tensor; the whole name if no rule has such
    arguments.
    """
    packet = getattr(node.target, "overloadpacket", None)
    ours = getattr(node.target, "namespace", "") == "aten" and node.target._overloadname in OVERLOADS  # type: ignore[union-attr]
    return str(packet.__name__) if packet is not None and ours else str(node.target)


def check_no_options(node: fx.Node, *allowed: str) -> None:
    """Raise UnsupportedError if other keyword arguments are given."""
    if any(name not in allowed and value is not None for name, value in node.kwargs.items()):
        raise UnsupportedError(f"{node.target} with {dict(node.kwargs)}")
