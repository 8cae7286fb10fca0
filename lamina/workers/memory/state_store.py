"""The states of recurrent layers on a memory worker: their tensors, and the computation of a step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.ops import recurrence
from lamina.ops.recurrence.segments import Segments
from lamina.protocol.blocks.state_versions import StateVersions
from lamina.protocol.step_plan import BindRequest, ProtocolError, StepPlan
from lamina.workers.mixer_messages import MixerPiece, mixer_pieces, state_bytes


class StateStore:
    """The states of a Bind's recurrent layers. A slot has one version of one sequence, in all layers."""

    def __init__(self, bind: BindRequest, device: torch.device, kv_bytes: int) -> None:
        """``kv_bytes``: memory for these states and KV. Raises as ``num_slots``, and ImportError without a backend."""
        self.pieces = mixer_pieces(bind.mixers, bind.worker)
        held = [piece for piece in self.pieces if piece is not None]
        if len({piece.kv_shards for piece in held}) > 1:
            raise ProtocolError("recurrent layers of one worker have different sequences")
        self.kv_shards = held[0].kv_shards if held else None
        self._backend = recurrence.get("auto", device)
        slots = self.num_slots = num_slots(bind, kv_bytes)
        self._states = [
            None if piece is None else torch.zeros(slots, piece.spec.state_size, device=device) for piece in self.pieces
        ]
        self._operands: list[dict[str, Tensor]] = [{} for _ in self.pieces]
        self.versions = StateVersions(slots, lambda row: held[0].has(row) if held else False)
        self._begun: dict[tuple[int, int], Segments] = {}  # (batch, step) -> segments of the last plan of each batch

    def set_operands(self, number: int, data: memoryview) -> None:
        """Take the tensors that all tokens share in one layer. Raises ProtocolError."""
        piece = self.pieces[number] if 0 <= number < len(self.pieces) else None
        if piece is None or data.nbytes != piece.operands[-1].stop:
            raise ProtocolError(f"{data.nbytes} bytes of operands of recurrent layer {number}")
        self._operands[number] = {
            name: span.of(data).clone() for name, span in zip(piece.spec.static_shapes, piece.operands, strict=True)
        }

    def begin(self, plan: StepPlan, *, is_replay: bool) -> None:
        """Apply a plan that was checked."""
        made = Segments.of(self.versions.begin(plan, is_replay=is_replay))
        self._begun = {key: each for key, each in self._begun.items() if key[0] != plan.batch}
        self._begun[plan.batch, plan.step] = made

    def num_rows(self, plan: StepPlan) -> int:
        """Return the number of rows of a plan whose sequences have their states here."""
        return self._begun[plan.batch, plan.step].rows_end

    def update(self, plan: StepPlan, number: int, data: memoryview) -> Tensor:
        """Compute the rows of one layer by the inputs in a message. Returns [rows, columns]."""
        piece, states = self.pieces[number], self._states[number]
        assert piece is not None
        assert states is not None
        segments = self._begun[plan.batch, plan.step]
        inputs = zip(piece.spec.input_columns, piece.inputs(segments.rows_end), strict=True)
        given = {name: span.of(data) for name, span in inputs}
        return self._backend.update(piece.spec, self._operands[number], given, segments, states)


def num_slots(bind: BindRequest, kv_bytes: int) -> int:
    """Return for how many versions of states there is room in ``kv_bytes``: all that are wanted, in a half of it or in
    what KV does not need. Raises ProtocolError, and ValueError if one sequence has no room.
    """
    if not (each := bytes_of_version(bind)):
        return 0
    room = max(kv_bytes // 2, kv_bytes - (bind.max_kv_bytes or kv_bytes))
    if (slots := min(bind.state_slots, room // each)) < bind.state_versions:
        raise ValueError(
            f"memory worker {bind.worker}: the states of one sequence take {bind.state_versions * each} bytes, and "
            f"{room} of {kv_bytes} are for states: raise --kv-cache-memory-bytes"
        )
    return slots


def bytes_of_version(bind: BindRequest) -> int:
    """Return the bytes of one version of a sequence's states on a Bind's worker. Raises ProtocolError."""
    pieces: Sequence[MixerPiece | None] = mixer_pieces(bind.mixers, bind.worker)
    return state_bytes(pieces)
