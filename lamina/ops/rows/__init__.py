"""Slices without a Python call for each operator: what lies between messages is a table of instructions on rows, which
csrc/rows runs on the threads of the linear layers.

Every operator is rounded as torch rounds it, and a row's result depends on that row alone. Operators that no
instruction does stay torch's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

    from lamina.converter import SlicedProgram
    from lamina.ops.gemm import LinearBackend

    from .native_slices import ChainedProgram


log = logging.getLogger(__name__)


def bind_rows(program: SlicedProgram, backend: LinearBackend) -> SlicedProgram:
    """The program with its rows on ``backend``, which has an engine; the one given is used up.

    Raises ImportError where the native module was not built.
    """
    from lamina.converter.fuse import Bind, fuse

    from .instructions import UnsupportedError
    from .program import Arena, RowUnit, SupportedOperators

    arena = Arena()

    def build(unit: fx.Graph, weights: int) -> Bind | None:
        try:
            return RowUnit(unit, weights, backend, arena).bind
        except UnsupportedError as e:
            log.debug("a unit stays torch's: %s", e)
            return None

    return fuse(program, SupportedOperators().takes, build)


def chain_slices(program: SlicedProgram) -> ChainedProgram:
    """The program, whose rows are bound, with every slice that is nothing but units and sends as one call."""
    from .native_slices import ChainedProgram

    return ChainedProgram(program)
