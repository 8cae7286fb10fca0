"""Units of a slice, and slices of units and sends alone, as native calls (csrc/rows): no Python or torch inside."""

from __future__ import annotations

import math
import operator
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from lamina.converter.capture import size_expression
from lamina.converter.graph import add_node
from lamina.ops.gemm import LinearBackend
from lamina.ops.gemm.packed_memory import PackedMemory

from . import arithmetic, layout_ops
from ._rows import Chain, Program
from .fusion import merged
from .instructions import Instruction, UnsupportedError, View, encode
from .lowering import Lowering, name_of

if TYPE_CHECKING:
    from lamina.converter import SlicedProgram
    from lamina.converter.slices import Slice

LINE, MOST_SPARE = 64, 1 << 24  # bytes
RUN, Q, KV = range(3)  # kinds of links of a chain
SENDS = {"q": Q, "kv": KV}
RULES = {**arithmetic.RULES, **layout_ops.RULES}


class UnitTensor(NamedTuple):
    """A tensor that a unit takes or returns: for each row, or (``with_rows`` False) as a whole."""

    with_rows: bool
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Arena:
    """The memory for values between the instructions of a unit, used by one thread at a time under ``lock``."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._size = -1
        self.address = 0
        self.lock = threading.Lock()

    def reserve(self, size: int) -> None:
        """Reserve at least ``size`` bytes, from a multiple of 64 on."""
        if size > self._size:
            room = size + min(size // 2, MOST_SPARE)
            memory = torch.empty(room + LINE, dtype=torch.uint8)
            self._memory = memory[-memory.data_ptr() % LINE :]
            self.address, self._size = self._memory.data_ptr(), room


class RowUnit:
    """The instructions of a unit. ``given``: its tensors that are no weights. ``leads``: the first of these with
    rows.
    """

    def __init__(
        self, unit: fx.Graph, weights: int, backend: LinearBackend, arena: Arena, memory: PackedMemory | None = None
    ) -> None:
        """``weights``: how many placeholders, the first ones, are weights. ``memory``: see ``bind_rows``. Raises
        UnsupportedError if no instructions do what the unit does.
        """
        lowered = Lowering(unit, weights, RULES)
        instructions = merged(lowered.instructions, {v.slot for v in lowered.results})
        order = [*range(len(lowered.placeholders)), *(v.slot for v in lowered.results)]
        given = len(order)
        order += sorted({n for each in instructions for n in each.reads | each.writes} - set(order))
        slots = [lowered.slots[n] for n in order]
        _renumber(instructions, {slot: n for n, slot in enumerate(order)})
        self._dtypes = [s.dtype for s in slots]
        self._row_bytes = [s.numel * s.dtype.itemsize if s.with_rows else 0 for s in slots]
        self._places, self.row_arena = _placed(instructions, given, self._row_bytes)
        self._backend, self._memory = backend, memory
        self._packed = {} if memory is None else _packed(instructions, weights, backend)
        table = encode(given, self._row_bytes, self._places, instructions)
        self.program = Program(backend.engine, table, "")
        self._instructions = len(instructions)
        self.results = [UnitTensor(True, v.shape, lowered.slots[v.slot].dtype) for v in lowered.results]
        values = [lowered.values[n] for n in lowered.placeholders[weights:]]
        self.given = [UnitTensor(slots[v.slot].with_rows, v.shape, v.dtype) for v in values]
        self.leads = next(i for i, s in enumerate(slots[weights:]) if s.with_rows)
        self.arena = arena

    def bind(self, weights: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """Return a function of tensors of rows: the unit with these weights, which stay in place."""
        return BoundUnit(self, weights).call

    def packed_weights(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights as the program takes them: those of products packed, if there is memory."""
        laid = list(weights)
        if (memory := self._memory) is not None:
            for slot, view in self._packed.items():
                laid[slot] = self._backend.pack(laid[slot].as_strided(view.shape, view.strides), memory)
        return laid

    def run(self, rows: int, addresses: Sequence[int]) -> None:
        """Run the unit. ``addresses``: of weights, tensors of rows without gaps, results. Raises IndexError if a row
        looks up an index outside of a table.
        """
        self.arena.reserve(rows * self.row_arena)
        self.program.run(rows, 0, self._instructions, self.arena.address, *addresses)


class BoundUnit:
    """A unit and its weights."""

    def __init__(self, unit: RowUnit, weights: Sequence[Tensor]) -> None:
        self._unit = unit
        self.weights = tuple(w.detach() for w in weights)  # a parameter may be given other memory
        self._laid = unit.packed_weights(self.weights)
        self.addresses = [w.data_ptr() for w in self._laid]
        self.program, self.given, self.results = unit.program, unit.given, unit.results
        self.row_arena = unit.row_arena

    def call(self, *x: Tensor) -> tuple[Tensor, ...]:
        """Run the unit on tensors of rows. Raises IndexError if a row looks up an index outside of a table."""
        unit = self._unit
        rows = x[unit.leads].shape[0]
        given = [t if t.is_contiguous() else t.contiguous() for t in x]
        for t, (with_rows, shape, dtype) in zip(given, unit.given, strict=True):
            if t.dtype != dtype or t.shape != ((rows, *shape) if with_rows else shape):
                raise ValueError(f"rows of {tuple(t.shape)}, {t.dtype}, where a slice takes {shape}, {dtype}")
        made = [torch.empty((rows, *shape), dtype=dtype) for _, shape, dtype in unit.results]
        if rows:
            addresses = [*self.addresses, *(t.data_ptr() for t in given), *(t.data_ptr() for t in made)]
            with unit.arena.lock:
                unit.run(rows, addresses)
        return tuple(made)


class SupportedOperators:
    """The operators of one program's slices that instructions may support; equal ones are checked once."""

    def __init__(self) -> None:
        self.known: dict[Any, bool] = {}

    def takes(self, node: fx.Node) -> bool:
        """Return whether some instruction may do what this operator does."""
        if node.target is operator.getitem:
            source, splits = node.args[0], ("split", "split_with_sizes", "chunk")
            return isinstance(source, fx.Node) and name_of(source) in splits and self.takes(source)
        if name_of(node) not in RULES:
            return False
        key = _key(node)
        if key not in self.known:
            try:
                _alone(node)
                self.known[key] = True
            except UnsupportedError:
                self.known[key] = False
        return self.known[key]


def _key(node: fx.Node) -> Any:
    """Return all that the lowering of a single operator depends on. That is the operator, constants, its operands and
    results, and which operands are the same.
    """
    operands = {n: i for i, n in enumerate(node.all_input_nodes)}
    wiring = fx.map_arg((node.args, node.kwargs), lambda n: f"%{operands[n]}")
    return node.target, str(wiring), *(_described(n.meta.get("val")) for n in (*operands, node))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes = (*value.shape, *value.stride())
        return value.dtype, *(n if type(n) is int else size_expression(n) for n in sizes)
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else type(value)


def _alone(node: fx.Node) -> None:
    """Raise UnsupportedError if a single operator cannot be lowered."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta["val"] = source.meta.get("val")
    counts = {n for n, c in copies.items() if isinstance(c.meta["val"], torch.SymInt)}
    for n in counts:
        graph.erase_node(copies[n])
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: 0 if n in counts else copies[n])
    copy = add_node(graph, node.op, node.target, args, kwargs)
    copy.meta["val"] = node.meta.get("val")
    graph.output(())
    lowered = Lowering(graph, len(copies), RULES)
    for each in lowered.instructions:
        encode(0, [], [], [each])


def _renumber(instructions: Iterable[Instruction], number: Mapping[int, int]) -> None:
    for each in instructions:
        each.steps = [s._replace(view=replace(s.view, slot=number[s.view.slot])) if s.view else s for s in each.steps]
        each.views = [replace(v, slot=number[v.slot]) for v in each.views]


def _placed(instructions: Sequence[Instruction], given: int, row_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Return the place of each slot that is not given, in a row of the arena, and the bytes of such a row. Slots that
    are not needed at the same time share their place. Between linear layers, rows may progress at different speeds.
    """
    first, last, stage = dict[int, int](), dict[int, int](), 0
    for i, each in enumerate(instructions):
        if i and "linear" in (each.kind, instructions[i - 1].kind):
            stage += 1
        for slot in each.reads | each.writes:
            first.setdefault(slot, stage)
            last[slot] = stage
    placed: dict[int, tuple[int, int]] = {}
    for slot in sorted(first, key=lambda n: (first[n], n)):
        if slot < given:
            continue
        size = math.ceil(row_bytes[slot] / LINE) * LINE
        others = sorted(placed[n] for n in placed if last[n] >= first[slot])
        at = 0
        for start, end in others:
            if at + size <= start:
                break
            at = max(at, end)
        placed[slot] = (at, at + size)
    most = max((end for _, end in placed.values()), default=0)
    return [placed[n][0] for n in range(given, len(row_bytes))], most


def _packed(instructions: Sequence[Instruction], weights: int, backend: LinearBackend) -> dict[int, View]:
    """Return the slots of weights that only products read, all in one way, and mark these products as packed."""
    products = [each for each in instructions if _is_plain(each) and each.views[2].slot < weights]
    read = [p.views[2] for p in products]
    slots = {w.slot: w for w in read if backend.packed_bytes(w.dtype, *w.shape)}
    for each in instructions:
        for i, view in enumerate([*each.views, *(s.view for s in each.steps if s.view)]):
            if each.kind != "linear" or i != 2 or slots.get(view.slot) != view:
                slots.pop(view.slot, None)
    for product in products:
        if product.views[2].slot in slots:
            product.leading = 0
    return slots


def _is_plain(each: Instruction) -> bool:
    """Return True for a product whose weight is not quantized."""
    return each.kind == "linear" and each.form is None


class _ChainLink(NamedTuple):
    """A unit on values, or a send of some. ``number``: of the unit, or of the layer."""

    kind: int
    number: int
    values: tuple[int, ...]


class ChainedSlice:
    """A slice with the arguments and results of ``inner``, which is called for what a chain cannot do. These are other
    rows or tensors, and sends by Python. A native send has ``native_send``, a capsule of csrc/rows/send.h, and
    ``dtype``, of all that it sends. One thread at a time runs it, also while a send waits, in inference mode.
    """

    def __init__(self, inner: Callable[..., tuple[Tensor, ...]], links: _ChainLinks, arena: Arena) -> None:
        self._inner, self._arena = inner, arena
        made = list(dict.fromkeys(v for v in links.results if v >= links.given))
        outside = [*range(links.given), *made]
        self._given, self._made = links.tensors[: links.given], [links.tensor(v) for v in made]
        self._results = [outside.index(v) for v in links.results]
        self._sent = links.sent
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
        if not rows or not all(_fits(x, tensor, rows) for x, tensor in zip(given, self._given, strict=True)):
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
        self.slices: Sequence[Any] = [_chained(part, arena) for part in program.slices]


def _chained(part: Slice, arena: Arena) -> Slice | ChainedSlice:
    try:
        return ChainedSlice(part.module.forward, _ChainLinks(part.module), arena)
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
