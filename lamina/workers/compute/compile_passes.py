"""What becomes of a cut program before it runs: one list of passes, in their order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from lamina.ops import collective, gemm, rows
from lamina.ops.collective import Collective
from lamina.ops.gemm import LinearBackend
from lamina.workers.cuda_graphs import GraphCapture, GraphedProgram

from .emulated_slices import with_emulated_times
from .single_threaded_slices import SingleThreadedProgram


class Pass(NamedTuple):
    """``run`` takes the program of the pass before, which is used up."""

    name: str
    run: Callable[[Any], Any]


def compile_passes(
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
    last = Pass("emulate a device", partial(with_emulated_times, prefill=prefill))
    if capture is not None:  # a rank meets the others between its graphs, unless these hold the meeting
        return [linear, Pass("record graphs", lambda program: GraphedProgram(program, capture, group)), last]
    ordered = []
    if group is not None:
        ordered.append(Pass("meet ranks", partial(collective.bind, collective=group)))
    if backend.engine is not None:  # it looks for operators, which a bound linear layer is not
        ordered.append(Pass("bind rows", partial(rows.bind_rows, backend=backend)))
    ordered.append(linear)
    if backend.engine is not None:
        ordered.append(Pass("chain units", rows.chain_slices))
    if backend.has_own_threads:
        ordered.append(Pass("one thread for few rows", SingleThreadedProgram))
    return [*ordered, last]
