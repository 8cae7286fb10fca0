"""Plans a deep model from a shallow one: captures a few layers and repeats the slices that provably recur."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConversionError
from .slices import CutCall, Slice, SlicedProgram

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.Size)


@dataclass(frozen=True)
class Period:
    """Layers from ``start`` on repeat every ``length`` layers."""

    start: int
    length: int


def layer_stack(model: nn.Module, num_layers: int) -> tuple[str, Sequence[nn.Module]]:
    """Return the dotted name and members of the first list of ``num_layers`` modules. Raises ConversionError if there
    is none.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name, list(module)
    raise ConversionError(f"no list of {num_layers} layers in {type(model).__name__}")


def layer_kinds(
    layers: Sequence[nn.Module], more: Sequence[Hashable] | None = None, indices: Sequence[int] | None = None
) -> list[int]:
    """Number the layers by kind: equal for layers that differ only in the values of weights and their index.

    Compared are classes, shapes, dtypes and every plain attribute of all submodules, and each layer's entry in ``more``
    (such as its entries in configuration lists). An attribute may differ if it is each layer's own index. That is its
    place in ``layers``, or its entry in ``indices``.
    """
    places = range(len(layers)) if indices is None else indices
    kinds: list[int] = []
    known: list[int] = []  # one layer of each kind
    for here, layer in enumerate(layers):
        for kind, other in enumerate(known):
            same = more is None or more[here] == more[other]
            if same and _alike(layer, layers[other], (places[here], places[other])):
                kinds.append(kind)
                break
        else:
            kinds.append(len(known))
            known.append(here)
    return kinds


def _alike(a: nn.Module, b: nn.Module, indices: tuple[int, int]) -> bool:
    own, others = list(a.named_modules()), list(b.named_modules())
    if [(n, type(m)) for n, m in own] != [(n, type(m)) for n, m in others]:
        return False
    return all(_same_attributes(m, o, indices) for (_, m), (_, o) in zip(own, others, strict=True))


def _same_attributes(a: nn.Module, b: nn.Module, indices: tuple[int, int]) -> bool:
    if [(n, t.shape, t.dtype) for n, t in _tensors(a)] != [(n, t.shape, t.dtype) for n, t in _tensors(b)]:
        return False
    own, others = _plain_attributes(a), _plain_attributes(b)
    return own.keys() == others.keys() and all(
        v == others[k] or (type(v) is int and (v, others[k]) == indices) for k, v in own.items()
    )


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def period_of(kinds: Sequence[Hashable]) -> Period | None:
    """Return the shortest repetition of all layers from some point on, at least three times; None if there is none."""
    total = len(kinds)
    for length in range(1, total // 3 + 1):
        start = total - length
        while start > 0 and kinds[start - 1] == kinds[start - 1 + length]:
            start -= 1
        if total - start >= 3 * length:
            return Period(start, length)
    return None


def stamp(
    shallow: Callable[[int], tuple[SlicedProgram, Sequence[nn.Module], Sequence[Hashable] | None]],
    layers: Sequence[nn.Module],
    more: Sequence[Hashable] | None,
    prefix: str,
) -> SlicedProgram | None:
    """Return the plan of the model with ``layers`` (named ``prefix``.0, ``prefix``.1, ...), made from a shallower one;
    or None.

    ``shallow(n)`` converts the model with its first n layers, and returns its plan, these layers, and their ``more``.
    The result is correct if three facts hold; if one cannot be shown, the result is None.

    1. All layers from some point on repeat with a period, judged by layer_kinds.
    2. The shallow model's layers are of the same kinds as the deep one's, up to its last.
    3. Its slices show two equal periods in a row. Cuts are planned from the last call to the first, so an equal slice
       with equal cuts on both sides leads to the same again, any number of times.
    """
    kinds = layer_kinds(layers, more)
    period = period_of(kinds)
    if period is None:
        return None
    total, length = len(layers), period.length
    # The left-out layers are a whole number of periods; the ends may differ from the middle.
    least = period.start + 2 * length + 2
    for few in range(least + (total - least) % length, min(total, least + 3 * length), length):
        program, some, some_more = shallow(few)
        facts = None if more is None or some_more is None else [*more, *some_more]
        joint = layer_kinds([*layers, *some], facts, [*range(total), *range(few)])
        if joint[:few] != joint[total:] or len(program.calls) != few or program.mixers:
            return None
        at = _repeated_block([s.signature for s in program], period)
        if at is not None:
            return _stamped(program, at, length, (total - few) // length, prefix)
    return None


def _repeated_block(signatures: Sequence[str], period: Period) -> int | None:
    """Return the index where two equal periods of slices follow each other. Slice i ends layer i - 1 and begins layer
    i.
    """
    length = period.length
    for at in range(period.start + 1, len(signatures) - 2 * length):
        if signatures[at : at + length] == signatures[at + length : at + 2 * length]:
            return at
    return None


def _stamped(program: SlicedProgram, at: int, length: int, times: int, prefix: str) -> SlicedProgram:
    """Insert ``times`` copies of the slices [at, at + length), with the calls and cuts that follow them."""
    extra = range(at + length, at + length * (1 + times))
    end = at + length

    def source(i: int) -> int:
        return i if i < end else at + (i - at) % length if i in extra else i - length * times

    layers = length * times
    slices, calls, cuts = [], [], []
    for i in range(len(program) + layers):
        shift = i - source(i)
        slices.append(_moved_slice(program.slices[source(i)], shift, prefix))
        if i < len(program.calls) + layers:
            calls.append(_moved_call(program.calls[source(i)], shift, prefix))
            cuts.append(replace(program.cuts[source(i)], index=i))
    return replace(program, slices=tuple(slices), calls=tuple(calls), cuts=tuple(cuts), stamped=layers)


def _moved_slice(piece: Slice, shift: int, prefix: str) -> Slice:
    if shift == 0:
        return piece
    weights = {_moved_name(n, shift, prefix): (n, t) for n, t in piece.weights.items()}
    # A moved layer has weights of its own; weights outside of the layers are shared.
    own = {n: t if n == old else torch.empty_like(t, device="meta") for n, (old, t) in weights.items()}
    return replace(piece, index=piece.index + shift, weights=own)


def _moved_call(call: CutCall, shift: int, prefix: str) -> CutCall:
    rest = tuple(v + shift if i == 0 and v == call.index else v for i, v in enumerate(call.rest))
    return replace(call, index=call.index + shift, name=_moved_name(call.name, shift, prefix), rest=rest)


def _moved_name(name: str, shift: int, prefix: str) -> str:
    return re.sub(rf"(?<={re.escape(prefix)}\.)\d+", lambda m: str(int(m[0]) + shift), name)
