"""Writes a capture as text and reads it, so that its model need not be traced again.

The JSON names operators of torch and Python's arithmetic, and no other code. Sizes are numbers or linear in the number
of rows R. Weights are named. Small constants, which the model made while it was traced, are written out.
"""

from __future__ import annotations

import base64
import json
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from .capture import Capture, Weight, module_path, size_expression
from .graph import add_node

LARGEST_CONSTANT = 1 << 16  # bytes
_ROWS = 3  # rows of the example shapes; any number that torch does not treat specially
_ARITHMETIC = {"getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge"}
_PLAIN = (bool, int, float, str, type(None))
_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class NotPortableError(ValueError):
    """This capture cannot be written, or no capture of this module can be read from this text."""


def write(capture: Capture, step: nn.Module) -> str:
    """Return a capture as text. ``step``: the captured module. Raises NotPortableError if the text cannot hold
    everything.
    """
    nodes = _needed(capture)
    number = {node: i for i, node in enumerate(nodes)}
    kept = _Writer(capture.rows, number)
    try:
        text = {
            "nodes": [kept.node(node) for node in nodes],
            "weights": {str(number[n]): kept.weight(w, step) for n, w in capture.weights.items() if n in number},
            "inputs": [number[node] for node in capture.inputs],
            "calls": [number[node] for node in capture.calls],
            "logits": number[capture.logits],
        }
    except KeyError as error:
        raise NotPortableError(f"{error} is no part of the graph") from error
    return json.dumps({**text, "values": kept.values}, separators=(",", ":"))


def read(text: str, step: nn.Module) -> Capture:
    """Return the capture of ``step``, whose weights are bound by name. Raises NotPortableError for anything
    unexpected.
    """
    try:
        return _Reader(json.loads(text)).capture(step)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise NotPortableError(f"{type(error).__name__}: {error}") from error


def _needed(capture: Capture) -> list[fx.Node]:
    """Return the nodes that some result needs, in the graph's order. All others, such as torch's assertions about
    sizes, would not be in a slice either.
    """
    needed, stack = set(capture.inputs), [capture.graph.output_node(), capture.logits, *capture.calls]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    return [node for node in capture.graph.nodes if node in needed]


class _Writer:
    """Writes nodes and weights as plain data. ``values``: sizes and dtypes of results, each once."""

    def __init__(self, rows: Any, number: dict[fx.Node, int]) -> None:
        self.values: list[Any] = []
        self._rows, self._number = rows, number
        self._seen: dict[str, int] = {}

    def node(self, node: fx.Node) -> list[Any]:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NotPortableError(f"{node.name} is a {node.op}")
        target = _name(node.target) if node.op == "call_function" else str(node.target)
        known = [self._value(node.meta["val"])] if "val" in node.meta else []
        kwargs = {key: self._argument(value) for key, value in node.kwargs.items()}
        return [node.op, node.name, target, self._argument(tuple(node.args)), kwargs, module_path(node), *known]

    def weight(self, weight: Weight, step: nn.Module) -> list[Any]:
        """Return the weight's name; if no attribute of the module has the weight, also its dtype, shape and bytes."""
        tensor, own = weight.tensor, _attribute(step, weight.fqn)
        if own is tensor:
            return [weight.fqn]
        if own is not None:
            raise NotPortableError(f"{weight.fqn} of the capture is not that of the module")
        if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > LARGEST_CONSTANT:
            raise NotPortableError(f"{weight.fqn} is a constant on {tensor.device} of {tuple(tensor.shape)}")
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [weight.fqn, _bare(tensor.dtype), list(tensor.shape), base64.b64encode(data).decode()]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, fx.Node):
            return {"node": self._number[value]}
        if isinstance(value, tuple | list):
            return {"tuple" if isinstance(value, tuple) else "list": [self._argument(each) for each in value]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        for kind, type_of in _KINDS.items():
            if isinstance(value, type_of):
                return {kind: _bare(value)}
        raise NotPortableError(f"an argument is a {type(value).__name__}")

    def _value(self, value: Any) -> int:
        stored = self._described(value)
        key = json.dumps(stored)
        if key not in self._seen:
            self._seen[key] = len(self.values)
            self.values.append(stored)
        return self._seen[key]

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            sizes, strides = map(self._size, value.shape), map(self._size, value.stride())
            return {"tensor": [_bare(value.dtype), str(value.device), list(sizes), list(strides)]}
        if isinstance(value, torch.SymInt):
            return {"size": self._size(value)}
        if isinstance(value, tuple | list):
            return {"tuple" if isinstance(value, tuple) else "list": [self._described(each) for each in value]}
        if isinstance(value, bool | int | float | type(None)):
            return value
        raise NotPortableError(f"a result is a {type(value).__name__}")

    def _size(self, size: Any) -> int | list[int]:
        """Return a number, or [a, b] for a * R + b."""
        expression = size_expression(size)
        if expression is None:
            return int(size)
        factor = expression.coeff(self._rows)
        rest = expression - factor * self._rows
        if not (factor.is_Integer and rest.is_Integer):
            raise NotPortableError(f"the size {expression} is not linear in the number of rows")
        return [int(factor), int(rest)]


class _Reader:
    def __init__(self, stored: Any) -> None:
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self._told = stored
        shapes = ShapeEnv()
        rows, source = ConstantSource("R"), DimDynamic.DYNAMIC
        symbol: Any = shapes.create_symbol(_ROWS, rows, source, do_not_specialize_zero_one=True)
        self._rows: Any = shapes.create_symintnode(symbol, hint=_ROWS, source=rows)
        self._mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
        self._sizes = {(1, 0): self._rows}  # arithmetic of symbols is slow
        self._values = [self._value(each) for each in stored["values"]]
        self._nodes: list[fx.Node] = []

    def capture(self, step: nn.Module) -> Capture:
        graph, stored = fx.Graph(), self._told
        for op, name, target, args, kwargs, path, *known in stored["nodes"]:
            what: Any = _operator(target) if op == "call_function" else target
            if op not in ("placeholder", "call_function", "output"):
                raise NotPortableError(f"{name} is a {op}")
            named = {key: self._argument(value) for key, value in kwargs.items()}
            node = add_node(graph, op, what, self._argument(args), named, name)
            node.meta["nn_module_stack"] = {"": (path, "")}
            if known:
                node.meta["val"] = self._values[known[0]]
            self._nodes.append(node)
        nodes = self._nodes
        weights = {nodes[int(i)]: self._weight(nodes[int(i)], given, step) for i, given in stored["weights"].items()}
        inputs, calls = (tuple(nodes[i] for i in stored[each]) for each in ("inputs", "calls"))
        return Capture(graph, weights, inputs, calls, nodes[stored["logits"]], size_expression(self._rows))

    def _weight(self, node: fx.Node, given: list[Any], step: nn.Module) -> Weight:
        fqn, *constant = given
        if constant:
            dtype, shape, data = constant
            flat = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, dtype))
            return Weight(fqn, flat.reshape(shape))
        tensor, expected = operator.attrgetter(fqn)(step), node.meta["val"]
        if tuple(tensor.shape) != tuple(expected.shape) or tensor.dtype != expected.dtype:
            raise NotPortableError(f"{fqn} is {tuple(tensor.shape)}, {tensor.dtype}")
        return Weight(fqn, tensor)

    def _argument(self, stored: Any) -> Any:
        if not isinstance(stored, dict):
            return stored
        ((kind, value),) = stored.items()
        if kind == "node":
            return self._nodes[value]
        if kind in ("tuple", "list"):
            return _sequence(kind, value, self._argument)
        if kind == "device":
            return torch.device(value)
        member = getattr(torch, value)
        if not isinstance(member, _KINDS[kind]):
            raise NotPortableError(f"{value} is no {kind}")
        return member

    def _value(self, stored: Any) -> Any:
        if not isinstance(stored, dict):
            return stored
        ((kind, value),) = stored.items()
        if kind == "tensor":
            from torch._subclasses.fake_tensor import FakeTensor

            dtype, device, *sizes = value
            shape, strides = ([self._size(each) for each in of] for of in sizes)
            bare = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")
            return FakeTensor(self._mode, bare, torch.device(device))  # takes a third of the time of the mode's own way
        return self._size(value) if kind == "size" else _sequence(kind, value, self._value)

    def _size(self, stored: int | list[int]) -> Any:
        if isinstance(stored, int):
            return stored
        factor, rest = stored
        if (factor, rest) not in self._sizes:
            self._sizes[factor, rest] = factor * self._rows + rest
        return self._sizes[factor, rest]


def _sequence(kind: str, stored: list[Any], of: Callable[[Any], Any]) -> Any:
    return {"tuple": tuple, "list": list}[kind](map(of, stored))


def _bare(value: object) -> str:
    return str(value).removeprefix("torch.")


def _attribute(step: nn.Module, fqn: str) -> object:
    try:
        return operator.attrgetter(fqn)(step)
    except AttributeError:
        return None


def _name(target: Any) -> str:
    """Return ``aten.mul.Tensor``, or ``mul`` for Python's operator."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{operator_of(target)}.{target._overloadname}"
    name: str = getattr(target, "__name__", "")
    if name in _ARITHMETIC and getattr(operator, name) is target:
        return name
    raise NotPortableError(f"{target} is no operator of torch")


def operator_of(target: torch._ops.OpOverload) -> str:
    return target._schema.name.split("::")[1]


def _operator(name: str) -> Any:
    if name in _ARITHMETIC:
        return getattr(operator, name)
    namespace, packet, overload = name.split(".")
    overloaded = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(overloaded, torch._ops.OpOverload):
        raise NotPortableError(f"{name} is no operator of torch")
    return overloaded
