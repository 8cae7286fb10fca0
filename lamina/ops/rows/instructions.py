"""Programs on rows as the numbers that csrc/rows/program.h reads."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from lamina.ops.gemm.native import NativeForm

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int64: 3}
STORED = {**TYPES, torch.uint8: 4}  # bytes are those of quantized weights
KINDS = {name: i for i, name in enumerate(("elements", "mean", "layer_norm", "linear", "look_up", "add_int"))}
OPS = {name: i for i, name in enumerate((
    "load", "store", "add", "sub", "mul", "div", "max", "min", "add_to", "mul_by", "div_by", "neg", "square", "cube",
    "rsqrt", "sqrt", "exp", "sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "relu", "cos", "sin", "round_bf16",
    "round_half", "max_to", "min_to", "reciprocal",
))}  # fmt: skip
ROUND = {torch.bfloat16: "round_bf16", torch.float16: "round_half"}
DIMS, REGISTERS = 4, 16  # the most dimensions of an instruction's tensors, the most chunks that it holds


class UnsupportedError(Exception):
    """An operator or shape that no instruction supports."""


@dataclass(frozen=True)
class View:
    """The elements of a slot: ``shape`` and ``strides`` of one row, and ``offset``, all counted in elements of the
    slot's dtype.
    """

    slot: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The elements of a row."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """True if a row has no gaps and its elements are in order."""
        return all(
            n == 1 or step == want for n, step, want in zip(self.shape, self.strides, packed(self.shape), strict=True)
        )

    def broadcast(self, shape: Sequence[int]) -> View:
        """Return the view broadcast to ``shape``. Raises UnsupportedError if that is impossible."""
        missing = len(shape) - len(self.shape)
        if missing < 0 or any(n not in (1, want) for n, want in zip(self.shape, shape[missing:], strict=True)):
            raise UnsupportedError("shapes that do not broadcast")
        steps = [0 if n == 1 else step for n, step in zip(self.shape, self.strides, strict=True)]
        return replace(self, shape=tuple(shape), strides=(0,) * missing + tuple(steps))


def packed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of elements without gaps."""
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= n
    return tuple(reversed(steps))


class Operation(NamedTuple):
    """One operation on numbered chunks. ``a`` and ``b``: steps of the same instruction, by their index in it."""

    op: str
    a: int = 0
    b: int = 0
    value: float = 0.0
    view: View | None = None  # only in a load or a store


@dataclass
class Instruction:
    """An instruction on rows. ``views``: in the order of program.h; in an "elements", only its steps have views. A
    "mean" averages the results of its step ``n``, or view 0 if it has no steps. ``shape``: the elements that it walks
    over. ``leading``: from row to row of a weight; 0 in a "linear" if the weight is packed. ``form``: of a
    quantized weight.
    """

    kind: str
    shape: tuple[int, ...]
    steps: list[Operation] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    n: int = 0
    leading: int = 0
    value: float = 0.0
    form: NativeForm | None = None

    @property
    def reads(self) -> set[int]:
        """The slots that it reads."""
        loads = {s.view.slot for s in self.steps if s.op == "load" and s.view}
        return loads | {v.slot for i, v in enumerate(self.views) if i != 1 and not self.steps}

    @property
    def writes(self) -> set[int]:
        """The slots that it writes."""
        return {s.view.slot for s in self.steps if s.op == "store" and s.view} | {v.slot for v in self.views[1:2]}


def encode(given: int, row_bytes: Sequence[int], places: Sequence[int], instructions: Sequence[Instruction]) -> bytes:
    """Encode the table. ``row_bytes``: of each slot, the ``given`` ones first. ``places``: of the others, in an arena's
    row. Raises UnsupportedError for too many dimensions, or too many chunks at once.
    """
    numbers = [given, len(row_bytes) - given, *row_bytes, *places, len(instructions)]
    for each in instructions:
        numbers += _encode(each)
    return array("q", numbers).tobytes()


def _encode(each: Instruction) -> list[int]:
    views = [*each.views, *(s.view for s in each.steps if s.view)]
    sizes, steps_of = _collapsed(each, views)
    *outer, inner = [1] * (DIMS - len(sizes)) + sizes
    summed = each.n if each.kind == "mean" and each.steps else None
    registers, at = registers_of(each.steps, summed), len(each.views)
    n = each.n if summed is None else registers[summed]
    numbers = [KINDS[each.kind], *outer, inner, n, each.leading, _bits(each.value), len(views)]
    for view, steps in zip(views, steps_of, strict=True):
        padded = [0] * (DIMS - len(steps)) + steps
        numbers += [view.slot, STORED[view.dtype], view.offset * view.dtype.itemsize, *padded]
    numbers.append(len(each.steps))
    for i, step in enumerate(each.steps):
        a, b = (registers[n] for n in (step.a, step.b))
        numbers += [OPS[step.op], registers[i], a, b, _bits(step.value), at if step.view else 0]
        at += step.view is not None
    return [*numbers, *_form(each.form)]


def _form(form: NativeForm | None) -> list[int]:
    """Return the numbers of a quantized weight's form, with its values in place of their address."""
    return [0] if form is None else [*form.numbers[:-1], *map(_bits, form.form.values)]


def _collapsed(each: Instruction, views: Sequence[View]) -> tuple[list[int], list[list[int]]]:
    """Return the fewest dimensions in which all views can be walked over, and their strides."""
    if each.kind == "linear":  # each of its rows has no gaps
        return [each.views[0].numel // each.shape[-1], each.shape[-1]], [[0, 0] for _ in views]
    walked = each.shape if each.kind in ("elements", "add_int") else each.shape[:-1]
    strides = [_walked(each, i, view) for i, view in enumerate(views)]
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in views]
    for dim, n in enumerate(walked):
        if n == 1:
            continue
        if sizes and all(s[-1] == v[dim] * n for s, v in zip(steps, strides, strict=True)):
            sizes[-1] *= n
            for s, v in zip(steps, strides, strict=True):
                s[-1] = v[dim]
        else:
            sizes.append(n)
            for s, v in zip(steps, strides, strict=True):
                s.append(v[dim])
    if each.kind not in ("elements", "add_int"):
        sizes.append(each.shape[-1])
        for i, (s, view) in enumerate(zip(steps, views, strict=True)):
            # One operand has a single element there: an id, a mean.
            one = (each.kind, i) in (("look_up", 0), ("mean", 1)) or (each.kind == "mean" and each.steps and i == 0)
            s.append(0 if one else view.strides[-1])
    if not sizes:
        sizes, steps = [1], [[1] for _ in views]
    if len(sizes) > DIMS:
        raise UnsupportedError("too many dimensions")
    return sizes, steps


def _walked(each: Instruction, i: int, view: View) -> Sequence[int]:
    """Return the strides over the dimensions that are walked over."""
    if each.kind in ("elements", "add_int"):
        return view.strides
    if i >= 2 and each.kind != "mean":  # a weight: the same for all rows
        return [0] * len(each.shape)
    if each.kind == "look_up" and i == 0:
        return view.strides
    return view.strides[:-1]


def registers_of(steps: Sequence[Operation], result: int | None = None) -> list[int]:
    """Return the register that each step writes (a store: reads); that of ``result`` is not reused. Raises
    UnsupportedError if there are too few registers.
    """
    last = list(range(len(steps)))
    for i, step in enumerate(steps):
        for n in operands(step):
            last[n] = i
    if result is not None:
        last[result] = len(steps)
    free, registers = list(range(REGISTERS))[::-1], [0] * len(steps)
    for i, step in enumerate(steps):
        for n in set(operands(step)):
            if last[n] == i:
                free.append(registers[n])
        if step.op == "store":
            registers[i] = registers[step.a]
            continue
        if not free:
            raise UnsupportedError("too many chunks at once")
        registers[i] = free.pop()
        if last[i] == i:
            free.append(registers[i])
    return registers


def operands(step: Operation) -> tuple[int, ...]:
    """Return the steps whose results a step uses."""
    if step.op == "load":
        return ()
    return (step.a, step.b) if step.op in ("add", "sub", "mul", "div", "max", "min") else (step.a,)


def _bits(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])
