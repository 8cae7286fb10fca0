"""The order of work inside a slice: Q's operands, send Q, the operands of K and V, send KV, the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from .graph import RowGraph


@dataclass(frozen=True)
class Schedule:
    """One slice: it starts from ``carried`` and the output of ``arrives``, and ends with ``results``. ``leaves`` is the
    call whose q, k and v it sends (None in the last slice). The three lists partition its work.
    """

    carried: list[fx.Node]
    arrives: fx.Node | None
    before_q: list[fx.Node]
    before_kv: list[fx.Node]
    rest: list[fx.Node]
    leaves: fx.Node | None
    results: list[fx.Node]


def schedule_slices(graph: RowGraph, cuts: Sequence[list[fx.Node]]) -> list[Schedule]:
    """Return the L + 1 slices of L cuts.

    Each list is in order of demand: a node comes right before its first consumer, operands from left to right. So the
    order follows from what a slice computes, not from the node's place in the model, and equal layers get equal slices.
    """
    starts = [list(graph.capture.inputs), *cuts]
    ends = [*cuts, [graph.capture.logits]]
    calls = [None, *graph.calls, None]
    return [_schedule(graph, *parts) for parts in zip(starts, calls, calls[1:], ends, strict=False)]


def _schedule(
    graph: RowGraph,
    carried: list[fx.Node],
    arrives: fx.Node | None,
    leaves: fx.Node | None,
    results: list[fx.Node],
) -> Schedule:
    done = {*carried, *([arrives] if arrives else []), *graph.static}
    operands = [a for a in leaves.args[:3] if isinstance(a, fx.Node)] if leaves else []
    before_q = _by_demand(operands[:1], done)
    before_kv = _by_demand(operands[1:], done)
    rest = _by_demand(results, done)
    return Schedule(carried, arrives, before_q, before_kv, rest, leaves, results)


def _by_demand(roots: Sequence[fx.Node], done: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes that ``roots`` need beyond ``done``, each after its operands; they are added to ``done``."""
    order: list[fx.Node] = []
    stack = list(reversed(roots))
    while stack:
        node = stack[-1]
        missing = [a for a in node.all_input_nodes if a not in done]
        if node in done or not missing:
            stack.pop()
            if node not in done:
                done.add(node)
                order.append(node)
        else:
            stack += reversed(missing)
    return order
