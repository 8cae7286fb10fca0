"""Chooses the values to carry past each exchange: one minimum cut for each, from the last to the first."""

from __future__ import annotations

from torch import fx

from .capture import module_path
from .errors import ConversionError
from .graph import RowGraph, is_expensive, messages_of
from .mincut import CutProblem, min_cut


def plan_cuts(graph: RowGraph) -> list[list[fx.Node]]:
    """Return for every exchange the nodes that cross from the slice before it to the slice after it.

    They are in program order, with values of positions alone last, so that equal layers get equal slices. Going
    backwards makes each cut also supply what later cuts carry.
    """
    cuts: list[list[fx.Node]] = []
    needed = [graph.capture.logits]
    for exchange in reversed(range(len(graph.exchanges))):
        cut = _plan_cut(graph, exchange, needed)
        cuts.append(cut)
        sent = [a for call in graph.exchanges[exchange] for m in messages_of(call) for a in m.operands]
        needed = [*sent, *cut]
    return cuts[::-1]


def _plan_cut(graph: RowGraph, exchange: int, needed: list[fx.Node]) -> list[fx.Node]:
    calls = set(graph.exchanges[exchange])

    def has_run(node: fx.Node) -> bool:
        return node.op == "placeholder" or (is_expensive(node) and graph.runs_before(node, exchange))

    # Outputs need no carrying: they are handed to the next slice.
    local = graph.closure(needed, lambda n: n in calls or has_run(n)) - calls
    before = {n for n in local if has_run(n)}
    edges = [(a, n) for n in local - before for a in n.all_input_nodes if a in local]
    problem = CutProblem(
        capacity={n: t.bytes_per_token if (t := graph.row_tensor(n)) else None for n in local},
        edges=edges,
        before=before,
        after={n for n in local if graph.waits_for(n, exchange)},
        needed=(set(needed) - calls) & local,
        once={n for n in local if is_expensive(n)},
    )
    cut = min_cut(problem)
    if cut is None:
        (call, *_) = graph.exchanges[exchange]
        raise ConversionError(
            f"nothing can be carried past the attention of {module_path(call) or call.name}: "
            "every set of tensors that the rest needs has one whose dimension 0 is not the row"
        )
    return sorted(graph.sorted(cut.nodes), key=lambda n: not graph.reads_tokens(n))
