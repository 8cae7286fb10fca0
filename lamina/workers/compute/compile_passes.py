"""The passes that prepare a cut program for running: one list, in their order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from lamina.ops import collective, gemm, rows
from lamina.ops.collective import Collective
from lamina.ops.gemm import LinearBackend
from lamina.ops.gemm.packed_memory import PackedMemory
from lamina.workers.cuda_graphs import GraphCapture, GraphedProgram

from .single_threaded_slices import SingleThreadedProgram


class Pass(NamedTuple):
    """A pass over a program. ``run`` takes the program of the pass before, which must not be used again."""

    name: str
    run: Callable[[Any], Any]


def compile_passes(
    backend: LinearBackend,
    *,
    packed_memory: PackedMemory | None = None,
    group: Collective | None = None,
    capture: GraphCapture | None = None,
    emulate: Callable[[Any], Any] | None = None,
) -> list[Pass]:
    """Return the passes for a worker's program. ``backend``: of linear layers. ``packed_memory``: see ``bind_rows``.
    ``group``: connects the ranks, if there are several. ``capture``: records graphs, if the device can. ``emulate``:
    puts the program on an emulated device.
    """
    linear = Pass("bind linear layers", partial(gemm.bind, backend=backend))
    last = [Pass("emulate a device", emulate)] if emulate else []
    if capture is not None:  # collectives run between graphs, or inside of them
        return [linear, Pass("record graphs", lambda program: GraphedProgram(program, capture, group)), *last]
    ordered = []
    if group is not None:
        ordered.append(Pass("meet ranks", partial(collective.bind, collective=group)))
    if backend.engine is not None:  # looks for operators, so linear layers must not be bound yet
        ordered.append(Pass("bind rows", partial(rows.bind_rows, backend=backend, memory=packed_memory)))
    ordered.append(linear)
    if backend.engine is not None:
        ordered.append(Pass("chain units", rows.chain_slices))
    if backend.has_own_threads:
        ordered.append(Pass("one thread for few rows", SingleThreadedProgram))
    return [*ordered, *last]
