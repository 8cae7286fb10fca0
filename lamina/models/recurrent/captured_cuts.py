"""The cut of a hybrid model's linear layers for ranks, found in its captured step.

transformers has no plan for recurrent layers, or one that makes their inputs whole. Here each rank has the columns of a
linear layer on which its heads depend. It has those rows of the next one that read its heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lamina.converter import ConversionError
from lamina.converter.capture import Capture, capture, module_path
from lamina.converter.graph import operator_name
from lamina.converter.influence import influence, is_pointwise, shape_of_row
from lamina.models.attention_routing import DecodeStep, routed_attention
from lamina.models.errors import UnsupportedModelError
from lamina.ops.attention.op import ATTENTION_OP
from lamina.ops.recurrence.op import MIXER_OP

from .mixer_division import own_inputs, own_output, part_of, shared_sums, spec_of
from .mixer_folding import fold_mixers
from .mixer_routing import routed_mixers

Ranges = tuple[tuple[int, int], ...]  # first number, and the one after the last
GATHERED = "colwise_gather_output"  # a style of transformers, which divides the work, and makes the result whole
ROWWISE = {"rowwise", "rowwise_rep", "rowwise_split_input"}  # styles of layers that read an equal share of their inputs


class LinearCuts(NamedTuple):
    """The cuts of linear layers, by their names. ``columns``: of each rank, the outputs that it computes. ``narrow``:
    those of them whose result has a rank's columns alone; others have zeros in the places of other columns. ``rows``:
    layers that add up what all ranks compute of their own inputs.
    """

    columns: dict[str, tuple[Ranges, ...]]
    narrow: frozenset[str]
    rows: frozenset[str]

    @property
    def wide_columns(self) -> dict[str, tuple[Ranges, ...]]:
        """The entries of ``columns`` that are not narrow."""
        return {name: own for name, own in self.columns.items() if name not in self.narrow}


@dataclass(frozen=True)
class CapturedStep:
    """A whole model's step. ``linears``: its linear layers, and the names of their modules."""

    graph: fx.Graph
    linears: dict[fx.Node, str]
    attentions: list[fx.Node]
    mixers: list[fx.Node]

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Query and KV heads of each attention."""
        return [(_shape(call.args[0])[1], _shape(call.args[1])[1]) for call in self.attentions]

    @property
    def widths(self) -> dict[str, int]:
        """The facts of recurrent layers that the number of ranks has to divide, in words."""
        return {
            f"the {spec_of(m).heads} heads of recurrent layer {i}": spec_of(m).heads for i, m in enumerate(self.mixers)
        }

    def padded(self, cuts: LinearCuts) -> tuple[bool, ...]:
        """Return of each attention whether its inputs have the places of all heads, by ``cuts``."""
        return tuple(any(name in cuts.columns for name in self._inputs_of(call)) for call in self.attentions)

    def _inputs_of(self, call: fx.Node) -> set[str]:
        """Return the linear layers of which an attention reads Q."""
        names, stack = set[str](), [call.args[0]]
        while stack:
            node: Any = stack.pop()
            if node in self.linears:
                names.add(self.linears[node])
            else:
                stack += node.all_input_nodes
        return names

    def cuts(self, size: int, planned: Mapping[str, str]) -> LinearCuts:
        """Return the cuts for ``size`` ranks, which divides all heads. ``planned``: the linear layers that have a style
        of their own, which says that a rank's inputs or outputs are not whole. Raises UnsupportedModelError.
        """
        return _CutFinder(self, size, planned).find()


def capture_step(model: nn.Module, max_model_len: int) -> CapturedStep:
    """Capture a whole model on the meta device. Raises UnsupportedModelError."""
    # The other way to compute experts requires bfloat16 without data.
    route = routed_attention(model, max_model_len=max_model_len, experts="batched_mm")
    with torch.no_grad(), route, routed_mixers(model):
        try:
            captured = capture(DecodeStep(model), (ATTENTION_OP, MIXER_OP), prepare=fold_mixers)
        except ConversionError as error:
            raise UnsupportedModelError(f"{type(model).__name__} cannot be cut: {error}") from error
    calls = captured.calls
    attentions, mixers = ([c for c in calls if c.target is op] for op in (ATTENTION_OP, MIXER_OP))
    return CapturedStep(captured.graph, dict(_linears(captured, dict(model.named_modules()))), attentions, mixers)


def _linears(captured: Capture, modules: Mapping[str, nn.Module]) -> Iterator[tuple[fx.Node, str]]:
    for node in captured.graph.nodes:
        if operator_name(node) == "linear" and node.args[1] in captured.weights:
            path, _, kind = captured.weights[node.args[1]].fqn.partition(".")[2].rpartition(".")
            if kind == "weight" and type(modules.get(path)) is nn.Linear:
                yield node, path


class _Read(NamedTuple):
    """A node that ``reader`` reads. ``mask``: 1 where it does, else 0; None: it reads all numbers."""

    reader: fx.Node
    source: fx.Node
    mask: Tensor | None


class _CutFinder:
    """Finds the cuts of a captured step for ``size`` ranks."""

    def __init__(self, step: CapturedStep, size: int, planned: Mapping[str, str]) -> None:
        self._step, self._size, self._planned = step, size, planned
        dims = {call: 2 if call in step.attentions else 1 for call in (*step.attentions, *step.mixers)}
        self._own = {c: [own_output(c, dim, rank, size) for rank in range(size)] for c, dim in dims.items()}
        self._shared = [each for call in step.mixers for each in shared_sums(step.graph, call, self._own[call])]
        for call in step.attentions:
            for each in shared_sums(step.graph, call, self._own[call]):
                raise UnsupportedModelError(
                    f"--tensor-parallel-size: {module_path(each.node)} adds up all heads of {module_path(call)}, which "
                    f"ranks cannot divide: leave it at 1"
                )
        sources = [*step.linears, *dims, *(each.node for each in self._shared)]
        self._given = {node: torch.zeros(_shape(node), requires_grad=True) for node in sources}
        self._known = influence(step.graph.nodes, self._given)
        self._stream = _readers_of_embeddings(step.graph, set(sources))

    def find(self) -> LinearCuts:
        """Return the cuts. A layer has the columns that a rank needs; where it needs all, rows where these divide."""
        linears, columns = self._step.linears, self._columns([])
        rows = [node for node, name in linears.items() if self._is_free(name) and self._divides(node)]
        known = None
        while columns != known:  # the fewer inputs layers read, the fewer columns of others are needed
            known, rows = columns, [node for node in rows if linears[node] not in columns]
            columns = self._columns(rows)
        names = {linears[node] for node in rows}
        if split := [node for node, name in linears.items() if name in names and node not in rows]:
            raise UnsupportedModelError(
                f"--tensor-parallel-size: {linears[split[0]]} runs more than once, in ways that ranks cannot divide "
                f"alike: leave it at 1"
            )
        self._check_heads(rows)
        narrow = frozenset(name for row in rows for name in self._narrow_inputs(row, columns))
        return LinearCuts(columns, narrow, frozenset(names))

    def _is_free(self, name: str) -> bool:
        return self._planned.get(name) in (None, GATHERED)

    def _columns(self, rows: Sequence[fx.Node]) -> dict[str, tuple[Ranges, ...]]:
        """Return the columns that each rank needs, of layers of which it does not need all."""
        needed = [self._needed(rank, rows) for rank in range(self._size)]
        columns = dict[str, tuple[Ranges, ...]]()
        for name in dict.fromkeys(self._step.linears.values()):
            own = tuple(_ranges(each[name]) for each in needed)
            if self._is_free(name) and all(own) and not all(bool(each[name].all()) for each in needed):
                columns[name] = own
        return columns

    def _divides(self, linear: fx.Node) -> bool:
        """Return whether equal shares of the inputs of ``linear`` depend on each rank's heads, or without heads on
        different columns of other layers.
        """
        source: Any = linear.args[0]
        x = self._known.get(source)
        if source in self._stream or not isinstance(x, Tensor) or not x.requires_grad or x.shape[-1] % self._size:
            return False
        parts = [_gradients((x * self._share(x, rank)).sum(), self._given) for rank in range(self._size)]
        calls = [call for call in self._own if any(call in part for part in parts)]
        if calls:
            return all(
                call not in part or not bool((part[call] * (1.0 - own)).any())
                for call in calls
                for part, own in zip(parts, self._own[call], strict=True)
            )
        read = [node for node in self._step.linears if all(node in part for part in parts)]
        return any(int(sum((part[node] > 0).int() for part in parts).max()) == 1 for node in read)  # type: ignore[union-attr]

    def _share(self, x: Tensor, rank: int) -> Tensor:
        """Return 1 in a rank's share of the last dimension of ``x``, else 0."""
        mask, each = torch.zeros(x.shape), x.shape[-1] // self._size
        mask[..., rank * each : (rank + 1) * each] = 1.0
        return mask

    def _check_heads(self, rows: Sequence[fx.Node]) -> None:
        """Raise UnsupportedModelError if a rank reads heads that other ranks compute: it has zeros in their places."""
        planned = [node for node, name in self._step.linears.items() if self._planned.get(name) in ROWWISE]
        for rank in range(self._size):
            reads = self._reads(rank, [*rows, *planned])
            if self._foreign(reads, rank) is None:
                continue
            reader, call = next((r.reader, call) for r in reads if (call := self._foreign([r], rank)) is not None)
            raise UnsupportedModelError(
                f"--tensor-parallel-size: {self._step.linears.get(reader) or module_path(reader) or 'the model'} reads "
                f"heads of {module_path(call)} in a way that ranks cannot divide: leave it at 1"
            )

    def _foreign(self, reads: Sequence[_Read], rank: int) -> fx.Node | None:
        """Return a call on whose heads of other ranks ``reads`` depend; None if there is none."""
        gradients = self._depends_on(reads)
        calls = (call for call in self._own if call in gradients)
        return next((call for call in calls if bool((gradients[call] * (1.0 - self._own[call][rank])).any())), None)

    def _reads(self, rank: int, rows: Sequence[fx.Node]) -> list[_Read]:
        """Return all that ``rank`` reads. ``rows``: layers that read an equal share of their inputs."""
        step, end = self._step, self._step.graph.output_node()
        reads = [_Read(end, source, None) for source in end.all_input_nodes]
        for node in step.linears:
            source: Any = node.args[0]
            reads.append(_Read(node, source, self._share(self._known[source], rank) if node in rows else None))
        for call in step.attentions:
            sources = [a for a in call.args[:3] if isinstance(a, fx.Node)]
            reads += [_Read(call, a, own_output(a, 1, rank, self._size)) for a in sources]
        for call in step.mixers:
            reads += [_Read(call, *each) for each in own_inputs(call, part_of(call, rank, self._size))]
        return reads + [_Read(each.node, each.source, each.own[rank]) for each in self._shared]

    def _depends_on(self, reads: Sequence[_Read]) -> dict[fx.Node, Tensor]:
        """Return the given numbers on which ``reads`` depend, as gradients."""
        total = torch.zeros(())
        for _, source, mask in reads:
            if isinstance(value := self._known.get(source), Tensor):
                total = total + (value if mask is None else value * mask).sum()
        return _gradients(total, self._given)

    def _needed(self, rank: int, rows: Sequence[fx.Node]) -> dict[str, Tensor]:
        """Return which columns of each linear layer ``rank`` needs."""
        gradients, needed = self._depends_on(self._reads(rank, rows)), dict[str, Tensor]()
        for node, name in self._step.linears.items():
            width = _shape(node)[-1]
            own = gradients[node].view(-1, width).any(0) if node in gradients else torch.zeros(width, dtype=torch.bool)
            needed[name] = own | needed.get(name, own)
        return needed

    def _narrow_inputs(self, row: fx.Node, columns: Mapping[str, tuple[Ranges, ...]]) -> list[str]:
        """Return the layers from whose equal shares of columns ``row`` reads its share of inputs, with operators of
        single numbers alone in between; none if there are others.
        """
        linears, between, layers = self._step.linears, {row}, list[fx.Node]()
        stack: list[Any] = [row.args[0]]
        while stack:
            node = stack.pop()
            if node in linears:
                layers.append(node)
            elif not is_pointwise(node):
                return []
            else:
                between.add(node)
                stack += node.all_input_nodes
        readers = {
            user
            for node in (*layers, *(between - {row}))
            for user in node.users
            if isinstance(user.meta.get("val"), Tensor)
        }
        names = [linears[node] for node in layers]
        each = _shape(row.args[0])[-1] // self._size
        equal = tuple(((rank * each, (rank + 1) * each),) for rank in range(self._size))
        alone = all(list(linears.values()).count(name) == 1 and columns.get(name) == equal for name in names)
        return names if alone and readers <= between else []


def _shape(node: Any) -> list[int]:
    return shape_of_row(node.meta["val"])


def _gradients(total: Tensor, given: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    """Return the gradients that are not 0."""
    if not total.requires_grad:
        return {}
    gradients = torch.autograd.grad(total, [*given.values()], retain_graph=True, allow_unused=True)
    return {node: x for node, x in zip(given, gradients, strict=True) if x is not None and bool(x.any())}


def _readers_of_embeddings(graph: fx.Graph, sources: Collection[fx.Node]) -> set[fx.Node]:
    """Return what depends on embeddings, but not by ``sources`` alone: the residual stream, and norms of it."""
    readers = set[fx.Node]()
    for node in graph.nodes:
        if node not in sources and (operator_name(node) == "embedding" or not readers.isdisjoint(node.all_input_nodes)):
            readers.add(node)
    return readers


def _ranges(mask: Tensor) -> Ranges:
    """Return where ``mask`` is true, as ranges."""
    ends = torch.nn.functional.pad(mask.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return tuple(zip(ends[::2], ends[1::2], strict=True))
