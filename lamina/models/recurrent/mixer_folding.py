"""Makes one operator of each captured convolution and the recurrence that reads it.

As two operators a layer would pay two round trips. Between the two may lie only operators that move numbers: they run
here on the numbers of channels, which shows what the recurrence reads.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, fx

from lamina.converter.influence import MOVES
from lamina.models.errors import UnsupportedModelError
from lamina.ops.recurrence.op import CONVOLUTION_OP, MIXER_OP, RECURRENCE_OP
from lamina.ops.recurrence.spec import RecurrenceSpec

aten = torch.ops.aten

_READ_BY_CHANNEL = 3  # the first inputs of a recurrence: q, k and v


def fold_mixers(graph: fx.Graph) -> None:
    """Replace convolutions and recurrences of a captured step by mixers, in place. Raises UnsupportedModelError."""
    folded = set[fx.Node]()
    for node in list(graph.nodes):
        if node.target is RECURRENCE_OP:
            folded |= _fold(graph, node)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target is CONVOLUTION_OP:
            if node in folded:
                raise UnsupportedModelError(f"{_path(node)} reads its convolution in other ways than by its recurrence")
            _convolution_alone(graph, node)
    graph.eliminate_dead_code()
    mixers = [node for node in graph.nodes if node.target is MIXER_OP]
    for number, node in enumerate(mixers):
        node.args = (*node.args[:2], number, node.args[3])


def _fold(graph: fx.Graph, node: fx.Node) -> set[fx.Node]:
    """Replace one recurrence; returns the convolutions that it has read."""
    inputs, operands, text = _arguments(node)
    spec = RecurrenceSpec.decode(text)
    convolutions = [_convolution_of(given) for given in inputs[:_READ_BY_CHANNEL]]
    reads = {
        name: _channels_read(given, source).flatten()
        for name, given, source in zip(spec.channel_ranges, inputs, convolutions, strict=False)
    }
    spec = _with_shared_groups(spec, reads)
    sources: list[fx.Node] = []
    start = 0
    for (name, channels), source in zip(spec.channel_ranges.items(), convolutions, strict=True):
        if source not in sources:
            start = sum(_channels(each) for each in sources)
            sources.append(source)
        read = reads[name]
        wanted = torch.arange(channels.first - start, channels.first - start + channels.size)
        if not torch.equal(read, wanted):
            raise UnsupportedModelError(f"{_path(node)} reads the channels of its convolution in another order")
    facts = {(tuple(w.meta["val"].shape[1:]), bias is None, silu) for _, w, bias, silu in map(_arguments, sources)}
    if len(facts) > 1 or sum(map(_channels, sources)) != spec.channels:
        raise UnsupportedModelError(f"{_path(node)} has convolutions that differ, or channels that it does not read")
    x, weight, bias, silu = _arguments(sources[0])
    with graph.inserting_before(node):
        if len(sources) > 1:
            x = _joined(graph, [s.args[0] for s in sources], 1)
            weight = _joined(graph, [s.args[1] for s in sources], 0)
            bias = None if bias is None else _joined(graph, [s.args[2] for s in sources], 0)
        spec = structs.replace(
            spec,
            width=weight.meta["val"].shape[1],
            bias=bias is not None,
            silu=silu,
        )
        static = [weight, *([] if bias is None else [bias]), *operands]
        _replace(graph, node, [x, *inputs[_READ_BY_CHANNEL:]], static, spec)
    return set(sources)


def _with_shared_groups(spec: RecurrenceSpec, reads: dict[str, Tensor]) -> RecurrenceSpec:
    """Return the spec whose heads share each q and k that the model repeats for them, as transformers does before 5.23.

    ``reads``: the channels that q, k and v read, by name. Repeats are taken out of q and k.
    """
    rows = {name: reads[name].view(-1, spec.key_dim) for name in "qk"}
    repeats = int((rows["q"] == rows["q"][0]).all(1).sum())
    shared = {name: each[::repeats] for name, each in rows.items()}
    if repeats == 1 or any(not torch.equal(shared[n].repeat_interleave(repeats, 0), rows[n]) for n in rows):
        return spec
    reads |= {name: each.flatten() for name, each in shared.items()}
    return structs.replace(spec, groups=spec.groups // repeats, heads_per_group=spec.heads_per_group * repeats)


def _convolution_alone(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, silu = _arguments(node)
    channels, width = weight.meta["val"].shape
    spec = RecurrenceSpec(kind="convolution", heads=channels, width=width, silu=bool(silu), bias=bias is not None)
    with graph.inserting_before(node):
        _replace(graph, node, [x], [weight] if bias is None else [weight, bias], spec)


def _replace(graph: fx.Graph, node: fx.Node, inputs: list[Any], static: list[Any], spec: RecurrenceSpec) -> None:
    mixer = graph.call_function(MIXER_OP, (inputs, static, 0, spec.encode()))
    mixer.meta = {key: value for key, value in node.meta.items() if key in ("val", "nn_module_stack")}
    node.replace_all_uses_with(mixer)
    graph.erase_node(node)


def _joined(graph: fx.Graph, parts: list[Any], dim: int) -> fx.Node:
    node = graph.call_function(aten.cat.default, (parts, dim))
    node.meta = {"val": torch.cat([p.meta["val"] for p in parts], dim)}
    if "nn_module_stack" in parts[0].meta:
        node.meta["nn_module_stack"] = parts[0].meta["nn_module_stack"]
    return node


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _channels(convolution: fx.Node) -> int:
    return int(_arguments(convolution)[1].meta["val"].shape[0])


def _convolution_of(node: fx.Node) -> fx.Node:
    """Return the convolution of which ``node`` has numbers. Raises UnsupportedModelError for anything in between."""
    while node.target is not CONVOLUTION_OP:
        name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        if node.op != "call_function" or (node.target is not operator.getitem and name not in MOVES):
            raise UnsupportedModelError(
                f"{_path(node)} computes {name} between its convolution and its recurrence: memory workers compute the "
                f"two together, with nothing in between"
            )
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _channels_read(node: fx.Node, convolution: fx.Node) -> Tensor:
    """Return the channel of each number of one row of ``node``."""
    known: dict[fx.Node, Any] = {convolution: torch.arange(_channels(convolution))[None]}

    def value(of: fx.Node) -> Any:
        if of not in known:
            if of.target is aten.sym_size.int:
                known[of] = 1  # rows
            else:
                args, kwargs = fx.map_arg((of.args, of.kwargs), value)
                known[of] = of.target(*args, **kwargs)  # type: ignore[operator]
        return known[of]

    read: Tensor = value(node)
    return read


def _path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {"": ("a layer", "")}
    return str(list(stack.values())[-1][0]) or "a layer"
