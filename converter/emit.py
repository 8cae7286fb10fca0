"""Turns the schedule of a slice into a callable program whose weights are the model's own tensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from .capture import Capture, Weight, module_path
from .errors import ConversionError
from .graph import Message, RowGraph, RowTensor, add_node, is_attention, operator_name
from .reorder import Schedule
from .slices import Cut, CutCall, MixerCall, Slice

aten = torch.ops.aten

# These never copy, unlike reshape or to, which the schema calls views as well.
VIEWS = {"slice", "view", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "select", "narrow"}


class StaticValues:
    """Evaluates nodes that depend on weights only."""

    def __init__(self, graph: RowGraph) -> None:
        self._graph = graph
        self._known: dict[fx.Node, Any] = {n: w.tensor for n, w in graph.capture.weights.items()}

    def __call__(self, node: fx.Node) -> Any:
        """Return the node's value, a view of a weight if the operators allow that. Raises KeyError if it depends on
        rows.
        """
        if node not in self._known:
            if node not in self._graph.static or self._graph.is_row_count(node) or node.op != "call_function":
                raise KeyError(node.name)
            args, kwargs = fx.map_arg((node.args, node.kwargs), self)
            with torch.no_grad():
                self._known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._known[node]


def weight_below(capture: Capture, node: fx.Node) -> Weight | None:
    """Return the weight that this node is, or is a pure view of; None if there is none."""
    while node not in capture.weights:
        if operator_name(node) not in VIEWS or len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    return capture.weights[node]


def carried_names(graph: RowGraph, nodes: Iterable[fx.Node]) -> list[str]:
    """Return readable names: graph inputs keep theirs, values of positions alone are "positions", all
    others "hidden".
    """
    names: list[str] = []
    for node in nodes:
        name = node.name if node.op == "placeholder" else "hidden" if graph.reads_tokens(node) else "positions"
        taken = sum(re.fullmatch(rf"{name}(_\d+)?", n) is not None for n in names)
        names.append(f"{name}_{taken}" if taken else name)
    return names


def describe_cut(graph: RowGraph, index: int, nodes: list[fx.Node]) -> Cut:
    """Return the names, shapes and bytes of the nodes of one cut."""
    tensors = [graph.row_tensor(n, name) for n, name in zip(nodes, carried_names(graph, nodes), strict=True)]
    return Cut(index, tuple(t for t in tensors if t is not None), graph.live_bytes(index))


def describe_call(graph: RowGraph, values: StaticValues, index: int, node: fx.Node) -> CutCall:
    """Return the shapes of the messages of an attention, and its other arguments as plain values and tensors.
    ``index``: number of its exchange.
    """
    where = module_path(node) or node.name
    missing = node.target._schema.arguments[len(node.args) :]  # type: ignore[union-attr]
    arguments = [*node.args, *(node.kwargs.get(p.name, p.default_value) for p in missing)]

    try:
        rest = fx.map_arg(tuple(arguments[3:]), values)
    except KeyError as error:
        raise ConversionError(f"argument {error} of the attention of {where} depends on more than weights") from None
    of = f"the attention of {where}"
    q, k, v = (_rows(graph, a, name, of) for a, name in zip(arguments, "qkv", strict=False))
    return CutCall(index, where, q, k, v, _rows(graph, node, "o", of), tuple(rest))


def describe_mixer(graph: RowGraph, values: StaticValues, index: int, node: fx.Node) -> MixerCall:
    """Return the shapes of the message of an operator with a list of inputs, and its other arguments. ``index``: number
    of its exchange.
    """
    where = module_path(node) or node.name
    inputs, *others = node.args
    try:
        rest = fx.map_arg(tuple(others), values)
    except KeyError as error:
        raise ConversionError(f"argument {error} of the mixer of {where} depends on more than weights") from None
    of = f"the mixer of {where}"
    sent = tuple(_rows(graph, a, f"input {i}", of) for i, a in enumerate(inputs))  # type: ignore[arg-type]
    return MixerCall(index, where, sent, _rows(graph, node, "m", of), tuple(rest))


def _rows(graph: RowGraph, value: Any, name: str, of: str) -> RowTensor:
    tensor = graph.row_tensor(value, name) if isinstance(value, fx.Node) else None
    if tensor is None:
        raise ConversionError(f"{name} of {of} must be a tensor with the row as dimension 0")
    return tensor


class Emitter:
    """Builds the graph of one slice; nodes are copied from the capture, weights are bound by name."""

    def __init__(self, graph: RowGraph, values: StaticValues, index: int, schedule: Schedule) -> None:
        self._graph, self._values, self._index, self._schedule = graph, values, index, schedule
        self._out = fx.Graph()
        self._root = nn.Module()
        self._weights: dict[str, Tensor] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._names: dict[fx.Node, str] = {}

    def build(self) -> Slice:
        schedule, out = self._schedule, self._out
        given = [*schedule.carried, *schedule.arrive]
        names = [*carried_names(self._graph, schedule.carried), *map(_output_name, schedule.arrive)]
        for node, name in zip(given, names, strict=True):
            self._copies[node] = self._annotate(out.placeholder(name), node)
        if schedule.messages:
            for _, message in schedule.messages:
                self._names |= dict(zip(message.operands, _operand_names(message), strict=True))
            self._names |= dict(zip(schedule.results, carried_names(self._graph, schedule.results), strict=True))
            self._send(schedule.messages)
        for node in schedule.rest:
            self._copy(node)
        out.output(tuple(self._copy(n) for n in schedule.results))
        module = fx.GraphModule(self._root, out, class_name=f"Slice{self._index}")
        return Slice(self._index, module, signature(module), self._weights)

    def _send(self, messages: list[tuple[list[fx.Node], Message]]) -> None:
        send = self._out.placeholder("send")
        for before, (method, operands) in messages:
            for node in before:
                self._copy(node)
            sent = tuple(map(self._copy, operands))
            self._out.create_node("call_method", method, (send, self._index, *sent), name=f"sent_{method}")

    def _annotate(self, copy: fx.Node, node: fx.Node) -> fx.Node:
        copy.meta = {k: v for k, v in node.meta.items() if k in ("val", "nn_module_stack")}
        return copy

    def _copy(self, node: Any) -> fx.Node:
        if node not in self._copies:
            self._copies[node] = self._make(node)
        return self._copies[node]

    def _make(self, node: fx.Node) -> fx.Node:
        capture = self._graph.capture
        if self._graph.is_row_count(node):
            anchor = next(n for n in self._out.nodes if n.op == "placeholder")
            return self._annotate(self._out.call_function(aten.sym_size.int, (anchor, 0)), node)
        if weight_below(capture, node) is not None:
            return self._bind(node)
        if node.op == "get_attr":  # the body of a higher-order operator
            self._root.add_module(node.target, getattr(capture.graph.owning_module, node.target))  # type: ignore[arg-type]
            return self._out.get_attr(node.target)  # type: ignore[arg-type]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._copy)
        copy = add_node(self._out, node.op, node.target, args, kwargs, self._name(node))
        return self._annotate(copy, node)

    def _name(self, node: fx.Node) -> str:
        """Return a node's name. Messages and results are named by their role, GEMMs and a module's last values by the
        module, all others by operator.
        """
        if node in self._names:
            return self._names[node]
        weights = [weight_below(self._graph.capture, a) for a in node.all_input_nodes]
        owner = next((w.fqn for w in weights if w is not None and w.tensor.dim() > 1), "").split(".")[:-1]
        path = module_path(node)
        if not owner and path and not all(module_path(u).startswith(path) for u in node.users):
            owner = path.split(".")
        # "self" would hide the module itself in the code that fx writes.
        named = bool(owner) and owner[-1].isidentifier() and owner[-1] != "self"
        return owner[-1] if named else operator_name(node)

    def _bind(self, node: fx.Node) -> fx.Node:
        label, tensor = weight_label(self._graph.capture, node), self._values(node)
        attribute = re.sub(r"\W+", "_", label).strip("_")
        while hasattr(self._root, attribute):  # a.b_c and a_b.c have the same attribute
            attribute += "_"
        if isinstance(tensor, nn.Parameter):
            self._root.register_parameter(attribute, tensor)
        else:
            self._root.register_buffer(attribute, tensor, persistent=False)
        self._weights[label] = tensor
        copy = self._annotate(self._out.get_attr(attribute), node)
        copy.meta["weight"] = label
        return copy


def _output_name(call: fx.Node) -> str:
    return "o" if is_attention(call) else "m"


def _operand_names(message: Message) -> list[str]:
    if message.method == "mix":
        return [f"x{i}" for i in range(len(message.operands))]
    return list(message.method)


def weight_label(capture: Capture, node: fx.Node) -> str:
    """Return a weight's dotted name. Views append their operation: ``wqkv.weight[0:4096]``, ``lm_head.weight.t()``."""
    weight: Weight | None = capture.weights.get(node)
    if weight is not None:
        return weight.fqn
    source, *args = node.args
    assert isinstance(source, fx.Node)
    label = weight_label(capture, source)
    if node.target is aten.slice.Tensor and len(args) >= 3:
        dim, start, end = args[:3]
        return f"{label}[{':, ' * int(str(dim))}{start}:{end}]"
    return f"{label}.{operator_name(node)}({', '.join(map(str, args))})"


def signature(module: fx.GraphModule) -> str:
    """Return a digest of the program: operators, wiring, constants, shapes and dtypes, without names and
    layer numbers.
    """
    number = {n: i for i, n in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        args = node.args
        if node.op == "call_method":
            args = (args[0], *args[2:])  # without the number of the call
        target = "" if node.op in ("placeholder", "get_attr") else str(node.target)
        wiring = fx.map_arg((args, node.kwargs), lambda a: f"%{number[a]}")
        value = node.meta.get("val") if node.op in ("placeholder", "get_attr") else None
        kind = (tuple(map(str, value.shape)), str(value.dtype)) if isinstance(value, Tensor) else None
        lines.append(f"{node.op} {target} {wiring} {kind}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
