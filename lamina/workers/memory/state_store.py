"""The states of recurrent layers on a memory worker: their tensors, and the computation of a step's rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lamina.config.partition import KvShards
from lamina.kv.stored_format import head_bytes, stored_dtype
from lamina.ops import recurrence
from lamina.ops.recurrence.segments import Segments
from lamina.ops.recurrence.spec import RecurrenceSpec
from lamina.protocol.blocks.state_versions import ZEROS, StateVersions
from lamina.protocol.step_plan import BindRequest, ProtocolError, RowRange, StepPlan
from lamina.utils.tensor_buffers import tensor_over
from lamina.workers.mixer_messages import DTYPES, MixerPiece, mixer_pieces, state_bytes


class StateStore:
    """The states of a Bind's recurrent layers. A slot has one version of one sequence, in all layers."""

    def __init__(self, bind: BindRequest, device: torch.device, kv_bytes: int) -> None:
        """``kv_bytes``: memory for these states and KV. Raises as ``num_slots``, and ImportError without a backend."""
        self.pieces, own = mixer_pieces(bind.mixers, bind.worker), state_shards(bind)
        self._backend = recurrence.get("auto", device)
        slots = self.num_slots = num_slots(bind, kv_bytes)
        self._states: list[Tensor | None] = [None] * len(self.pieces)  # allocated when first wanted
        self._device = device
        self._operands: list[dict[str, Tensor]] = [{} for _ in self.pieces]
        self.versions = StateVersions(slots, lambda row: own is not None and row.location.kv_shard in own)
        self._begun: dict[tuple[int, int], Segments] = {}  # (batch, step) -> segments of the last plan of each batch

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(states.nbytes for states in self._states if states is not None)

    def states_of(self, number: int) -> tuple[RecurrenceSpec, int, Tensor]:
        """Return what this worker has of a layer: its meaning, the first head, and the states [slots, state_size].
        Raises ProtocolError if it has nothing.
        """
        if (piece := self.pieces[number]) is None:
            raise ProtocolError(f"recurrent layer {number} has no states here")
        if (states := self._states[number]) is None:
            states = torch.zeros(self.num_slots, piece.spec.state_size, device=self._device)
            self._states[number] = states
        return piece.spec, piece.part.first, states

    def release(self, number: int) -> None:
        """Free the states of a layer, which have moved."""
        self._states[number] = None

    def set_operands(self, number: int, data: memoryview) -> None:
        """Take the tensors that all tokens share in one layer. Raises ProtocolError."""
        piece = self.pieces[number] if 0 <= number < len(self.pieces) else None
        if piece is None or data.nbytes != piece.operands[-1].stop:
            raise ProtocolError(f"{data.nbytes} bytes of operands of recurrent layer {number}")
        self.states_of(number)
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

    def slots_read(self, plan: StepPlan) -> list[int]:
        """Return the slots of the versions that the rows of a plan that was begun continue."""
        segments = self._begun[plan.batch, plan.step]
        return [slot for slot in segments.read[~segments.continues].tolist() if slot != ZEROS]

    def slots_written(self, plan: StepPlan) -> list[int]:
        """Return the slots of the versions after the rows of a plan that was begun."""
        written: list[int] = self._begun[plan.batch, plan.step].write.tolist()
        return written

    def of_slot(self, slot: int) -> list[Tensor]:
        """Return the states in a slot, in place: of each layer that is here [state_size]."""
        return [states[slot] for states in self._states if states is not None]

    def update(self, plan: StepPlan, number: int, data: memoryview) -> Tensor:
        """Compute the rows of one layer by the inputs in a message. Returns [rows, columns]."""
        piece = self.pieces[number]
        assert piece is not None
        return self.compute(plan, number, [span.of(data) for span in piece.inputs(self.num_rows(plan))])

    def compute(self, plan: StepPlan, number: int, inputs: Iterable[Tensor]) -> Tensor:
        """Compute the rows of one layer by its inputs [rows, columns]. Returns [rows, columns]."""
        piece, states = self.pieces[number], self._states[number]
        assert piece is not None
        assert states is not None
        given = dict(zip(piece.spec.input_columns, inputs, strict=True))
        segments = self._begun[plan.batch, plan.step]
        return self._backend.update(piece.spec, self._operands[number], given, segments, states)

    def bytes_of_state(self, number: int, rows: RowRange) -> int:
        """Return the bytes of what this worker has of the state of the sequence of ``rows`` in one layer."""
        piece = self.pieces[number]
        return piece.spec.state_bytes if piece is not None and self.versions.is_here(rows) else 0

    def put_state(self, number: int, rows: RowRange, data: memoryview) -> None:
        """Write the state of one layer after ``rows``, which a plan lets come from elsewhere."""
        slot = self.versions.slot_to_fill(rows)
        assert slot is not None
        self.states_of(number)[2][slot] = tensor_over(data, torch.float32)


def state_shards(bind: BindRequest) -> KvShards | None:
    """Return the KV shards whose sequences have states on a Bind's worker; None if none have. Raises ProtocolError."""
    shards = {piece.kv_shards for piece in mixer_pieces(bind.mixers, bind.worker) if piece is not None}
    if len(shards) > 1:
        raise ProtocolError("recurrent layers of one worker have different sequences")
    return next(iter(shards), None)


def num_slots(bind: BindRequest, kv_bytes: int) -> int:
    """Return for how many versions of states there is room in ``kv_bytes``: all that are wanted, in a half of it or in
    what KV does not need. Raises ProtocolError, and ValueError if one sequence has no room.

    A Bind of a later epoch, which names the bytes of the first one, gives the same number.
    """
    if not (each := bytes_of_version(bind)):
        return 0
    room = max(kv_bytes // 2, kv_bytes - _most_kv_bytes(bind))
    if (slots := min(bind.state_slots, room // each)) < bind.state_versions:
        raise ValueError(
            f"memory worker {bind.worker}: the states of one sequence take {bind.state_versions * each} bytes, and "
            f"{room} of {kv_bytes} are for states: raise --kv-cache-memory-bytes"
        )
    return slots


def _most_kv_bytes(bind: BindRequest) -> int:
    """Return the bytes of KV of ``num_sequences`` sequences of the full length, on a Bind's worker."""
    dtype, blocks = (
        stored_dtype(bind.kv.kv_cache_dtype, DTYPES[bind.dtype]),
        -(-bind.max_model_len // bind.kv.block_size),
    )
    token = 0.0
    for number, layer in enumerate(bind.layers):
        for piece in bind.partition.pieces(number, bind.worker):
            token += piece.num_kv_heads * piece.kv_shards.portion * head_bytes(layer.qk_dim, layer.v_dim, dtype)
    return int(token * bind.kv.block_size * (blocks + 1) * bind.num_sequences)


def bytes_of_version(bind: BindRequest) -> int:
    """Return the bytes of one version of a sequence's states on a Bind's worker. Raises ProtocolError."""
    pieces: Sequence[MixerPiece | None] = mixer_pieces(bind.mixers, bind.worker)
    return state_bytes(pieces)
