"""The messages of recurrent layers: which rows and heads go to a memory worker, and the bytes of their inputs.

Both sides of the wire compute this. A message MIX has the inputs one after the other, each [rows, columns] of the heads
that the worker has; MIXED has the output. OPERANDS has the tensors that all tokens share, once after a Bind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.config.partition import KvShards
from lamina.ops.recurrence.parts import Part
from lamina.ops.recurrence.spec import RecurrenceSpec
from lamina.protocol.mixers import MixerShape
from lamina.protocol.step_plan import ProtocolError, RowRange
from lamina.utils.tensor_buffers import tensor_over

ALIGNED = 16  # bytes at which each tensor of a message begins
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Span(NamedTuple):
    """A tensor of a message: its first byte, dtype and shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape) * self.dtype.itemsize

    def of(self, data: memoryview) -> Tensor:
        """Return the tensor over its bytes of a message."""
        return tensor_over(data[self.start : self.stop], self.dtype).view(self.shape)


def spans(tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Span]:
    """Return the places of tensors that follow each other in a message."""
    places, at = list[Span](), 0
    for dtype, shape in tensors:
        places.append(Span(at, dtype, shape))
        at = -(-places[-1].stop // ALIGNED) * ALIGNED
    return places


@dataclass(frozen=True)
class MixerPiece:
    """The heads of a recurrent layer that one memory worker has, of the sequences that begin in ``kv_shards``."""

    part: Part
    kv_shards: KvShards
    dtypes: tuple[torch.dtype, ...]
    operand_dtypes: tuple[torch.dtype, ...]

    @property
    def spec(self) -> RecurrenceSpec:
        return self.part.spec

    def inputs(self, rows: int) -> list[Span]:
        """Return the inputs of a message of ``rows`` rows."""
        columns = self.spec.input_columns.values()
        return spans([(dtype, (rows, n)) for dtype, n in zip(self.dtypes, columns, strict=True)])

    def output(self, rows: int) -> Span:
        """Return the output for ``rows`` rows."""
        return Span(0, self.dtypes[0], (rows, self.spec.output_columns))

    @cached_property
    def operands(self) -> list[Span]:
        """The operands that all tokens share."""
        return spans(list(zip(self.operand_dtypes, self.spec.static_shapes.values(), strict=True)))

    def has(self, row: RowRange) -> bool:
        """Return whether the row's sequence has its state here."""
        return row.location.kv_shard in self.kv_shards


def mixer_pieces(mixers: Sequence[MixerShape], worker: int) -> list[MixerPiece | None]:
    """Return the piece of each recurrent layer that ``worker`` has; None if it has none. Raises ProtocolError."""
    return [_piece(mixer, worker) for mixer in mixers]


def _piece(mixer: MixerShape, worker: int) -> MixerPiece | None:
    try:
        whole = RecurrenceSpec.decode(mixer.spec)
        dtypes = tuple(DTYPES[name] for name in mixer.dtypes)
        operand_dtypes = tuple(DTYPES[name] for name in mixer.operand_dtypes)
        own = [share for share in mixer.shares if worker in share.owners]
        if len(dtypes) != len(whole.input_columns) or len(operand_dtypes) != len(whole.static_shapes) or len(own) > 1:
            raise ValueError(f"{len(dtypes)} inputs, {len(operand_dtypes)} operands, {len(own)} parts of one worker")
        if not own:
            return None
        (share,) = own
        shards = KvShards(tuple(owner == worker for owner in share.owners))
        part = Part.of(whole, share.head_start, share.head_stop - share.head_start)
    except (ValueError, KeyError) as error:
        raise ProtocolError(f"not a recurrent layer: {error}") from error
    return MixerPiece(part, shards, dtypes, operand_dtypes)


def state_bytes(pieces: Sequence[MixerPiece | None]) -> int:
    """Return the bytes of one version of a sequence's states in all layers."""
    return sum(piece.spec.state_bytes for piece in pieces if piece is not None)


class MostBytes(NamedTuple):
    """The bytes of the largest messages to a memory worker, and from it."""

    sent: int = 0
    received: int = 0


def largest_messages(mixers: Sequence[MixerShape], workers: int, max_rows: int) -> MostBytes:
    """Return the sizes of the largest messages of recurrent layers."""
    pieces = [p for worker in range(workers) for p in mixer_pieces(mixers, worker) if p is not None]
    sent = [max(p.inputs(max_rows)[-1].stop, p.operands[-1].stop) for p in pieces]
    return MostBytes(max(sent, default=0), max((p.output(max_rows).stop for p in pieces), default=0))
