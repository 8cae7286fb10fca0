"""Rounds of decoding as graphs of the device: one launch for a round, instead of about six for each layer.

A graph serves rounds whose steps have the same numbers of rows and tables of the same length
(``AttentionStep.graph_key``). The first such round is launched kernel by kernel, which also compiles kernels. The
second one is recorded. Later rounds copy their tables into those of the recorded one, where the graph reads them, and
launch the graph. Prompts, sparse and shared sequences have no graphs. HARDWARE-UNVERIFIED: run with kernels and graphs
that a CPU stands in for.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

from torch import Tensor

from lamina.workers.cuda_graphs import MAX_GRAPH_ROWS, Graph, GraphCapture
from lamina.workers.memory.attention_step import AttentionStep

log = logging.getLogger(__name__)
MAX_GRAPHS = 64  # graphs beyond this number replace the least recently used ones


class _CapturedRound(NamedTuple):
    """A recorded round. The graph reads the memory of ``steps`` and ``lines``."""

    steps: Sequence[AttentionStep]
    lines: Sequence[Tensor]
    graph: Graph


class RoundGraphs:
    """The graphs of one epoch. Only the thread that serves rounds uses it."""

    def __init__(
        self,
        capture: GraphCapture,
        launch: Callable[[Sequence[AttentionStep], Sequence[Tensor]], None],
        launching: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        """``launch``: launches all kernels of a round without a wait of the host, given the descriptors of its
        messages. ``launching``: surrounds the launch of a graph; yields False if it must not be launched.
        """
        self._capture, self._launch, self._launching = capture, launch, launching
        self._rounds: OrderedDict[tuple[Any, ...], _CapturedRound | None] = OrderedDict()
        self._refused = False

    def run(self, steps: Sequence[AttentionStep], lines: Sequence[Tensor]) -> Sequence[AttentionStep]:
        """Launch the round as a graph, and return the steps that are still to be launched: none, or all if it has no
        graph.
        """
        key = tuple(step.graph_key for step in steps)
        if self._refused or not all(each and each[0] <= MAX_GRAPH_ROWS for each in key):
            return steps
        seen = key in self._rounds
        known = self._rounds.pop(key, None)
        self._rounds[key] = known  # the most recently used
        if not seen:
            if len(self._rounds) > MAX_GRAPHS:
                self._rounds.popitem(last=False)
            return steps
        if known is None:
            known = self._record(steps, lines)
            if known is None:
                return [step.relaunched() for step in steps]  # these steps' kernels were recorded, and did not run
            self._rounds[key] = known
        else:
            for own, new in zip(known.steps, steps, strict=True):
                own.copy_inputs_from(new)
            for own_lines, new_lines in zip(known.lines, lines, strict=True):
                own_lines.copy_(new_lines)
        with self._launching() as may_be:
            if may_be:
                known.graph.replay()
        return []

    def _record(self, steps: Sequence[AttentionStep], lines: Sequence[Tensor]) -> _CapturedRound | None:
        try:
            self._capture.begin()
            try:
                self._launch(steps, lines)
            except BaseException:
                with suppress(RuntimeError):
                    self._capture.end()
                raise
            return _CapturedRound(steps, lines, self._capture.end())
        except RuntimeError as error:
            log.warning("a round cannot be a graph, and runs without: %s", str(error).partition("\n")[0])
            self._refused = True
            self._rounds.clear()  # never launched again, and they hold memory
            return None
