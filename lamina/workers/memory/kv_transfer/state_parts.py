"""Versions of recurrent states as parts of transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lamina.ops.recurrence.parts import Part
from lamina.ops.recurrence.spec import RecurrenceSpec
from lamina.protocol.reshard import StateTransfer
from lamina.utils.tensor_buffers import tensor_over
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.state_store import StateStore
from lamina.workers.staging import Staging

from .transfer import TransferPart
from .transfer_link import PART_BYTES

# Copies some heads between a state of a store [state_size] and a message.
CopyState = Callable[[Part, Tensor, Tensor], object]


def read_state(part: Part, state: Tensor, message: Tensor) -> None:
    """Copy heads of a state to a message."""
    message.copy_(part.take_state(state))


def write_state(part: Part, state: Tensor, message: Tensor) -> None:
    """Copy a message to heads of a state, and to the channels that they read; nothing else of it is written."""
    part.put_state(message, state)


def state_parts(store: StateStore, number: int, heads: StateTransfer, copy: CopyState) -> Iterator[TransferPart]:
    """Yield the parts that have states of a recurrent layer: some heads, of each sequence the versions. Raises
    PlanError if one is not here, ProtocolError without states.
    """
    spec, first, states = store.states_of(number)
    part = Part.of(spec, heads.head_start - first, heads.head_stop - heads.head_start)
    slots = [slot for s, versions in heads.versions.items() for slot in store.versions.slots_of(s, versions)]
    step = max(1, PART_BYTES // part.spec.state_bytes)
    for low in range(0, len(slots), step):
        some = slots[low : low + step]
        yield TransferPart(len(some) * part.spec.state_bytes, partial(_copy_all, part, states, some, copy), number)


def max_state_bytes(store: KvStore) -> int:
    """Return the most bytes of a version of one recurrent layer, with all heads; 0 without such layers."""
    specs = (RecurrenceSpec.decode(mixer.spec) for mixer in store.bind_request.mixers)
    return max((spec.state_bytes for spec in specs), default=0)


def _copy_all(
    part: Part, states: Tensor, slots: list[int], copy: CopyState, message: memoryview, staging: Staging
) -> None:
    rows = tensor_over(message, torch.float32).view(len(slots), part.spec.state_size)
    for slot, row in zip(slots, rows, strict=True):
        copy(part, states[slot], row)
