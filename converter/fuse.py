"""Replaces the operators between a slice's messages and collectives by one call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .emit import VIEWS
from .graph import add_node, operator_name
from .slices import SlicedProgram

Unit = Callable[..., tuple[Tensor, ...]]
Bind = Callable[[Sequence[Tensor]], Unit]  # makes a unit from its weights

aten = torch.ops.aten

_CHEAP = VIEWS | {"reshape", "getitem", "split", "split_with_sizes", "chunk"}


def fuse(
    program: SlicedProgram, takes: Callable[[fx.Node], bool], build: Callable[[fx.Graph, int], Bind | None]
) -> SlicedProgram:
    """Replace every run of operators that ``takes`` by one call, and return the program; the given one is used up.

    A unit's arguments are tensors only, weights first and then those of rows; it returns a tuple of tensors. Its nodes
    have the captured tensors as ``meta["val"]``, its weights themselves. Rows are dimension 0 if its size is symbolic.
    ``build`` gets a unit and the number of its weights, once for equal units. If it returns None the run stays, as do
    runs of views only.
    """
    places = [(part.module, cut) for part in program.slices for cut in _cuts(part.module, takes)]
    built: dict[str, Bind | None] = {}
    items: dict[fx.Node, fx.Node] = {}
    for number, (module, cut) in enumerate(places):
        key = _key(cut.unit)
        if key not in built:
            built[key] = build(cut.unit, sum(n.op == "get_attr" for n in cut.given))
        if (bind := built[key]) is not None:
            _replace(module, f"unit_{number}", cut, bind, items)
    for part in program.slices:
        part.module.recompile()
    return replace(program, slices=tuple(replace(part) for part in program.slices))


def has_rows(node: fx.Node) -> bool:
    """Return True if dimension 0 of the captured tensor is that of rows."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() > 0 and isinstance(value.shape[0], torch.SymInt)


def _key(unit: fx.Graph) -> str:
    """Return a text that is equal for equal units: operators, wiring, constants, and the unit's arguments."""
    number = {n: i for i, n in enumerate(unit.nodes)}
    lines = list[str]()
    for node in unit.nodes:
        wiring = fx.map_arg((node.args, node.kwargs), lambda a: f"%{number[a]}")
        value = node.meta["val"] if node.op == "placeholder" else None
        given = "" if value is None else f"{value.dtype} {[*map(str, (*value.shape, *value.stride()))]}"
        lines.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {wiring} {given}")
    return "\n".join(lines)


class _Fusion(NamedTuple):
    """A unit, the run of operators that it replaces, their arguments and results, and the node after them."""

    unit: fx.Graph
    run: list[fx.Node]
    given: list[fx.Node]
    results: list[fx.Node]
    end: fx.Node


def _cuts(module: fx.GraphModule, takes: Callable[[fx.Node], bool]) -> Iterator[_Fusion]:
    for run, end in list(_runs(module.graph, takes)):
        if all(operator_name(n) in _CHEAP for n in run):
            continue
        inside = set(run)
        given = list(dict.fromkeys(a for n in run for a in n.all_input_nodes if a not in inside and not _counts(a)))
        given.sort(key=lambda node: node.op != "get_attr")
        results = [n for n in run if has_rows(n) and any(user not in inside for user in n.users)]
        values = [_value(module, a) for a in given]
        lists = any(not isinstance(n.meta.get("val"), Tensor) and set(n.users) - inside for n in run)
        if any(map(has_rows, given)) and all(isinstance(v, Tensor) for v in values) and not lists:
            yield _Fusion(_unit(run, dict(zip(given, values, strict=True)), results), run, given, results, end)


def _value(module: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else node.meta.get("val")


def _replace(module: fx.GraphModule, name: str, cut: _Fusion, bind: Bind, items: dict[fx.Node, fx.Node]) -> None:
    """Replace a run by a call. ``items``: result of a replaced run -> the node in its place."""
    weights = [n for n in cut.given if n.op == "get_attr"]
    setattr(module, name, _UnitWithWeights(bind([_value(module, n) for n in weights])))
    with module.graph.inserting_before(cut.end):
        held = module.graph.create_node("get_attr", name)
        call = module.graph.call_method("run", (held, *(items.get(n, n) for n in cut.given[len(weights) :])))
        for i, node in enumerate(cut.results):
            item = items[node] = module.graph.call_function(operator.getitem, (call, i))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in cut.run)
    for node in [*reversed(cut.run), *weights]:
        if not node.users:  # other runs may use weights, and values computed from weights alone
            module.graph.erase_node(node)


class _UnitWithWeights(NamedTuple):
    """A unit and its weights as one attribute of a slice."""

    run: Unit


def _runs(graph: fx.Graph, takes: Callable[[fx.Node], bool]) -> Iterator[tuple[list[fx.Node], fx.Node]]:
    """Yield runs of consecutive operators, each with the node after it."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "get_attr" or _counts(node):
            continue
        if node.op == "call_function" and takes(node):
            run.append(node)
        elif run:
            yield run, node
            run = []


def _counts(node: fx.Node) -> bool:
    """Return True if a node is the number of rows, which a unit reads from its tensors."""
    return node.op == "call_function" and node.target is aten.sym_size.int


def _unit(run: Sequence[fx.Node], given: Mapping[fx.Node, Tensor], results: Sequence[fx.Node]) -> fx.Graph:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, (node, value) in enumerate(given.items()):
        copies[node] = graph.placeholder(f"x{i}")
        copies[node].meta["val"] = value
    with_rows = next(copies[n] for n in given if has_rows(n))

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.call_function(aten.sym_size.int, (with_rows, 0))
        return copies[node]

    for node in run:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copy)
        copies[node] = add_node(graph, node.op, node.target, args, kwargs)
        copies[node].meta["val"] = node.meta.get("val")
    graph.output(tuple(copies[n] for n in results))
    return graph
