"""The whole conversion, stage by stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import fx, nn

from . import portable
from .capture import Capture, capture
from .emit import Emitter, StaticValues, describe_call, describe_cut, describe_mixer
from .fused import split_fused_projections
from .graph import RowGraph, is_attention
from .plan import plan_cuts
from .reorder import schedule_slices
from .rows import check_rows_by_rule, check_rows_by_running
from .slices import SlicedProgram

log = logging.getLogger(__name__)


class CaptureStore(Protocol):
    """Keeps a capture for the next conversion of the same module."""

    def read(self) -> str | None: ...

    def write(self, text: str, /) -> None: ...


def convert(
    step: nn.Module,
    cut_op: torch._ops.OpOverload,
    *,
    mixer_op: torch._ops.OpOverload | None = None,
    prepare: Callable[[fx.Graph], None] | None = None,
    expect: int | None = None,
    early_q: bool = True,
    shown: bool = False,
    max_positions: int = 64,
    cache: CaptureStore | None = None,
) -> SlicedProgram:
    """Cut a model at every ``cut_op`` and ``mixer_op`` into slices that carry as few bytes past them as possible.

    ``step`` maps (input_ids [R, 1] int64, position_ids [R, 1] int64) to logits [R, 1, V]. Each attention layer calls
    ``cut_op(q [R, Hq, 1, D], k [R, Hkv, 1, D], v [R, Hkv, 1, Dv], *rest) -> [R, 1, Hq, Dv]``. ``rest`` are constants or
    functions of weights. One program serves 1..65536 rows. Weights are bound, not copied, and the module is left
    unchanged. On the meta device the result is only a plan.

    mixer_op: a second operator, of inputs of a row and arguments as ``rest``: ``mixer_op([x [R, ...], ...], *rest) ->
    [R, ...]``. prepare: changes the traced graph before it is cut.
    expect: the number of both that there must be; fewer means a layer that keeps other state.
    early_q: send Q before K and V are computed; else in the order of the captured program, for measurements.
    shown: rows were found independent before, with these weights. Otherwise it is shown by rule and by running that no
      row's result depends on other rows. Runs use positions from 0 to ``max_positions`` - 1, which the model must
      support.
    cache: keeps the capture of this module; it is read here, or written after tracing.

    Raises ConversionError, naming the operator and its module, for anything that would compute a different result.
    """
    timings: dict[str, float] = {}
    clock = _StageTicks(timings)
    cut_ops = (cut_op,) if mixer_op is None else (cut_op, mixer_op)
    captured = _read(cache, step, cut_ops, expect)
    if captured is None:
        captured = capture(step, cut_ops, expect=expect, prepare=prepare)
        _write(cache, captured, step)
    clock.done("capture")
    split_fused_projections(captured)
    graph = RowGraph(captured)
    if not shown:
        check_rows_by_rule(graph)
    cuts = plan_cuts(graph)
    clock.done("plan")
    values = StaticValues(graph)
    numbered = [(i, call) for i, calls in enumerate(graph.exchanges) for call in calls]
    calls = tuple(describe_call(graph, values, i, call) for i, call in numbered if is_attention(call))
    mixers = tuple(describe_mixer(graph, values, i, call) for i, call in numbered if not is_attention(call))
    schedules = schedule_slices(graph, cuts, early_q=early_q)
    slices = tuple(Emitter(graph, values, i, s).build() for i, s in enumerate(schedules))
    clock.done("emit")
    described = tuple(describe_cut(graph, i, nodes) for i, nodes in enumerate(cuts))
    rows = "numeric"
    if not shown:
        rows = "numeric" if check_rows_by_running(slices, calls, max_positions, mixers) else "static"
        clock.done("check rows")
    return SlicedProgram(slices, calls, described, rows, timings=timings, mixers=mixers)


def _read(
    cache: CaptureStore | None, step: nn.Module, cut_ops: Collection[torch._ops.OpOverload], expect: int | None
) -> Capture | None:
    """Return the kept capture; None if there is none, or none of this module."""
    text = cache.read() if cache else None
    if text is None:
        return None
    try:
        captured = portable.read(text, step)
    except portable.NotPortableError as error:
        log.info("the model is captured anew, as a kept capture cannot be used: %s", error)
        return None
    known = {n for n in captured.graph.nodes if n.target in cut_ops} == set(captured.calls)
    return captured if known and expect in (None, len(captured.calls)) else None


def _write(cache: CaptureStore | None, captured: Capture, step: nn.Module) -> None:
    if cache:
        try:
            cache.write(portable.write(captured, step))
        except portable.NotPortableError as error:
            log.info("the capture is not kept: %s", error)


class _StageTicks:
    def __init__(self, timings: dict[str, float]) -> None:
        self._timings, self._start = timings, time.perf_counter()

    def done(self, stage: str) -> None:
        now = time.perf_counter()
        self._timings[stage], self._start = now - self._start, now
