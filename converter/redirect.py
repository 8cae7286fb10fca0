"""Redirects operators of a sliced program to an object of the run, such as its linear layers or its collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .slices import SlicedProgram


def redirect(program: SlicedProgram, name: str, owner: Any, methods: Mapping[Any, str]) -> SlicedProgram:
    """Return the program with each operator in ``methods`` called as that method of ``owner``, which slices hold as
    their attribute ``name``. The given program is used up: it may have been called before, and still holds what it
    called.
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
