"""The recurrent layers of a model, as a Bind describes them, and the exchanges of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from lamina.config.partition import HeadShare

if TYPE_CHECKING:
    from torch import Tensor


class MixerShape(msgspec.Struct, frozen=True, array_like=True):
    """One recurrent layer, all heads. Its operands come once after the Bind, and each worker gets its part of them."""

    spec: str  # RecurrenceSpec.encode()
    dtypes: list[str]  # of its inputs, in the order of RecurrenceSpec.input_columns; the first is also the output's
    operand_dtypes: list[str]  # in the order of RecurrenceSpec.static_shapes
    shares: list[HeadShare] = []  # who has which heads, of the sequences in which KV shards


class Exchange(msgspec.Struct, frozen=True, array_like=True):
    """The operators between two slices: number of the attention layer, and of the recurrent layer; -1: none."""

    layer: int = -1
    mixer: int = -1


SNAPSHOTS_PER_SEQUENCE = 2  # for which there is memory: where a prompt ends, and where it leaves a known one


def versions_of_sequence(num_batches: int) -> int:
    """Return the versions that a running sequence holds at most, without snapshots: those before and after the round
    that runs, and after the queued one. With several batches, one more, since sequences of a later plan of a round may
    yet end.
    """
    return 3 if num_batches == 1 else 4


def num_state_slots(max_num_seqs: int, num_batches: int, *, caches_prefixes: bool) -> int:
    """Return the versions that all sequences together are to have room for."""
    return max_num_seqs * (versions_of_sequence(num_batches) + SNAPSHOTS_PER_SEQUENCE * caches_prefixes)


class RecurrentLayers(NamedTuple):
    """The recurrent layers of a cut model, without shares, and its exchanges; all are empty if it has no such layer.
    ``operands``: of each layer what all tokens share, in the order of RecurrenceSpec.static_shapes.
    """

    exchanges: Sequence[Exchange] = ()
    shapes: Sequence[MixerShape] = ()
    operands: Sequence[Sequence[Tensor]] = ()


NO_RECURRENT_LAYERS = RecurrentLayers()
