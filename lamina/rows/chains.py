"""A slice that is nothing but units and sends, as one native call (csrc/rows/chain.cpp)."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from ._native import Chain, Program
from .program import LINE, Arena, BoundUnit, Shape

if TYPE_CHECKING:
    from lamina.converter import SlicedProgram

RUN, Q, KV = range(3)


class _Link(NamedTuple):
    """A unit on values, or a send of some. ``what``: the unit's number, or the layer."""

    kind: int
    what: int
    values: tuple[int, ...]


@dataclass
class _Draft:
    """What a slice does. Values are numbered: those given, those made for results, then others."""

    units: list[BoundUnit]
    links: list[_Link]
    given: list[Shape | None]
    shapes: list[Shape]  # of the others
    made: int
    results: list[int]

    def shape(self, value: int) -> Shape:
        """Of one that a unit takes or makes."""
        shape = (*self.given, *self.shapes)[value]
        assert shape is not None
        return shape


class ChainedSlice:
    """Called as the slice that it stands for. Where the sends, the rows or the tensors are others than the chain takes,
    the slice itself does it. Threads take turns, also while a send waits.
    """

    def __init__(self, inner: Callable[..., tuple[Tensor, ...]], draft: _Draft, arena: Arena) -> None:
        self._inner, self._arena = inner, arena
        self._given, self._made = draft.given, draft.shapes[: draft.made]
        self._results = draft.results
        sent = [link for link in draft.links if link.kind != RUN]
        self._sends, self._sent = bool(sent), {draft.shape(v).dtype for link in sent for v in link.values}
        self._most_rows = min(unit.most_rows for unit in draft.units)
        programs = list(dict.fromkeys(unit.program for unit in draft.units))
        table, self._row_arena = _table(draft, programs)
        self._chain, self._weights = Chain(tuple(programs), table), [unit.weights for unit in draft.units]

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        """See converter.slices.Slice."""
        given, send = args[: len(self._given)], None
        if self._sends:
            send = getattr(args[-1], "native_send", None)
            if send is None or self._sent != {args[-1].dtype}:
                return self._inner(*args)
        rows = given[0].shape[0]
        if not 0 < rows <= self._most_rows or not all(
            _fits(x, shape, rows) for x, shape in zip(given, self._given, strict=True)
        ):
            return self._inner(*args)
        outside = [*given, *(torch.empty((rows, *x.shape), dtype=x.dtype) for x in self._made)]
        arena = self._arena
        with arena.lock:
            arena.reserve(rows * self._row_arena)
            self._chain.run(send, rows, arena.address, *[t.data_ptr() for t in outside])
        return tuple([outside[v] for v in self._results])


def _fits(x: Tensor, shape: Shape | None, rows: int) -> bool:
    return shape is None or (x.shape == (rows, *shape.shape) and x.dtype == shape.dtype and x.is_contiguous())


class ChainedProgram:
    """A program whose slices are one call each, where they can be."""

    def __init__(self, program: SlicedProgram) -> None:
        arena = Arena()
        drafts = [(part, _draft(part.module)) for part in program.slices]
        self.slices: Sequence[Any] = [part if x is None else ChainedSlice(part, x, arena) for part, x in drafts]


def _draft(module: fx.GraphModule) -> _Draft | None:
    reader = _Reader(module)
    try:
        for node in module.graph.nodes:
            reader.read(node)
    except _OtherError:
        return None
    return reader.draft()


class _OtherError(Exception):
    """A slice does something that a chain cannot."""


class _Reader:
    """Follows the graph of a slice."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._send: fx.Node | None = None
        self._given: list[fx.Node] = []
        self._shapes = dict[fx.Node, Shape]()
        self._runs: dict[fx.Node, tuple[int, tuple[fx.Node, ...], dict[int, fx.Node]]] = {}
        self._units: list[BoundUnit] = []
        self._steps: list[tuple[int, int, tuple[fx.Node, ...]]] = []  # kind, number, nodes
        self._results: list[fx.Node] = []

    def read(self, node: fx.Node) -> None:
        """The next node. Raises _OtherError."""
        match node.op:
            case "placeholder" if node.target == "send":
                self._send = node
            case "placeholder":
                self._given.append(node)
            case "get_attr":
                pass  # a unit, where it is used
            case "call_method" if node.target == "run":
                self._run(node)
            case "call_method" if node.args[0] is self._send and node.target in ("q", "kv"):
                _, layer, *values = node.args
                self._steps.append(
                    (Q if node.target == "q" else KV, cast("int", layer), tuple(map(self._value, values)))
                )
            case "call_function" if node.target is operator.getitem and node.args[0] in self._runs:
                number, _, items = self._runs[cast("fx.Node", node.args[0])]
                item = cast("int", node.args[1])
                if item in items:
                    raise _OtherError
                items[item] = node
                self._shapes[node] = self._units[number].results[item]
            case "call_function" if node.target is torch.ops.aten.sym_size.int and not node.users:
                pass  # the number of rows, which nothing asks for
            case "output":
                self._results = [self._value(x) for x in cast("Sequence[Any]", node.args[0])]
            case _:
                raise _OtherError

    def _run(self, node: fx.Node) -> None:
        held = node.args[0]
        if not isinstance(held, fx.Node) or held.op != "get_attr":
            raise _OtherError
        unit = getattr(getattr(self._module, str(held.target)).run, "__self__", None)
        if not isinstance(unit, BoundUnit):
            raise _OtherError
        values = tuple(map(self._value, node.args[1:]))
        for value, shape in zip(values, unit.given, strict=True):
            if self._shapes.setdefault(value, shape) != shape or not shape.with_rows:
                raise _OtherError
        self._runs[node] = len(self._units), values, {}
        self._units.append(unit)
        self._steps.append((RUN, len(self._units) - 1, ()))

    def _value(self, x: Any) -> fx.Node:
        if not isinstance(x, fx.Node):
            raise _OtherError
        return x

    def draft(self) -> _Draft | None:
        """Of the whole graph; None where it does nothing."""
        if not self._units:
            return None
        made = [n for n in dict.fromkeys(self._results) if n not in self._given]
        others = [n for _, _, items in self._runs.values() for n in items.values() if n not in made]
        if any(n not in self._shapes for kind, _, nodes in self._steps if kind != RUN for n in nodes):
            return None
        given = [self._shapes.get(n) for n in self._given]  # None: no unit takes it
        shapes = [self._shapes[n] for n in (*made, *others)]
        numbers = {n: i for i, n in enumerate((*self._given, *made, *others))}
        links, runs = list[_Link](), list(self._runs.values())
        for kind, what, nodes in self._steps:
            if kind == RUN:
                number, values, items = runs[what]
                nodes = values
                results = []
                for i, shape in enumerate(self._units[number].results):
                    if i in items:
                        results.append(numbers[items[i]])
                    else:  # that nobody uses
                        results.append(len(given) + len(shapes))
                        shapes.append(shape)
                links.append(_Link(RUN, number, (*(numbers[n] for n in nodes), *results)))
            else:
                links.append(_Link(kind, what, tuple(numbers[n] for n in nodes)))
        return _Draft(self._units, links, given, shapes, len(made), [numbers[n] for n in self._results])


def _table(draft: _Draft, programs: Sequence[Program]) -> tuple[bytes, int]:
    """What csrc/rows/chain.cpp reads; and the bytes of the arena for a row."""
    outside, at, places = len(draft.given) + draft.made, 0, list[int]()
    for shape in draft.shapes[draft.made :]:
        places.append(at)
        at += math.ceil(shape.row_bytes / LINE) * LINE
    numbers = array("q", (outside, at, len(places), *places, len(draft.links)))
    for link in draft.links:
        if link.kind == RUN:
            unit = draft.units[link.what]
            numbers.extend((RUN, programs.index(unit.program), len(unit.addresses), *unit.addresses))
        else:
            numbers.extend((link.kind, link.what))
        numbers.extend((len(link.values), *link.values))
        if link.kind != RUN:
            numbers.extend((len(link.values), *(draft.shape(v).row_bytes for v in link.values)))
    return numbers.tobytes(), at + max(unit.row_arena for unit in draft.units)
