"""The numbers of a row that depend on others, found without computing any of them.

Each operator is replaced by one that adds up what its results may depend on. So a result is above 0 exactly where it
may depend on a given number above 0. Its gradient is above 0 exactly at the given numbers on which it may depend.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from .graph import operator_name

aten = torch.ops.aten

# Operators that move numbers of one tensor and compute none.
MOVES = {
    "alias", "chunk", "clone", "contiguous", "detach", "expand", "flatten", "movedim", "narrow", "permute", "repeat",
    "repeat_interleave", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unflatten", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip
_JOINS = {"cat", "slice_scatter", "stack"}  # of several tensors
SUMS = {"mean", "sum"}
_CASTS = {"to", "_to_copy", "type_as", "float", "half", "bfloat16"}


def influence(nodes: Iterable[fx.Node], given: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Any]:
    """Return, for each of ``nodes`` in program order that may depend on ``given``, how much it does, [1, ...] for one
    row. ``given``: fp32 numbers of one row, which are at least 0.
    """
    known: dict[fx.Node, Any] = dict(given)
    for node in nodes:
        if node not in known and node.op == "call_function" and any(a in known for a in node.all_input_nodes):
            value = _value(node, known)
            if value is not None:
                known[node] = value
    return known


def is_pointwise(node: fx.Node) -> bool:
    """Return whether each number of the result depends on one number of each input."""
    tagged = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return tagged or operator_name(node) in _CASTS


def shape_of_row(value: Any) -> list[int]:
    """Return the shape of a captured tensor for one row."""
    return [_size(size) for size in value.shape]


def _size(size: Any) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, 1)))


def _value(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    name, result = operator_name(node), node.meta.get("val")
    if node.target is operator.getitem:
        return known[node.args[0]][node.args[1]]  # type: ignore[index]
    if name in MOVES or name in _JOINS:
        return _moved(node, known)
    if not isinstance(result, Tensor):
        return [_all_of(node, known, each) for each in result] if isinstance(result, tuple | list) else None
    shape = shape_of_row(result)
    if name in SUMS and len(node.args) > 1 and node.args[1]:
        source, dims, *keeps = node.args
        return known[source].sum(dims, keepdim=bool(keeps and keeps[0]))  # type: ignore[index]
    if name == "copy":  # of a second tensor, into the shape of the first
        written = known.get(node.args[1])  # type: ignore[arg-type]
        return None if written is None else written.expand(shape)
    if is_pointwise(node):
        read = node.all_input_nodes[:1] if name in _CASTS else node.all_input_nodes  # ``type_as``: the second's dtype
        inputs = [known[a] for a in read if isinstance(known.get(a), Tensor)]
        return sum((x.expand(shape) for x in inputs), torch.zeros(shape))
    return _all_of(node, known, result)


def _moved(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    def argument(of: fx.Node) -> Any:
        if of in known:
            return known[of]
        value = of.meta.get("val")
        return torch.zeros(shape_of_row(value)) if isinstance(value, Tensor) else _size(value)

    args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _all_of(node: fx.Node, known: Mapping[fx.Node, Any], result: Any) -> Tensor | None:
    """Return a result each of whose numbers may depend on all numbers of the inputs."""
    if not isinstance(result, Tensor):
        return None
    total = torch.zeros(())
    for each in node.all_input_nodes:
        for x in known[each] if isinstance(known.get(each), tuple | list) else [known.get(each)]:
            total = total if x is None else total + x.sum()
    return total.expand(shape_of_row(result))


def run_row(nodes: Iterable[fx.Node], given: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Any]:
    """Compute those of ``nodes``, in program order, that depend on ``given``, for one row. All other numbers that they
    read are random, from 0.5 to 1.5.
    """
    draw = torch.Generator().manual_seed(0)
    known, computed = dict[fx.Node, Any](given), set(given)

    def argument(of: fx.Node) -> Any:
        if of not in known:
            known[of] = random(value) if isinstance(value := of.meta.get("val"), Tensor) else _size(value)
        return known[of]

    def random(like: Tensor) -> Tensor:
        return (torch.rand(shape_of_row(like), generator=draw) + 0.5).to(like.dtype)

    for node in nodes:
        if node not in given and node.meta.get("val") is not None and not computed.isdisjoint(node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            computed.add(node)
    return {node: known[node] for node in computed}
