"""The layers of a round in one native call, if channels and kernels are native: HostLayerLoop without Python.

The native loop returns for all but the next layer message: plans, grants, errors. It equals HostLayerLoop bit for bit
(tests/workers/memory/layer_loop/test_native_loop.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from struct import pack, unpack

import torch
from torch import Tensor

from lamina.netstack import Channel
from lamina.observe.trace import Event, native_spans
from lamina.ops.attention import Operator
from lamina.protocol.codec import FP32_BYTES
from lamina.protocol.step_plan import MessageKey, MessageKind, ProtocolError
from lamina.workers.memory.attention_step import AttentionStep, GroupAttentionStep, WritePositions
from lamina.workers.memory.epoch_messages import RESERVE_S
from lamina.workers.memory.kv_store import KvStore

from .host_loop import HostLayerLoop, unexpected_message

try:
    from lamina.workers.memory._memory import Loop, RoundStep
except ImportError:  # not built: HostLayerLoop serves instead
    Loop = None  # type: ignore[assignment,misc]

DONE, PAUSED = 0, 1  # results of a run
COUNTS = "turns", "attend_s", "write_s", "score_s", "wait_s", "bytes_received", "bytes_sent"
WIRE = torch.float32, torch.bfloat16, torch.float16  # attention::Dtype
STORED = None, torch.int8, torch.float8_e4m3fn  # attention::Stored; the first: the dtype of messages


def can_use_native_loop(store: KvStore, channels: Sequence[Channel]) -> bool:
    """Return whether a native loop can serve ``store``, with messages on ``channels``."""
    return (
        Loop is not None
        and store.backend.engine is not None
        and all(channel.calls() is not None for channel in channels)
    )


class NativeLayerLoop(HostLayerLoop):
    """Serves an epoch's layers with messages in host memory. Requires ``can_use_native_loop``."""

    def run(self, steps: Sequence[AttentionStep]) -> None:
        """Serve all layers of a round."""
        loop = self._loop
        loop.begin(tuple(self._native(step) for step in steps))
        try:
            while (came := self._resume(steps)) != DONE:
                if came == PAUSED:
                    self._inbox.receive_grant()
                    self._wait_for_message(steps)
                else:
                    self._serve_other(steps)
        finally:
            turns = self._count(steps)
            loop.begin(())  # else the loop and the steps keep each other alive
            for step in steps[: max(0, turns - (len(self._store.layers) - 1) * len(steps))]:
                self._commit_rows(step)

    def _resume(self, steps: Sequence[AttentionStep]) -> int:
        """Continue the native loop, up to the first layer whose stored K and V are still to be loaded."""
        limit = len(self._store.layers) * len(steps)
        for number, step in enumerate(steps):
            for load in self._loads.needed_by(step.plan) if self._loads else ():
                limit = min(limit, load.next_layer * len(steps) + number)
        grants = self._inbox.grants
        overdue_s = -1.0 if grants is None or not grants.is_open else grants.overdue_s
        return self._loop.run(self._inbox.poll_timeout_s, overdue_s, limit)

    def _wait_for_message(self, steps: Sequence[AttentionStep]) -> None:
        """Wait a while if the next layer needs KV that is still to be loaded."""
        layer, number = divmod(self._loop.at()[0], len(steps))
        needed = self._loads.needed_by(steps[number].plan) if self._loads else []
        if self._loads is not None and not all(load.has_layer(layer) for load in needed):
            start = self._trace.now()
            self._loads.wait(needed, layer, self._inbox.poll_timeout_s)
            self._trace.add(Event.WAIT_LAYER, start, steps[number].plan, layer)

    @cached_property
    def _loop(self) -> Loop:
        engine, table = self._store.backend.engine, _store_table(self._store)
        return Loop(engine, tuple(self._channels), table, RESERVE_S, self._trace.native_buffer)

    @cached_property
    def _forms(self) -> list[int]:
        """The first layers of each kind."""
        return sorted(set(self._store.equal_pieces))

    def _native(self, step: AttentionStep) -> RoundStep:
        return self._loop.step(
            step.prepared(), _step_table(self._store, step, self._forms), MessageKey.packed_for_layer_0(step.plan)
        )

    def _serve_other(self, steps: Sequence[AttentionStep]) -> None:
        """Receive a message other than the expected one: the inbox handles it, or it is an error."""
        turn, has_q = self._loop.at()
        layer, step = turn // len(steps), steps[turn % len(steps)]
        replica, messages = step.plan.replica_of(layer), step.messages(layer)
        # Between Q and KV only an error can arrive.
        held = has_q and messages.q_bytes > 0
        arrival = self._inbox.receive(self._channels[replica]) if held else self._inbox.next_message(replica)
        if arrival is not None:
            kind, nbytes = (MessageKind.KV, messages.kv_bytes) if has_q else (MessageKind.Q, messages.q_bytes)
            raise ProtocolError(unexpected_message(arrival, MessageKey.for_step(kind, step.plan, layer), nbytes))

    def _count(self, steps: Sequence[AttentionStep]) -> int:
        """Count what the round has done so far, and return the number of served layers of all steps."""
        counts = self._loop.counts()
        for name, value in zip(COUNTS, counts, strict=True):
            self._meter.add(name, value)
        turns = int(counts[0])
        self._meter.add("native_turns", turns)
        for number, step in enumerate(steps):
            layers = range(-(-(turns - number) // len(steps)))
            self._meter.add("stored_bytes", sum(map(step.stored_bytes, layers)))
        for event, layer, number, start, end, value in native_spans(self._loop.spans()):
            self._trace.put(Event(event), start, end, steps[number].plan, layer, 0 if value else -1, value)
        return turns


def _store_table(store: KvStore) -> bytes:
    """Return the bytes that csrc/memory/step_tables.cpp reads as a Store."""
    stored = STORED.index(store.kv_dtype) if store.is_scaled else 0
    numbers = [torch.get_num_threads(), WIRE.index(store.dtype), stored]
    numbers += [store.tables.block_size, int(store.bind_request.kv.overlap)]
    numbers += [len(store.tables.num_blocks), *store.tables.num_blocks, len(store.layers)]
    for like, layer in zip(store.equal_pieces, store.layers, strict=True):
        numbers += [like, len(layer)]
        for piece in layer:
            kv = piece.kv
            blocks = kv.k, kv.v, *(kv.scales or (None, None)), *((None, None) if kv.bounds is None else kv.bounds)
            numbers += [piece.group, *_operator(piece.operator), *map(_address, blocks)]
    return array("q", numbers).tobytes()


def _operator(op: Operator) -> list[int]:
    scale, softcap = unpack("=qq", pack("=dd", op.spec.scale, op.spec.softcap))
    static = map(_address, (op.sinks, op.slopes))
    return [op.q_heads, op.kv_heads, op.qk_dim, op.v_dim, op.spec.window, scale, softcap, *static]


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _step_table(store: KvStore, step: AttentionStep, forms: Sequence[int]) -> bytes:
    """Return the bytes that csrc/memory/step_tables.cpp reads as a Step."""
    numbers, item = array("q"), store.dtype.itemsize
    for group, places in zip(step.groups, step.write_positions, strict=True):
        _add_group(numbers, group)
        for place in places:
            _add_place(numbers, place)
        for each in group.selection.table if group.selection else ((),) * 4:
            _add_list(numbers, each)
    sums = step.scoring.score_sums if step.scoring else []
    numbers.append(len(sums))
    for tally in sums:
        numbers.extend((tally.group, tally.rows.start))
        _add_list(numbers, tally.blocks.tolist())
        _add_list(numbers, tally.seen.tolist())
        numbers.append(_address(tally.sums))
    numbers.append(len(forms))
    for like in forms:
        x = step.messages(like)
        numbers.extend((like, x.q_bytes, x.kv_bytes, x.o_bytes, x.partial_bytes))
        for q, kv, partial, final in zip(x.q, x.kv, x.partial, x.final, strict=True):
            numbers.extend(part.start * item for part in (*q, *kv))
            numbers.extend(part.start * FP32_BYTES for part in partial)
            numbers.append(final.start * item)
    layers = range(len(store.layers))
    numbers.extend(step.plan.replica_of(layer) for layer in chain(layers, range(1, len(layers) + 1)))
    return numbers.tobytes()


def _add_group(numbers: array[int], group: GroupAttentionStep) -> None:
    numbers.append(group.whole_sequences.num_rows)
    for rows in (group.nodes.rows, group.new_rows.rows, group.new_kv):
        _add_list(numbers, () if rows is None else rows.tolist())


def _add_place(numbers: array[int], place: WritePositions) -> None:
    if place.slot_mapping is None:
        numbers.extend((0, 0, 0))
        return
    rows = range(place.num_rows) if place.owned_rows is None else place.owned_rows.tolist()
    for each in (rows, place.slot_mapping.blocks.tolist(), place.slot_mapping.offsets.tolist()):
        _add_list(numbers, each)


def _add_list(numbers: array[int], each: Sequence[int]) -> None:
    numbers.append(len(each))
    numbers.extend(each)
