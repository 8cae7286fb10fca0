"""What becomes of a cut program before it runs: one list of passes, in their order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from lamina import collective, gemm, rows
from lamina.collective import Collective
from lamina.gemm import LinearBackend
from lamina.workers.graphs import GraphCapture, Graphs

from .emulated import emulated
from .few_rows import FewRows


class Pass(NamedTuple):
    """``run`` takes the program of the pass before, which is used up."""

    name: str
    run: Callable[[Any], Any]


def passes(
    backend: LinearBackend,
    *,
    group: Collective | None = None,
    capture: GraphCapture | None = None,
    prefill: bool = False,
) -> list[Pass]:
    """The passes that a worker's program takes.

    ``backend``: of linear layers. ``group``: the other ranks. ``capture``: records graphs, where the device has them.
    ``prefill``: whether the program computes prompts.
    """
    linear = Pass("bind linear layers", partial(gemm.bind, backend=backend))
    last = Pass("emulate a device", partial(emulated, prefill=prefill))
    if capture is not None:  # a rank meets the others between its graphs, unless these hold the meeting
        return [linear, Pass("record graphs", lambda program: Graphs(program, capture, group)), last]
    ordered = []
    if group is not None:
        ordered.append(Pass("meet ranks", partial(collective.bind, collective=group)))
    if backend.engine is not None:  # it looks for operators, which a bound linear layer is not
        ordered.append(Pass("bind rows", partial(rows.bind, backend=backend)))
    ordered.append(linear)
    if backend.engine is not None:
        ordered.append(Pass("chain units", rows.chain))
    if backend.own_threads:
        ordered.append(Pass("one thread for few rows", FewRows))
    return [*ordered, last]
