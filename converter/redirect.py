"""Gives operators of a sliced program to an object of the run: its linear layers, its meetings with other ranks."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from .slices import SlicedProgram


def redirect(program: SlicedProgram, name: str, owner: Any, methods: Mapping[Any, str]) -> SlicedProgram:
    """The program with each call of an operator in ``methods`` made on ``owner``, to the method named there; slices
    hold it as their attribute ``name``. The program given is used up: it may have been called before, and holds on to
    what it called.
    """
    for part in program.slices:
        _redirect(part.module, name, owner, methods)
    return replace(program, slices=tuple(replace(part) for part in program.slices))


def _redirect(module: Any, name: str, owner: Any, methods: Mapping[Any, str]) -> None:
    nodes = [n for n in module.graph.nodes if n.op == "call_function" and n.target in methods]
    if not nodes:
        return
    setattr(module, name, owner)
    with module.graph.inserting_before(nodes[0]):
        held = module.graph.create_node("get_attr", name)
    for node in nodes:
        node.op, node.target, node.args = "call_method", methods[node.target], (held, *node.args)
    module.recompile()


def join(program: SlicedProgram, name: str, owner: Any, target: Any, method: str) -> SlicedProgram:
    """The program with calls of the operator ``target`` on the same first operand made at once, where the others are
    weights and no message or other call of an object lies between them: ``owner.method(x, ((w, b), ...))`` gives a
    list; b is None where there is none. Slices hold ``owner`` as their attribute ``name``. The program given is used
    up.
    """
    for part in program.slices:
        for group in list(_alike(part.module.graph, target)):
            setattr(part.module, name, owner)
            _join(part.module.graph, name, method, group)
        part.module.recompile()
    return replace(program, slices=tuple(replace(part) for part in program.slices))


def _alike(graph: fx.Graph, target: Any) -> Iterator[list[fx.Node]]:
    groups = dict[fx.Node, list[fx.Node]]()
    for node in graph.nodes:
        if node.op in ("call_method", "output"):
            yield from (group for group in groups.values() if len(group) > 1)
            groups = {}
        elif node.target is target and not node.kwargs and all(w is None or w.op == "get_attr" for w in node.args[1:]):
            groups.setdefault(node.args[0], []).append(node)


def _join(graph: fx.Graph, name: str, method: str, group: list[fx.Node]) -> None:
    first, places = group[0], {node: i for i, node in enumerate(graph.nodes)}
    weights = [(*node.args[1:], None)[:2] for node in group]
    for weight in dict.fromkeys(w for pair in weights for w in pair if isinstance(w, fx.Node)):
        if places[weight] > places[first]:
            first.prepend(weight)
    with graph.inserting_before(first):
        held = graph.create_node("get_attr", name)
        call = graph.call_method(method, (held, first.args[0], tuple(weights)))
        for i, node in enumerate(group):
            item = graph.call_function(operator.getitem, (call, i))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item)
    for node in group:
        graph.erase_node(node)
