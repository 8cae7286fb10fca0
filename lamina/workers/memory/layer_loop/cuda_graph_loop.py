"""Rounds of decoding as graphs of the device: launched as a whole, where each layer takes some six launches.

A graph is for rounds whose steps have as many rows and as long tables (``AttentionStep.graph_key``). The first such
round is launched piece by piece, which also compiles what has to be; the second is recorded, and from then on a round's
tables are copied into those of the recorded one, at whose addresses the graph reads them, and the graph is launched.
Prompts, sparse and shared sequences have no graphs. HARDWARE-UNVERIFIED: run with kernels, and graphs of them, that a
CPU stands in for.
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
MAX_GRAPHS = 64  # that are known; beyond, those not seen for the longest are forgotten


class _CapturedRound(NamedTuple):
    """``steps``, ``lines``: whose memory the graph reads."""

    steps: Sequence[AttentionStep]
    lines: Sequence[Tensor]
    graph: Graph


class RoundGraphs:
    """Of one epoch. For the thread that serves rounds."""

    def __init__(
        self,
        capture: GraphCapture,
        launch: Callable[[Sequence[AttentionStep], Sequence[Tensor]], None],
        launching: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        """``launch``: all kernels of a round, whose messages the lines tell, without a wait of the host; ``launching``:
        around a graph of them, False if it must not be launched.
        """
        self._capture, self._launch, self._launching = capture, launch, launching
        self._rounds: OrderedDict[tuple[Any, ...], _CapturedRound | None] = OrderedDict()
        self._refused = False

    def run(self, steps: Sequence[AttentionStep], lines: Sequence[Tensor]) -> Sequence[AttentionStep]:
        """Launch the round as a graph. The steps that are still to be launched: none, or all where it could not be."""
        key = tuple(step.graph_key for step in steps)
        if self._refused or not all(each and each[0] <= MAX_GRAPH_ROWS for each in key):
            return steps
        seen = key in self._rounds
        known = self._rounds.pop(key, None)
        self._rounds[key] = known  # the newest
        if not seen:
            if len(self._rounds) > MAX_GRAPHS:
                self._rounds.popitem(last=False)
            return steps
        if known is None:
            known = self._record(steps, lines)
            if known is None:
                return [step.relaunched() for step in steps]  # the launches of these were recorded, and never run
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
            self._rounds.clear()  # nobody launches them any more, and they have memory
            return None
