"""Prints the graph of a slice like handwritten code."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from .capture import module_path, size_expression
from .graph import is_expensive, operator_name

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_END = 2**63 - 1
_WIDTH = 100


def render(graph: fx.Graph, name: str) -> str:
    """Return Python-like text: weights by dotted name, shapes as comments, a blank line around each send.

    A value that is used once is written where it is used, as long as the line stays short. GEMMs, messages and results
    keep a line of their own.
    """
    return "\n".join(_Printer(graph).lines(name)) + "\n"


class _Printer:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._inlined: dict[fx.Node, str] = {}

    def lines(self, name: str) -> list[str]:
        placeholders = [n for n in self._graph.nodes if n.op == "placeholder"]
        lines = [f"def {name}({', '.join(n.name for n in placeholders)}):"]
        lines += [f"    # {n.name} {_shape(n)}" for n in placeholders if "val" in n.meta]
        path: str | None = None
        for node in self._graph.nodes:
            if node.op == "output":
                (results,) = node.args
                lines += [*_gap(lines), f"    return {', '.join(map(self.show, results))}"]
            elif node.op == "call_method":
                arguments = ", ".join(map(self.show, node.args[1:]))
                lines += [*_gap(lines), f"    send.{node.target}({arguments})", ""]
                path = None
            elif node.op == "call_function" and not _is_row_count(node):
                text = self._expression(node)
                if _may_be_inlined(node) and len(text) <= _WIDTH // 2:
                    self._inlined[node] = text
                    continue
                if (here := _block(node)) != path:
                    path = here
                    lines += [*_gap(lines), f"    # {path}"]
                lines.append(f"    {node.name} = {text}  # {_shape(node)}")
        return lines

    def show(self, value: Any) -> str:
        """Return an argument as text."""
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                return str(value.meta.get("weight", value.target))
            return "R" if _is_row_count(value) else self._inlined.get(value, value.name)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self.show, value))}]"
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        return "end" if isinstance(value, int) and value == _END else repr(value)

    def _expression(self, node: fx.Node) -> str:
        args = [self.show(a) for a in node.args]
        if node.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        name = operator_name(node)
        if name in _INFIX and len(args) == 2 and not node.kwargs:
            args = [f"({t})" if self._is_infix(a) else t for a, t in zip(node.args, args, strict=True)]
            return f"{args[0]} {_INFIX[name]} {args[1]}"
        args += [f"{k}={self.show(v)}" for k, v in node.kwargs.items()]
        return f"{name}({', '.join(args)})"

    def _is_infix(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and value in self._inlined and operator_name(value) in _INFIX


def _may_be_inlined(node: fx.Node) -> bool:
    if len(node.users) != 1 or is_expensive(node):
        return False
    (user,) = node.users
    uses: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), uses.append)
    if user.op != "call_function" or uses.count(node) != 1:
        return False
    between = node.next
    while between is not user:
        if between.op == "call_method":
            return False
        between = between.next
    return True


def _block(node: fx.Node) -> str:
    """Return the path of the layer's submodule (self_attn, mlp, a norm): deeper ones get no line."""
    parts = module_path(node).split(".")
    depth = next((i + 2 for i, p in enumerate(parts) if p.isdigit()), len(parts))
    return ".".join(parts[:depth])


def _is_row_count(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int


def _gap(lines: list[str]) -> list[str]:
    return [""] if lines[-1] else []


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        sizes = ["R" if getattr(size_expression(s), "is_Symbol", False) else str(s) for s in value.shape]
        return f"[{', '.join(sizes)}] {str(value.dtype).removeprefix('torch.')}"
    return f"{len(value)} tensors" if isinstance(value, (list, tuple)) else type(value).__name__
