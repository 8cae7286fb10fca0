"""Slices without a Python call for each operator: between two messages, csrc/rows runs a table of instructions on rows.

It runs on the threads of the linear layers. Every operator is rounded like torch's, and a row's result depends on that
row alone. Operators without an instruction are left to torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

    from lamina.converter import SlicedProgram
    from lamina.ops.gemm import LinearBackend
    from lamina.ops.gemm.packed_memory import PackedMemory

    from .program import ChainedProgram


log = logging.getLogger(__name__)


def bind_rows(program: SlicedProgram, backend: LinearBackend, memory: PackedMemory | None = None) -> SlicedProgram:
    """Return the program with its rows on ``backend``, which has an engine. ``memory``: for packed weights; None: they
    stay as they are. ``program`` must not be used again. Raises ImportError if the native module was not built.
    """
    from lamina.converter.fuse import Bind, fuse

    from .instructions import UnsupportedError
    from .program import Arena, RowUnit, SupportedOperators

    arena = Arena()

    def build(unit: fx.Graph, weights: int) -> Bind | None:
        try:
            return RowUnit(unit, weights, backend, arena, memory).bind
        except UnsupportedError as e:
            log.debug("a unit is left to torch: %s", e)
            return None

    return fuse(program, SupportedOperators().takes, build)


def chain_slices(program: SlicedProgram) -> ChainedProgram:
    """Return the program, whose rows are bound, with each slice that only has units and sends as one call."""
    from .program import ChainedProgram

    return ChainedProgram(program)
