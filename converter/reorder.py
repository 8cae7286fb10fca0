"""The order of work inside a slice: what Q needs, send Q, what K and V need, send KV, the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from .graph import RowGraph


@dataclass(frozen=True)
class Schedule:
    """One slice: it starts from ``carried`` and the output of ``arrives``, and ends with ``results``.

    ``leaves`` is the call whose q, k and v it sends (None in the last slice). The three lists partition its work.
    """

    carried: list[fx.Node]
    arrives: fx.Node | None
    before_q: list[fx.Node]
    before_kv: list[fx.Node]
    rest: list[fx.Node]
    leaves: fx.Node | None
    results: list[fx.Node]


def schedule_slices(graph: RowGraph, cuts: Sequence[list[fx.Node]]) -> list[Schedule]:
    """L cuts give L + 1 slices; every list is in program order, so each keeps the model's own order of work."""
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
    given = {*carried, *([arrives] if arrives else [])}

    def work(roots: Sequence[object]) -> set[fx.Node]:
        nodes = [r for r in roots if isinstance(r, fx.Node)]
        return graph.closure(nodes, given.__contains__) - given

    before_q = work(leaves.args[:1]) if leaves else set()
    before_kv = work(leaves.args[1:3]) - before_q if leaves else set()
    rest = work(results) - before_q - before_kv
    return Schedule(
        carried, arrives, graph.sorted(before_q), graph.sorted(before_kv), graph.sorted(rest), leaves, results
    )
