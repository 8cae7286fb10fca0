"""Shows that rows are independent: a slice's result for one token must not depend on other tokens of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .capture import module_path, size_expression
from .errors import ConversionError
from .graph import RowGraph, operator_name
from .slices import CutCall, MixerCall, Slice

_REDUCTIONS = {
    "mean", "sum", "prod", "max", "min", "amax", "amin", "aminmax", "var", "std", "var_mean", "std_mean", "norm",
    "linalg_vector_norm", "logsumexp", "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod",
    "cummax", "cummin", "any", "all", "argmax", "argmin", "median", "flip", "roll", "quantile",
}  # fmt: skip
# Sums of integers count (tokens per expert, say); running shows whether they couple rows.
_COUNTS = {"sum", "cumsum"}
_PRODUCTS = {"mm", "bmm", "matmul", "linear"}
_CHOICES = {"topk", "sort", "argsort", "argmax", "argmin"}

# Relative to the largest element: how differently two batch sizes may round the same GEMM, over a layer's depth.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_NUM_ROWS = 16


def check_rows_by_rule(graph: RowGraph) -> None:
    """Raises ConversionError at the first operator that, by its shapes, combines rows or draws random numbers."""
    roots = [graph.capture.logits, *graph.calls]
    for node in graph.sorted(graph.closure(roots, lambda _: False)):
        if not isinstance(node.target, torch._ops.OpOverload) or node in graph.calls:
            continue
        where = f"{node.target} in {module_path(node) or 'the model'} ({node.name})"
        if torch.Tag.nondeterministic_seeded in node.target.tags and operator_name(node) != "dropout":
            raise ConversionError(f"{where} draws random numbers: a step could not be repeated")
        if (reason := _combines_rows(graph, node)) is not None:
            raise ConversionError(
                f"{where} {reason}: the result for one sequence would depend on the others in its batch"
            )


def _row_dims(graph: RowGraph, node: object) -> set[int]:
    value = node.meta["val"] if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or node in graph.static:
        return set()
    rows = graph.capture.rows
    expressions = enumerate(map(size_expression, value.shape))
    return {d for d, expression in expressions if expression is not None and rows in expression.free_symbols}


def _combines_rows(graph: RowGraph, node: fx.Node) -> str | None:
    name, source = operator_name(node), node.args[0] if node.args else None
    row_dims = _row_dims(graph, source)
    if not row_dims or not isinstance(source, fx.Node):
        return None
    value = source.meta["val"]
    sizes = ", ".join("R" if d in row_dims else str(s) for d, s in enumerate(value.shape))
    if name in _REDUCTIONS and _argument(node, "other") is None:
        counting = name in _COUNTS and not value.dtype.is_floating_point
        if not counting and (mixed := _dims(node, value.dim()) & row_dims):
            return f"reduces dimension {min(mixed)} of [{sizes}], the rows"
    if name in _PRODUCTS and value.dim() - 1 in row_dims:
        return f"multiplies and sums over the last dimension of [{sizes}], the rows"
    if name in ("select", "narrow") and _dims(node, value.dim()) & row_dims:
        return f"takes single rows out of [{sizes}]"
    if name == "slice" and _dims(node, value.dim()) & row_dims:
        start, end = _argument(node, "start") or 0, _argument(node, "end")
        if start != 0 or (isinstance(end, int) and end < 2**31):
            return f"takes rows {start}:{end} out of [{sizes}]"
    return None


def _argument(node: fx.Node, name: str) -> Any:
    parameters = node.target._schema.arguments  # type: ignore[union-attr]
    for i, parameter in enumerate(parameters):
        if parameter.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, parameter.default_value)
    return None


def _dims(node: fx.Node, rank: int) -> set[int]:
    dims = _argument(node, "dim")
    if dims is None:
        dims = _argument(node, "dims")
    if dims is None or dims == []:
        return set(range(rank))
    return {d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])}


@dataclass
class _Sent:
    """Keeps the messages that a slice sends."""

    tensors: list[Tensor] = field(default_factory=list)

    def q(self, call: int, q: Tensor) -> None:
        self.tensors.append(q)

    def kv(self, call: int, k: Tensor, v: Tensor) -> None:
        self.tensors += [k, v]

    def mix(self, call: int, *inputs: Tensor) -> None:
        self.tensors += inputs


def stand_in_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a cheap function of q, k and v of each row, in the shapes of attention: [R, Hq, 1, D] ... -> [R, 1, Hq,
    Dv].
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    score = (q.float() * k.float()).mean(-1, keepdim=True)
    return (score.sigmoid().to(v.dtype) * v).transpose(1, 2)


def stand_in_mixer(inputs: Sequence[Tensor], mixer: MixerCall) -> Tensor:
    """Return a cheap function of all inputs of each row, in the shape of the mixer's output."""
    rows, numbers = len(inputs[0]), math.prod(mixer.out.shape)
    gate = sum((x.flatten(1).float().mean(1, keepdim=True).tanh() for x in inputs), torch.ones(()).to(inputs[0].device))
    x = inputs[0].flatten(1).float()
    spread = x[:, torch.arange(numbers, device=x.device) % x.shape[1]] * gate
    return spread.tanh().to(mixer.out.dtype).reshape(rows, *mixer.out.shape)


def check_rows_by_running(
    slices: Sequence[Slice], calls: Sequence[CutCall], max_positions: int, mixers: Sequence[MixerCall] = ()
) -> bool:
    """Run each distinct slice on a batch, on that batch shuffled and doubled, and on parts of it; rows must agree.

    Each slice gets exactly the rows that it got before, so rounding does not accumulate. Positions are the smallest and
    the largest below ``max_positions``, together and apart. Returns False if there are no weights to run (meta device).
    Raises ConversionError naming the slice and the first operator whose rows differ.
    """
    devices = {t.device for s in slices for t in s.weights.values()}
    if any(d.type == "meta" for d in devices):
        return False
    device = next(iter(devices), torch.device("cpu"))
    seen: set[str] = set()
    for piece, inputs, expected in _walk(slices, calls, mixers, max_positions, device):
        if piece.signature in seen:
            continue
        seen.add(piece.signature)
        for chosen in _selections(device):
            part = tuple(t[chosen] for t in inputs)
            if _differ(piece, [t[chosen] for t in expected], _run(piece, part, max_positions)):
                raise ConversionError(
                    f"slice {piece.index} couples its rows: with {len(chosen)} of {_NUM_ROWS} rows in another order "
                    f"the results differ; {_first_difference(piece, inputs, chosen)}"
                )
    return True


def _walk(
    slices: Sequence[Slice],
    calls: Sequence[CutCall],
    mixers: Sequence[MixerCall],
    max_positions: int,
    device: torch.device,
) -> Iterator[tuple[Slice, tuple[Tensor, ...], list[Tensor]]]:
    """Yield every slice with its inputs, messages and results in one pass of ``_NUM_ROWS`` rows."""
    first, last = torch.arange(_NUM_ROWS // 2, device=device), max_positions - 1
    positions = torch.cat([first.clamp(max=last), (last - first).clamp(min=0)])[:, None]
    vocabulary = slices[-1].module.graph.output_node().args[0][0].meta["val"].shape[-1]  # type: ignore[index, union-attr]
    ids = (torch.arange(_NUM_ROWS, device=device)[:, None] * 7919 + 11) % vocabulary
    inputs: tuple[Tensor, ...] = (ids, positions)
    attended, mixed = {call.index for call in calls}, {mixer.index: mixer for mixer in mixers}
    for piece in slices:
        results = _run(piece, inputs, max_positions)
        yield piece, inputs, results
        outputs, carried = list[Tensor](), results
        if piece.index in attended:
            q, k, v, *carried = carried
            outputs.append(stand_in_attention(q, k, v))
        if (mixer := mixed.get(piece.index)) is not None:
            sent, carried = carried[: len(mixer.inputs)], carried[len(mixer.inputs) :]
            outputs.append(stand_in_mixer(sent, mixer))
        inputs = (*carried, *outputs)


def _selections(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(_NUM_ROWS, generator=generator)
    half = _NUM_ROWS // 2
    rows = [torch.cat([shuffled, shuffled]), torch.arange(half).flip(0), torch.arange(half + 1, half + 5)]
    return [r.to(device) for r in (*rows, torch.tensor([_NUM_ROWS - 1]))]


def _arguments(piece: Slice, inputs: tuple[Tensor, ...], messages: _Sent) -> tuple[Any, ...]:
    sends = any(n.op == "call_method" for n in piece.module.graph.nodes)
    return (*inputs, messages) if sends else inputs


def _run(piece: Slice, inputs: tuple[Tensor, ...], max_positions: int) -> list[Tensor]:
    messages = _Sent()
    try:
        results = piece(*_arguments(piece, inputs, messages))
    except (IndexError, RuntimeError) as error:
        raise ConversionError(
            f"slice {piece.index} fails on {len(inputs[0])} rows at positions below {max_positions}: {error}"
        ) from error
    return [*messages.tensors, *results]


def _differ(piece: Slice, expected: list[Tensor], actual: list[Tensor]) -> bool:
    """Return True if any row differs beyond rounding.

    In a slice with discrete choices (experts), rounding may flip a close choice, so a quarter of the rows may differ.
    With coupled rows nearly all differ.
    """
    chooses = any(n.op == "call_function" and operator_name(n) in _CHOICES for n in piece.module.graph.nodes)
    for want, have in zip(expected, actual, strict=True):
        if want.shape != have.shape:
            return True
        limit = math.ceil(len(want) / 4) if chooses else 0
        if _rows_apart(want, have) > limit:
            return True
    return False


def _rows_apart(want: Tensor, have: Tensor) -> int:
    """Return the number of rows that differ by more than rounding, relative to the largest element of ``want``."""
    if want.numel() == 0:  # such as the part of Q that is not rotated, if all of it is
        return 0
    if not want.dtype.is_floating_point:
        return int((want != have).flatten(1).any(1).sum())
    tolerance = _TOLERANCES[want.dtype]
    want, have = (t.double().nan_to_num().flatten(1) for t in (want, have))
    return int(((want - have).abs().amax(1) > tolerance * want.abs().max()).sum())


class _Tracing(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def values(self, *args: Any) -> dict[fx.Node, Any]:
        with torch.no_grad():
            self.run(*args)
        return self.env


def _first_difference(piece: Slice, inputs: tuple[Tensor, ...], chosen: Tensor) -> str:
    part_inputs = tuple(t[chosen] for t in inputs)
    whole, part = (_Tracing(piece.module).values(*_arguments(piece, i, _Sent())) for i in (inputs, part_inputs))
    for node, want in whole.items():
        have = part.get(node)
        if node.op != "call_function" or not isinstance(want, Tensor) or not isinstance(have, Tensor):
            continue
        if want.dim() and len(want) == _NUM_ROWS and len(have) == len(chosen) and _rows_apart(want[chosen], have):
            return f"first at {operator_name(node)} in {module_path(node) or 'the model'} ({node.name})"
    return "no single operator to blame"
