"""Facts about a captured step: which values are free, which are expensive, how many bytes each carries past a cut, and
how they depend on each other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .capture import Capture, size_expression

# Work that must never be done twice to save bytes. Everything else (element-wise, views, RoPE tables) may be.
_EXPENSIVE = {
    "linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum", "embedding", "_grouped_mm", "grouped_mm",
    "scaled_dot_product_attention", "topk", "sort", "argsort", "nonzero", "conv1d", "conv2d", "convolution",
    "_scaled_mm", "_weight_int4pack_mm", "_weight_int8pack_mm",
}  # fmt: skip
_OUTER_PRODUCTS = {"matmul", "bmm", "mm"}


def add_node(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str | None = None) -> fx.Node:
    """Add a node like Graph.create_node, but without its slow search for bare symbols in arguments: there are none."""
    node = graph.create_node(op, target, name=name)
    node.args, node.kwargs = args, kwargs
    return node


def operator_name(node: fx.Node) -> str:
    """Return ``linear`` for aten.linear.default, and the Python name of anything that is no torch operator."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", str(node.target))


def is_expensive(node: fx.Node) -> bool:
    """Return True for GEMMs, lookups, sorts and non-aten operators. A product over one element (K = 1) is element-wise
    work.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    name = operator_name(node)
    left = node.args[0] if node.args else None
    if name in _OUTER_PRODUCTS and isinstance(left, fx.Node) and left.meta["val"].shape[-1] == 1:
        return False
    return node.target.namespace != "aten" or name in _EXPENSIVE


@dataclass(frozen=True)
class RowTensor:
    """A tensor of R rows that crosses a boundary; ``shape`` is that of one row (without R)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        sizes = ", ".join(("R", *map(str, self.shape)))
        return f"{self.name} [{sizes}] {str(self.dtype).removeprefix('torch.')}"


class Message(NamedTuple):
    """Operands of a call that are sent together, by the method of ``Send`` of that name."""

    method: str
    operands: tuple[fx.Node, ...]


def messages_of(call: fx.Node) -> list[Message]:
    """Return the messages of an operator at which the model is cut. An operator whose first argument is a list of
    inputs has one message; else it is attention.
    """
    if isinstance(call.args[0], (list, tuple)):
        return [Message("mix", tuple(a for a in call.args[0] if isinstance(a, fx.Node)))]
    q, k, v = call.args[:3]
    return [Message("q", (q,)), Message("kv", (k, v))]  # type: ignore[arg-type]


def is_attention(call: fx.Node) -> bool:
    """Return True for an operator of q, k and v."""
    return not isinstance(call.args[0], (list, tuple))


class RowGraph:
    """A capture, and the facts about its nodes that the planner needs. ``calls`` are in program order. An *exchange* is
    a call, or several of different operators that do not need each other; exchanges are numbered in program order. A
    node is *static* if it depends only on weights and the number of rows: it is free and available in every slice.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.calls = capture.calls
        self.exchanges = _exchanges(capture)
        self.nodes = [n for n in capture.graph.nodes if n.op != "output"]
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.static: set[fx.Node] = set()
        for node in self.nodes:
            if self._is_static(node):
                self.static.add(node)
        self._token_readers = self._readers_of(capture.inputs[0])
        self._needed_by = self._first_call_that_needs()
        self._waits_for = self._last_call_waited_for()

    def _is_static(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return node in self.capture.weights
        if self.is_row_count(node):
            return True
        return node not in self.calls and all(a in self.static for a in node.all_input_nodes)

    def is_row_count(self, node: fx.Node) -> bool:
        """Return True if this node is the integer R itself, from any tensor."""
        return node.target is torch.ops.aten.sym_size.int and self._is_rows(node.meta["val"])

    def _is_rows(self, size: object) -> bool:
        return bool(size_expression(size) == self.capture.rows)

    def row_tensor(self, node: fx.Node, name: str = "") -> RowTensor | None:
        """Return shape and dtype per row; None if the node is no tensor with the row as dimension 0, and only there."""
        value = node.meta["val"]
        if not isinstance(value, Tensor) or value.dim() == 0 or not self._is_rows(value.shape[0]):
            return None
        if any(size_expression(size) is not None for size in value.shape[1:]):
            return None
        return RowTensor(name or node.name, tuple(value.shape[1:]), value.dtype)

    def _readers_of(self, source: fx.Node) -> set[fx.Node]:
        readers = {source}
        for node in self.nodes:
            if not readers.isdisjoint(node.all_input_nodes):
                readers.add(node)
        return readers

    def reads_tokens(self, node: fx.Node) -> bool:
        """Return True if this node depends on the token ids, not on positions alone."""
        return node in self._token_readers

    def _first_call_that_needs(self) -> dict[fx.Node, int]:
        """Return for every node the number of the first exchange that needs it; their number if none does."""
        last = len(self.exchanges)
        first = dict.fromkeys(self.nodes, last)
        number = self._numbers()
        for node in reversed(self.nodes):
            reach = min(first[node], number.get(node, last))
            for source in node.all_input_nodes:
                first[source] = min(first[source], reach)
        return first

    def _last_call_waited_for(self) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}
        number = self._numbers()
        for node in self.nodes:
            last[node] = max((last[a] for a in node.all_input_nodes), default=-1)
            last[node] = max(last[node], number.get(node, -1))
        return last

    def _numbers(self) -> dict[fx.Node, int]:
        return {call: i for i, calls in enumerate(self.exchanges) for call in calls}

    def live_bytes(self, exchange: int) -> int:
        """Return the bytes per token of values that, in the model's own order, are computed before this exchange and
        used after it.
        """
        at = min(self.order[call] for call in self.exchanges[exchange])
        alive = 0
        for node in self.nodes[:at]:
            crosses = node not in self.static and any(self.order.get(u, len(self.nodes)) > at for u in node.users)
            if crosses and node.op != "placeholder" and (tensor := self.row_tensor(node)) is not None:
                alive += tensor.bytes_per_token
        return alive

    def runs_before(self, node: fx.Node, exchange: int) -> bool:
        """Return True if a message needs this node to run before exchange number ``exchange`` starts."""
        return self._needed_by[node] <= exchange

    def waits_for(self, node: fx.Node, exchange: int) -> bool:
        """Return True if this node depends on an output of exchange number ``exchange`` or a later one."""
        return self._waits_for[node] >= exchange

    def closure(self, roots: Iterable[fx.Node], stop: Callable[[fx.Node], bool]) -> set[fx.Node]:
        """Return ``roots`` and the nodes from which they are computed, without static ones. Stops at nodes where
        ``stop`` is True.
        """
        seen: set[fx.Node] = set()
        stack = [r for r in roots if r not in self.static]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if not stop(node):
                stack += [a for a in node.all_input_nodes if a not in self.static and a not in seen]
        return seen

    def sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the nodes in program order."""
        return sorted(nodes, key=self.order.__getitem__)


def _exchanges(capture: Capture) -> list[tuple[fx.Node, ...]]:
    """Return the calls, those together that need no output of each other; attention is first. One of each operator."""
    groups: list[list[fx.Node]] = []
    needs: dict[fx.Node, set[fx.Node]] = {}  # the calls that a node depends on, the node itself included
    calls = set(capture.calls)
    if len({call.target for call in calls}) == 1:  # true of most models
        return [(call,) for call in capture.calls]
    for node in capture.graph.nodes:
        needs[node] = set().union(*(needs[a] for a in node.all_input_nodes), (node,) if node in calls else ())
        if node not in calls:
            continue
        last = groups[-1] if groups else []
        if last and not needs[node] & {*last} and node.target not in {call.target for call in last}:
            last.append(node)
        else:
            groups.append([node])
    return [tuple(sorted(calls, key=lambda call: not is_attention(call))) for calls in groups]
