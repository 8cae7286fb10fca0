"""The native backend: kernels of csrc/recurrence, for decoding and prompts, on CPUs.

A state stays in the second cache while its sequence's tokens of a step are computed, and 32 or 64 columns of a head's
stay in the first. A single token goes from the slot that is read straight to the other one, past the caches.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from . import RecurrenceBackend, check_operands
from .segments import Segments
from .spec import Kind, RecurrenceSpec

try:
    from ._recurrence import Engine, layer
except ImportError as error:
    raise ImportError(
        f"it needs the native module lamina.ops.recurrence._recurrence, which did not load ({error}): install Lamina "
        "again (a checkout: `python setup.py build_ext --inplace`), or use another backend"
    ) from error

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KINDS = get_args(Kind)
KEPT = 4096  # layers whose operands are kept


def open_backend(device: torch.device) -> NativeRecurrence:
    """Open the backend, with the best instructions of this CPU, on as many threads as torch's setting."""
    if device.type != "cpu":
        raise ValueError(f"recurrence backend 'native' computes on CPUs, not on {device}")
    return NativeRecurrence(torch.get_num_threads())


class Operands(NamedTuple):
    """A layer's static operands, and their copy in the kernels' order."""

    spec: RecurrenceSpec
    static: dict[str, Tensor]
    layer: object


class NativeRecurrence(RecurrenceBackend):
    """The ``RecurrenceBackend`` of ``csrc/recurrence``."""

    def __init__(self, threads: int, variant: str = "") -> None:
        """Raises ValueError for a ``variant`` that this CPU cannot run."""
        self.engine = Engine(threads, variant)
        self._operands: dict[int, Operands] = {}  # by the identity of static, which stays alive here

    def update(
        self,
        spec: RecurrenceSpec,
        static: dict[str, Tensor],
        inputs: dict[str, Tensor],
        segments: Segments,
        states: Tensor,
    ) -> Tensor:
        rows = check_operands(spec, static, inputs, segments, states)
        operands = self._operands.get(id(static))
        if operands is None or (operands.spec is not spec and operands.spec != spec):
            operands = self._keep(spec, static)
        x, *others = (_in_rows(inputs[name]) for name in spec.input_columns)
        out = torch.empty(rows, spec.output_columns, dtype=x.dtype)
        addresses = [number for t in (x, *others) for number in (t.data_ptr(), TYPES[t.dtype], t.stride(0))]
        addresses += [0, 0, 0] * (2 - len(others))
        where = segments.address, len(segments), states.data_ptr(), states.stride(0)
        self.engine.update(operands.layer, *addresses, out.data_ptr(), *where)
        return out

    def _keep(self, spec: RecurrenceSpec, static: dict[str, Tensor]) -> Operands:
        tensors = {name: t.float().contiguous() for name, t in static.items()}
        tensors["weight"] = tensors["weight"].T.contiguous()
        names = ("weight", "bias", "A", "D", "dt_bias")
        ranges = spec.channel_ranges
        made = layer(
            KINDS.index(spec.kind),
            *(spec.heads, spec.groups, spec.heads_per_group, spec.first_head, spec.key_dim, spec.value_dim, spec.width),
            *(spec.silu, spec.normalised, spec.softplus, spec.scale, spec.prompt_dt_least, spec.prompt_dt_most),
            spec.channels,
            *(ranges[name].first if name in ranges else 0 for name in "qkv"),
            *(spec.history_size, spec.state_size),
            *(tensors[name].data_ptr() if name in tensors else 0 for name in names),
        )
        if len(self._operands) >= KEPT:
            self._operands.clear()
        kept = self._operands[id(static)] = Operands(spec, static, made)
        return kept


def _in_rows(t: Tensor) -> Tensor:
    """Return t [rows, columns] in a dtype of the kernels, without gaps in its rows."""
    t = t if t.dtype in TYPES else t.float()
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()
