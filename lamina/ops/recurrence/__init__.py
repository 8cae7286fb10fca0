"""Layers with a fixed state: causal convolution and recurrence. Each entry of the table is a module of this package
with ``open_backend``; see ``get``.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .segments import Segments
    from .spec import RecurrenceSpec

# name -> module of this package with a function open_backend(device); imported when first used. The best comes first.
BACKENDS: dict[str, str] = {"native": "native", "cuda": "cuda", "reference": "reference"}


class RecurrenceBackend(Protocol):
    """Computes a recurrent layer for the rows of a step, on one worker: the heads that lie there.

    Contract, the same for every backend (tests/contract/test_recurrence.py runs it over the whole table):

    1. Meaning. ``RecurrenceSpec``, for any number of rows in a sequence: one (decode), some, a whole prompt.
    2. Precision. All is computed in fp32, by fp32 operands and states, and rounded once to the output's dtype.
    3. Exactness. A row's output and a version's numbers depend, bit for bit, on the sequence's rows and the version
       that it continues. Tokens are computed one by one in one order: so any cut of a prompt into segments, and
       computing it again, gives the same bits. Other sequences, other heads of the worker and threads have no
       influence. Backends differ from each other by their order of sums.
    4. Isolation. A slot that the segments do not read may hold anything. A NaN stays in the sequence that it came
       from.
    5. Versions. Slots that are read stay as they are, unless a segment writes what the next one reads
       (``Segments.of``). So if a step is not completed, computing it again is right.
    """

    def update(
        self,
        spec: RecurrenceSpec,
        static: dict[str, Tensor],
        inputs: dict[str, Tensor],
        segments: Segments,
        states: Tensor,
    ) -> Tensor:
        """Compute the rows of all segments, and write the versions after them.

        ``static``: the tensors of ``spec.static_shapes``, of any float dtype. Neither the dict nor what it holds is
        changed later, as a backend may keep a copy of its own. ``inputs``: those of
        ``spec.input_columns``, [rows, columns], each of any float dtype; columns have no gaps. ``states`` [slots,
        spec.state_size] fp32 without gaps: one version of one sequence in each slot; it is written in place. Returns
        [rows, spec.output_columns] in the dtype of ``x``; rows of no segment have any contents. Raises ValueError for
        operands that do not fit.
        """
        ...


def get(name: str, device: torch.device) -> RecurrenceBackend:
    """Open the backend ``name`` on ``device``; "auto" is the first one of the table that works. Raises ValueError for
    an unknown name or a device that it cannot use, ImportError if something that it needs is missing.
    """
    if name == "auto":
        for candidate in BACKENDS:
            with suppress(ImportError, ValueError):
                return _open(candidate, device)
        raise ImportError(f"no backend for recurrent layers can be used on {device}")
    if name not in BACKENDS:
        raise ValueError(f"unknown recurrence backend {name!r}; choose one of auto, {', '.join(BACKENDS)}")
    return _open(name, device)


def _open(name: str, device: torch.device) -> RecurrenceBackend:
    try:
        module = import_module(f"{__name__}.{BACKENDS[name]}")
    except ImportError as e:
        raise ImportError(f"recurrence backend {name!r} cannot be used here: {e}") from e
    backend: RecurrenceBackend = module.open_backend(device)
    return backend


def check_operands(
    spec: RecurrenceSpec,
    static: dict[str, Tensor],
    inputs: dict[str, Tensor],
    segments: Segments,
    states: Tensor,
) -> int:
    """Return the number of rows. Raises ValueError, with the operand's name, for operands that do not fit."""
    shapes = {name: tuple(t.shape) for name, t in static.items()}
    if shapes != spec.static_shapes:
        raise ValueError(f"operands of a recurrence have shapes {shapes}, not {spec.static_shapes}")
    rows = inputs["x"].shape[0] if "x" in inputs else 0
    shapes = {name: tuple(t.shape) for name, t in inputs.items()}
    if shapes != {name: (rows, columns) for name, columns in spec.input_columns.items()}:
        raise ValueError(f"inputs of a recurrence have shapes {shapes}, not [rows, columns] of {spec.input_columns}")
    if segments.rows_end > rows:
        raise ValueError(f"segments have {segments.rows_end} rows, and inputs of a recurrence have {rows}")
    if states.shape[1:] != (spec.state_size,) or segments.slots_end > len(states):
        raise ValueError(
            f"states [{segments.slots_end}, {spec.state_size}] are needed, and there are {list(states.shape)}"
        )
    if states.itemsize != 4 or not states.is_floating_point() or states.stride(1) != 1:
        raise ValueError(f"states are fp32 without gaps, not {states.dtype} with strides {states.stride()}")
    return rows
