"""The opaque operators of recurrent layers: ``torch.ops.lamina.mixer``, at which the converter cuts, and its two parts,
which models call.

They are captured, never executed: memory workers do the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .spec import RecurrenceSpec

_NEVER = "is a place to cut, it is never executed: run the model through its slices"


@torch.library.custom_op("lamina::convolution", mutates_args=())
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Compute the causal convolution of a layer: x [R, C], weight [C, width], bias [C] -> [R, C]; never executed."""
    raise RuntimeError(f"lamina::convolution {_NEVER}")


@convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("lamina::recurrence", mutates_args=())
def recurrence(inputs: Sequence[Tensor], operands: Sequence[Tensor], spec: str) -> Tensor:
    """Compute the recurrence of a layer after its convolution; never executed. ``inputs``: q, k and v [R, heads, dims]
    in the order of ``spec.channel_ranges``, then those of ``spec.input_columns``. ``operands``: of
    ``spec.static_shapes`` those of heads. ``spec``: ``RecurrenceSpec.encode()``, whose convolution has no meaning yet.
    Returns [R, heads, value_dim].
    """
    raise RuntimeError(f"lamina::recurrence {_NEVER}")


@recurrence.register_fake
def _(inputs: Sequence[Tensor], operands: Sequence[Tensor], spec: str) -> Tensor:
    of = RecurrenceSpec.decode(spec)
    return inputs[0].new_empty(inputs[0].shape[0], of.heads, of.value_dim)


@torch.library.custom_op("lamina::mixer", mutates_args=())
def mixer(inputs: Sequence[Tensor], operands: Sequence[Tensor], number: int, spec: str) -> Tensor:
    """Compute convolution and recurrence of one layer over a sequence's tokens; never executed. ``inputs``: [R, ...],
    in the order of ``spec.input_columns``. ``operands``: in the order of ``spec.static_shapes``. ``number``: counts
    mixers. Returns [R, heads, value_dim], or [R, channels] of a convolution alone.
    """
    raise RuntimeError(f"lamina::mixer {_NEVER}")


@mixer.register_fake
def _(inputs: Sequence[Tensor], operands: Sequence[Tensor], number: int, spec: str) -> Tensor:
    of, rows = RecurrenceSpec.decode(spec), inputs[0].shape[0]
    return inputs[0].new_empty((rows, of.heads) if of.kind == "convolution" else (rows, of.heads, of.value_dim))


CONVOLUTION_OP = torch.ops.lamina.convolution.default
RECURRENCE_OP = torch.ops.lamina.recurrence.default
MIXER_OP = torch.ops.lamina.mixer.default
