"""A slice that only has units and sends, as one native call (csrc/rows/chain.cpp)."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from ._rows import Chain, Program
from .program import LINE, Arena, BoundUnit, UnitTensor

if TYPE_CHECKING:
    from lamina.converter import SlicedProgram

RUN, Q, KV = range(3)
SENDS = {"q": Q, "kv": KV}


class _ChainLink(NamedTuple):
    """A unit on values, or a send of some. ``number``: of the unit, or of the layer."""

    kind: int
    number: int
    values: tuple[int, ...]


class ChainedSlice:
    """A slice with the arguments and results of ``inner``, which is called for what a chain cannot do. These are other
    rows or tensors, and sends by Python. A native send has ``native_send``, a capsule of csrc/rows/send.h, and
    ``dtype``, of all that it sends. One thread at a time runs it, also while a send waits.
    """

    def __init__(self, inner: Callable[..., tuple[Tensor, ...]], links: _ChainLinks, arena: Arena) -> None:
        self._inner, self._arena = inner, arena
        made = list(dict.fromkeys(v for v in links.results if v >= links.given))
        outside = [*range(links.given), *made]
        self._given, self._made = links.tensors[: links.given], [links.tensor(v) for v in made]
        self._results = [outside.index(v) for v in links.results]
        self._sent = links.sent
        self._most_rows = min(unit.most_rows for unit in links.units)
        self._weights = [unit.weights for unit in links.units]
        programs = tuple(dict.fromkeys(unit.program for unit in links.units))
        table, self._row_arena = _table(links, outside, programs)
        self._chain = Chain(programs, table)

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        """Return the slice's results: by one native call, or by torch if the tensors do not fit it."""
        given, send = args[: len(self._given)], None
        if self._sent is not None:
            send = getattr(args[-1], "native_send", None)
            if send is None or args[-1].dtype != self._sent:
                return self._inner(*args)
        rows = given[0].shape[0]
        if not 0 < rows <= self._most_rows or not all(
            _fits(x, tensor, rows) for x, tensor in zip(given, self._given, strict=True)
        ):
            return self._inner(*args)
        outside = [*given, *(torch.empty((rows, *x.shape), dtype=x.dtype) for x in self._made)]
        arena = self._arena
        with arena.lock:
            arena.reserve(rows * self._row_arena)
            self._chain.run(send, rows, arena.address, *[t.data_ptr() for t in outside])
        return tuple([outside[v] for v in self._results])


def _fits(x: Tensor, tensor: UnitTensor | None, rows: int) -> bool:
    return tensor is None or (x.shape == (rows, *tensor.shape) and x.dtype == tensor.dtype and x.is_contiguous())


class ChainedProgram:
    """A program whose slices are one call each, if possible."""

    def __init__(self, program: SlicedProgram) -> None:
        arena = Arena()
        self.slices: Sequence[Any] = [_chained(part, part.module, arena) for part in program.slices]


def _chained(part: Callable[..., tuple[Tensor, ...]], module: fx.GraphModule, arena: Arena) -> Any:
    try:
        return ChainedSlice(part, _ChainLinks(module), arena)
    except _OtherError:
        return part


class _OtherError(Exception):
    """A slice does something that a chain cannot."""


class _ChainLinks:
    """The links of a slice's chain. Values are numbered: the ``given`` ones first, then the results of every unit."""

    def __init__(self, module: fx.GraphModule) -> None:
        """Follow the graph of a slice. Raises _OtherError."""
        self.units: list[BoundUnit] = []
        self.links: list[_ChainLink] = []
        self.tensors: list[UnitTensor | None] = []  # the tensor of each value; None: no unit takes it
        self.given = 0
        self.results: list[int] = []
        self._module = module
        self._values: dict[fx.Node, int] = {}
        self._made: dict[fx.Node, range] = {}  # a call of a unit -> its results
        self._send: fx.Node | None = None
        for node in module.graph.nodes:
            self._read(node)
        sent = {self.tensor(v).dtype for link in self.links if link.kind != RUN for v in link.values}
        if not self.units or len(sent) > 1:
            raise _OtherError
        self.sent = next(iter(sent), None)  # the dtype of all that is sent

    def tensor(self, value: int) -> UnitTensor:
        """Return the tensor of a value that a unit takes or makes. Raises _OtherError for other values."""
        tensor = self.tensors[value]
        if tensor is None:
            raise _OtherError
        return tensor

    def _read(self, node: fx.Node) -> None:
        match node.op:
            case "placeholder" if node.target == "send":
                self._send = node
            case "placeholder":
                self._values[node] = self.given
                self.given += 1
                self.tensors.append(None)
            case "get_attr":
                pass  # a unit, read where it is used
            case "call_method" if node.target == "run":
                self._run(node)
            case "call_method" if node.args[0] is self._send and node.target in SENDS:
                _, layer, *values = node.args
                self.links.append(_ChainLink(SENDS[node.target], cast("int", layer), self._numbers(values)))
            case "call_function" if node.target is operator.getitem and node.args[0] in self._made:
                source, item = cast("tuple[fx.Node, int]", node.args)
                self._values[node] = self._made[source][item]
            case "call_function" if node.target is torch.ops.aten.sym_size.int and not node.users:
                pass  # the number of rows, which is not used
            case "output":
                self.results = list(self._numbers(cast("Sequence[Any]", node.args[0])))
            case _:
                raise _OtherError

    def _run(self, node: fx.Node) -> None:
        held = node.args[0]
        if not isinstance(held, fx.Node) or held.op != "get_attr":
            raise _OtherError
        unit = getattr(getattr(self._module, str(held.target)).run, "__self__", None)
        if not isinstance(unit, BoundUnit):
            raise _OtherError
        taken = self._numbers(node.args[1:])
        for value, tensor in zip(taken, unit.given, strict=True):
            if not tensor.with_rows or self.tensors[value] not in (None, tensor):
                raise _OtherError
            self.tensors[value] = tensor
        made = range(len(self.tensors), len(self.tensors) + len(unit.results))
        self.tensors.extend(unit.results)
        self._made[node] = made
        self.links.append(_ChainLink(RUN, len(self.units), (*taken, *made)))
        self.units.append(unit)

    def _numbers(self, nodes: Sequence[Any]) -> tuple[int, ...]:
        if not all(isinstance(node, fx.Node) and node in self._values for node in nodes):
            raise _OtherError
        return tuple(self._values[node] for node in nodes)


def _table(links: _ChainLinks, outside: Sequence[int], programs: Sequence[Program]) -> tuple[bytes, int]:
    """Return the table that csrc/rows/chain.cpp reads, and the bytes of the arena for a row. Values are numbered anew
    in it, the ``outside`` ones first.
    """
    order = [*outside, *(v for v in range(len(links.tensors)) if v not in outside)]
    at, places = 0, list[int]()
    for value in order[len(outside) :]:
        places.append(at)
        at += math.ceil(links.tensor(value).row_bytes / LINE) * LINE
    numbers = array("q", (len(outside), at, len(places), *places, len(links.links)))
    for link in links.links:
        values = [order.index(v) for v in link.values]
        if link.kind == RUN:
            unit = links.units[link.number]
            numbers.extend((RUN, programs.index(unit.program), len(unit.addresses), *unit.addresses))
            numbers.extend((len(values), *values))
        else:
            numbers.extend((link.kind, link.number, len(values), *values))
            numbers.extend((len(values), *(links.tensor(v).row_bytes for v in link.values)))
    return numbers.tobytes(), at + max(unit.row_arena for unit in links.units)
