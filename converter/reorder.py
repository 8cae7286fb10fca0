"""The order of work inside a slice: for each message what its operands need, then the rest. Q leaves first, unless a
measurement asks for the order of the captured program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from .graph import Message, RowGraph, messages_of


@dataclass(frozen=True)
class Schedule:
    """One slice: it starts from ``carried`` and the outputs that ``arrive``, sends each of ``messages`` after the work
    that it needs in addition to earlier ones, and ends with ``results``. The lists partition its work.
    """

    carried: list[fx.Node]
    arrive: tuple[fx.Node, ...]
    messages: list[tuple[list[fx.Node], Message]]
    rest: list[fx.Node]
    results: list[fx.Node]


def schedule_slices(graph: RowGraph, cuts: Sequence[list[fx.Node]], *, early_q: bool = True) -> list[Schedule]:
    """Return the L + 1 slices of L cuts. ``early_q``: each message leaves as soon as its operands are computed. Without
    it all messages of a slice leave together, after their work in the order of the captured program.

    Each list is in order of demand: a node comes right before its first consumer, operands from left to right. So the
    order follows from what a slice computes, not from the node's place in the model, and equal layers get equal slices.
    """
    starts = [list(graph.capture.inputs), *cuts]
    ends = [*cuts, [graph.capture.logits]]
    exchanges: list[tuple[fx.Node, ...]] = [(), *graph.exchanges, ()]
    return [_schedule(graph, early_q, *parts) for parts in zip(starts, exchanges, exchanges[1:], ends, strict=False)]


def _schedule(
    graph: RowGraph,
    early_q: bool,
    carried: list[fx.Node],
    arrive: tuple[fx.Node, ...],
    leave: tuple[fx.Node, ...],
    results: list[fx.Node],
) -> Schedule:
    done = {*carried, *arrive, *graph.static}
    sent = [message for call in leave for message in messages_of(call)]
    messages = [(_by_demand(message.operands, done), message) for message in sent]
    if not early_q:
        work = sorted(node for before, _ in messages for node in before)
        messages = [([] if i else work, message) for i, message in enumerate(sent)]
    rest = _by_demand(results, done)
    return Schedule(carried, arrive, messages, rest, results)


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
