"""The division of recurrent layers between ranks: each computes some heads of every layer, with what these read.

What follows a layer has the shape of all heads, as the model's code counts on that: zeros are in the places of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lamina.converter.capture import module_path
from lamina.converter.graph import is_expensive, operator_name
from lamina.converter.influence import SUMS, influence, run_row, shape_of_row
from lamina.models.attention_routing import WeightShard
from lamina.models.errors import UnsupportedModelError
from lamina.ops.collective.op import ALL_REDUCE_OP
from lamina.ops.recurrence.op import MIXER_OP
from lamina.ops.recurrence.parts import Part
from lamina.ops.recurrence.spec import Range, RecurrenceSpec

aten = torch.ops.aten


def spec_of(mixer: fx.Node) -> RecurrenceSpec:
    """Return what an operator computes."""
    text: Any = mixer.args[3]
    return RecurrenceSpec.decode(text)


def part_of(mixer: fx.Node, rank: int, size: int) -> Part:
    """Return the heads of a mixer that a rank has."""
    spec = spec_of(mixer)
    each = spec.heads // size
    return Part.of(spec, rank * each, each)


def own_inputs(mixer: fx.Node, part: Part) -> list[tuple[fx.Node, Tensor]]:
    """Return the inputs of a mixer, each with a tensor of its shape for one row: 1 where ``part`` reads it, else 0."""
    inputs: Any = mixer.args[0]
    masks = []
    for node, name in zip(inputs, part.whole.input_columns, strict=True):
        mask = torch.zeros(shape_of_row(node.meta["val"]))
        for first, count in part.columns(name):
            mask.view(-1)[first : first + count] = 1.0
        masks.append((node, mask))
    return masks


def own_output(call: fx.Node, dim: int, rank: int, size: int) -> Tensor:
    """Return a tensor of the shape of a call's output for one row: 1 in the heads of ``rank``, else 0."""
    mask = torch.zeros(shape_of_row(call.meta["val"]))
    each = mask.shape[dim] // size
    mask.narrow(dim, rank * each, each).fill_(1.0)
    return mask


class SharedSum(NamedTuple):
    """A sum over heads of several ranks. ``own``: by rank, 1 where it has a number that is added up, else 0."""

    node: fx.Node
    own: list[Tensor]

    @property
    def source(self) -> fx.Node:
        """The node whose numbers are added up."""
        return self.node.all_input_nodes[0]


def shared_sums(graph: fx.Graph, call: fx.Node, masks: Sequence[Tensor]) -> list[SharedSum]:
    """Return the sums and means that add up heads of several ranks, before the next matrix product. ``masks``: of the
    call's output, by rank. All ranks together have their results, as zeros are in the places of other ranks' heads.
    Raises UnsupportedModelError for anything else that needs heads of several ranks.
    """
    after = _until_product(graph, call)
    shared, given = list[SharedSum](), [{call: 1.0 - mask} for mask in masks]
    while True:
        lacks = [influence(after, each) for each in given]
        if (node := _first_mixed(after, lacks)) is None:
            return shared
        if operator_name(node) not in SUMS or not _adds_zeros(after, call, shared, node):
            raise UnsupportedModelError(
                f"--tensor-parallel-size: {module_path(node) or 'the model'} computes {operator_name(node)} of all "
                f"heads of {module_path(call)}, which ranks cannot divide: leave it at 1"
            )
        source: Any = node.args[0]
        shared.append(SharedSum(node, [(known[source] == 0).float() for known in lacks]))
        for each in given:
            each[node] = torch.zeros(shape_of_row(node.meta["val"]))


def _until_product(graph: fx.Graph, call: fx.Node) -> list[fx.Node]:
    """Return the operators that read a call's output, up to the next matrix products, which are left out."""
    readers = {call}
    for node in graph.nodes:
        if node.op == "call_function" and not is_expensive(node) and not readers.isdisjoint(node.all_input_nodes):
            readers.add(node)
    return [node for node in graph.nodes if node in readers and node is not call]


def _first_mixed(after: Sequence[fx.Node], lacks: Sequence[dict[fx.Node, Any]]) -> fx.Node | None:
    """Return the first operator a number of whose result no rank has. ``lacks``: by rank, above 0 where it has not."""
    for node in after:
        values = [known.get(node) for known in lacks]
        tensors = [x > 0 for x in values if isinstance(x, Tensor)]
        if tensors and len(tensors) == len(values) and bool(torch.stack(tensors).all(0).any()):
            return node
    return None


def _adds_zeros(after: Sequence[fx.Node], call: fx.Node, shared: Sequence[SharedSum], total: fx.Node) -> bool:
    """Return whether ``total`` adds up zeros alone, if those are all that ``call`` gives. ``shared``: the sums before
    it, which all ranks have, so they are not 0.
    """
    source: Any = total.args[0]
    given = {call: torch.zeros(shape_of_row(call.meta["val"]))}
    given |= {each.node: torch.rand(shape_of_row(each.node.meta["val"])) + 0.5 for each in shared}
    value = run_row(after[: after.index(total)], given).get(source)
    return isinstance(value, Tensor) and not bool(value.any())


def divide_mixers(graph: fx.Graph, part: WeightShard) -> None:
    """Let each mixer of a captured step compute a rank's heads alone, in place. Raises UnsupportedModelError."""
    for mixer in [node for node in graph.nodes if node.target is MIXER_OP]:
        masks = [own_output(mixer, 1, rank, part.size) for rank in range(part.size)]
        for node, _ in shared_sums(graph, mixer, masks):
            with graph.inserting_after(node):
                _insert(graph, node, graph.call_function(ALL_REDUCE_OP, (node,)))
        own = part_of(mixer, part.rank, part.size)
        inputs: Any = mixer.args[0]
        static: Any = mixer.args[1]
        by_channel = ("x", "weight", "bias")
        places = dict.fromkeys(by_channel, own.channels)
        heads = (Range(own.first, own.spec.heads),)
        with graph.inserting_before(mixer):
            given = zip(inputs, own.whole.input_columns, strict=True)
            moved = [_narrowed(graph, x, 1, places.get(name, heads)) for x, name in given]
            shared = zip(static, own.whole.static_shapes, strict=True)
            kept = [_narrowed(graph, x, 0, places.get(name, heads)) for x, name in shared]
        mixer.args = (moved, kept, mixer.args[2], own.spec.encode())
        whole = mixer.meta["val"]
        mixer.meta["val"] = whole.narrow(1, own.first, own.spec.heads).clone()
        pads = [0] * (2 * (whole.dim() - 2)) + [own.first, own.whole.heads - own.first - own.spec.heads]
        with graph.inserting_after(mixer):
            _insert(graph, mixer, graph.call_function(aten.constant_pad_nd.default, (mixer, pads, 0.0)), whole)
    graph.eliminate_dead_code()


def _insert(graph: fx.Graph, node: fx.Node, new: fx.Node, value: Any = None) -> None:
    """Let every reader of ``node`` read ``new``, which reads it."""
    _describe(new, node, node.meta["val"] if value is None else value)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def _narrowed(graph: fx.Graph, x: fx.Node, dim: int, ranges: Sequence[Range]) -> fx.Node:
    """Return the parts ``ranges`` of a dimension, one after the other."""
    if [(first, size) for first, size in ranges] == [(0, x.meta["val"].shape[dim])]:
        return x
    parts = []
    for first, size in ranges:
        part = graph.call_function(aten.slice.Tensor, (x, dim, first, first + size))
        parts.append(_describe(part, x, x.meta["val"].narrow(dim, first, size)))
    if len(parts) == 1:
        return parts[0]
    joined = graph.call_function(aten.cat.default, (parts, dim))
    return _describe(joined, x, torch.cat([part.meta["val"] for part in parts], dim))


def _describe(new: fx.Node, like: fx.Node, value: Any) -> fx.Node:
    new.meta["val"] = value
    if "nn_module_stack" in like.meta:
        new.meta["nn_module_stack"] = like.meta["nn_module_stack"]
    return new
