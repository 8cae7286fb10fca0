"""Gives operators of a sliced program to an object of the run: its linear layers, its meetings with other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
