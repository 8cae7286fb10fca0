"""Makes in-place operators functional if no other node can see the tensor that they write to. torch.export can do so
for all of them, but runs the whole program once more for it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

aten = torch.ops.aten

# Of other operators that torch composes of several, some return their argument itself without declaring it.
_FRESH = {aten.matmul.default, aten.linear.default}


def is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def make_functional(graph: fx.Graph) -> None:
    """Replace ``y = f_(x, ...)`` by ``y = f(x, ...)``, and later uses of x by y; other operators stay unchanged. x must
    be a tensor of its own: neither an input, nor a view, nor a tensor with an earlier view.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not is_mutable(node) or (plain := _functional(node.target)) is None:
            continue
        source: Any = node.args[0]
        before = [user for user in source.users if order[user] < order[node]]
        if is_fresh(source) and all(map(is_fresh, before)) and gives_the_same(plain, node):
            node.target = plain
            seen = {node, *before}
            source.replace_all_uses_with(node, delete_user_cb=lambda user, seen=seen: user not in seen)


def _functional(target: Any) -> torch._ops.OpOverload | None:
    """Return the functional form of an operator that writes only to its first argument and returns it; None if there is
    none.
    """
    written = [a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments]
    if not written[0] or any(written[1:]) or len(target._schema.returns) != 1:
        return None
    space, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None)
    overload: torch._ops.OpOverload | None = getattr(packet, target._overloadname, None)
    return None if overload is None or overload._schema.is_mutable else overload


def is_fresh(node: fx.Node) -> bool:
    """Return True if an operator's results share no memory with its arguments."""
    if node.target is operator.getitem:
        (parent,) = node.all_input_nodes
        return is_fresh(parent)
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if any(result.alias_info is not None for result in target._schema.returns):
        return False
    name: str = target.name()  # type: ignore[no-untyped-call]
    return target in _FRESH or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def gives_the_same(plain: torch._ops.OpOverload, node: fx.Node) -> bool:
    """Return True if the result has the dtype and shape of the tensor written to: a promoted result would be rounded in
    place.
    """
    values: Any = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = values
    with torch.no_grad():
        result, kept = plain(*args, **kwargs), args[0]
    return isinstance(result, Tensor) and (result.dtype, result.shape) == (kept.dtype, kept.shape)
