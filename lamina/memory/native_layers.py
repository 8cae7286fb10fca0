"""The layers of a round in one native call, where channels and kernels are native: HostLayers without Python.

The loop comes back for whatever is not a turn's next message: plans, grants, faults. It is held against HostLayers bit
for bit (tests/lamina/workers/test_native_layers.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from struct import pack, unpack

import numpy as np
import torch

from lamina.attention import AttentionBackend, Operator
from lamina.netstack import Channel
from lamina.observe.trace import OFF, Event, Recorder
from lamina.protocol.plan import Key, Kind, ProtocolError
from lamina.workers.devices import CPU

from .grants import Grants
from .host_layers import RESERVE_S, wrong_message
from .inbox import RoundInbox
from .meter import Meter
from .step import GroupStep, Step
from .store import Store
from .write import Place

try:
    from ._native import Loop
    from ._native import Step as NativeStep
except ImportError:  # not built: HostLayers does it
    Loop = None  # type: ignore[assignment,misc]

DONE, PAUSE = 0, 1  # what a run comes to
KINDS = Kind.Q, Kind.KV, Kind.O
EVENTS = Event.WAIT_Q, Event.WAIT_KV, Event.STORED, Event.RESERVE, Event.NEW, Event.SEND_O, Event.WRITE
MESSAGES = Event.WAIT_Q, Event.WAIT_KV, Event.SEND_O
SPAN = np.dtype([(name, np.int64) for name in ("event", "turn", "start", "end", "value")])


def can_be_native(store: Store, channels: Sequence[Channel]) -> bool:
    """Whether a loop can serve ``store``, with messages on ``channels``."""
    return (
        Loop is not None
        and store.device == CPU
        and store.kv_dtype == store.dtype  # the loop stores what comes, as it comes
        and _kernels(store.backend) is not None
        and all(hasattr(channel, "calls") for channel in channels)
    )


def _kernels(backend: AttentionBackend) -> object | None:
    return getattr(backend, "kernels", None)


class NativeLayers:
    """The Layers of a session whose messages are in host memory."""

    def __init__(
        self,
        channels: Sequence[Channel],
        inbox: RoundInbox,
        store: Store,
        grants: Grants,
        meter: Meter,
        trace: Recorder,
    ) -> None:
        """``channels``: of all replicas, whose messages come by ``inbox``. Only where ``can_be_native``."""
        self._channels = channels
        self._inbox, self._store, self._grants, self._meter, self._trace = inbox, store, grants, meter, trace
        self._loop = Loop(_kernels(store.backend), tuple(channels), _store_table(store), RESERVE_S, trace is not OFF)

    def run(self, steps: Sequence[Step]) -> None:
        """All layers of a round."""
        layers = len(self._store.layers)
        self._loop.begin(tuple(self._native(step) for step in steps))
        try:
            while (came := self._loop.run(self._grants.patience_s, self._overdue_s())) != DONE:
                if came == PAUSE:
                    self._grants.take()
                else:
                    self._take_other(steps)
        finally:
            turns = self._count(steps)
            self._loop.begin(())  # which holds on to those steps, and they to it
            for step in steps[: max(0, turns - (layers - 1) * len(steps))]:
                self._store.written.done(step.plan.rows)

    def refuse(self, reason: str) -> None:
        """Nothing to do: the session sends the reason in place of the O that a compute worker waits for."""

    def _overdue_s(self) -> float:
        return self._grants.overdue_s if self._grants.open else -1.0

    def _native(self, step: Step) -> NativeStep:
        plan = step.plan
        tags = b"".join(Key.of(kind, plan, 0).pack() for kind in KINDS)
        return self._loop.step(step.prepared(), _step_table(self._store, step), tags)

    def _take_other(self, steps: Sequence[Step]) -> None:
        """A message that is not the one that is due: one for the inbox, or a fault."""
        turn, has_q = self._loop.at()
        layer, step = turn // len(steps), steps[turn % len(steps)]
        replica = step.plan.replica_of(layer)
        # Between Q and KV nothing else can come.
        arrival = self._inbox.receive(self._channels[replica]) if has_q else self._inbox.take(replica)
        if arrival is not None:
            kind, messages = (Kind.KV if has_q else Kind.Q), step.messages(layer)
            nbytes = messages.kv_bytes if has_q else messages.q_bytes
            raise ProtocolError(wrong_message(arrival, Key.of(kind, step.plan, layer), nbytes))

    def _count(self, steps: Sequence[Step]) -> int:
        """Put down what the round has done until now. Returns its turns."""
        meter, (attend_s, write_s, wait_s, turns) = self._meter, self._loop.counts()
        meter.add("attend_s", attend_s)
        meter.add("write_s", write_s)
        meter.add("wait_s", wait_s)
        meter.add("turns", turns)
        meter.add("native_turns", turns)
        for turn in range(turns):
            layer, step = turn // len(steps), steps[turn % len(steps)]
            x = step.messages(layer)
            meter.add("stored_bytes", step.stored_bytes(layer))
            meter.add("bytes_received", x.q_bytes + x.kv_bytes)
            meter.add("bytes_sent", x.o_bytes)
        for event, turn, start, end, value in np.frombuffer(self._loop.spans(), SPAN).tolist():
            plan = steps[turn % len(steps)].plan
            peer = 0 if EVENTS[event] in MESSAGES else -1
            self._trace.put(EVENTS[event], start / 1e9, end / 1e9, plan, turn // len(steps), peer, value)
        return turns


def _store_table(store: Store) -> bytes:
    """What csrc/memory/module.cpp reads as a Store."""
    numbers = [torch.get_num_threads(), store.dtype.itemsize, store.tables.block_size, int(store.bind.kv.overlap)]
    numbers += [len(store.tables.num_blocks), *store.tables.num_blocks, len(store.layers)]
    for like, layer in zip(store.alike, store.layers, strict=True):
        numbers += [like, len(layer)]
        for piece in layer:
            numbers += [piece.group, *_operator(piece.operator), piece.kv.k.data_ptr(), piece.kv.v.data_ptr()]
    return array("q", numbers).tobytes()


def _operator(op: Operator) -> list[int]:
    scale, softcap = unpack("=qq", pack("=dd", op.spec.scale, op.spec.softcap))
    static = (0 if x is None else x.data_ptr() for x in (op.sinks, op.slopes))
    return [op.q_heads, op.kv_heads, op.qk_dim, op.v_dim, op.spec.window, scale, softcap, *static]


def _step_table(store: Store, step: Step) -> bytes:
    """What csrc/memory/module.cpp reads as a Step."""
    numbers, item = array("q"), store.dtype.itemsize
    for group, places in zip(step.groups, step.places, strict=True):
        _add_group(numbers, group)
        for place in places:
            _add_place(numbers, place)
    forms = sorted(set(store.alike))
    numbers.append(len(forms))
    for like in forms:
        x = step.messages(like)
        numbers.extend((like, x.q_bytes, x.kv_bytes, x.o_bytes, x.partial_bytes))
        for q, kv, partial, final in zip(x.q, x.kv, x.partial, x.final, strict=True):
            numbers.extend(part.start * item for part in (*q, *kv))
            numbers.extend(part.start * 4 for part in partial)
            numbers.append(final.start * item)
    layers = range(len(store.layers))
    numbers.extend(step.plan.replica_of(layer) for layer in chain(layers, range(1, len(layers) + 1)))
    return numbers.tobytes()


def _add_group(numbers: array[int], group: GroupStep) -> None:
    numbers.append(group.whole.num_rows)
    for rows in (group.nodes.of, group.new.of, group.new_kv):
        numbers.append(0 if rows is None else len(rows))
        if rows is not None:
            numbers.extend(rows.tolist())


def _add_place(numbers: array[int], place: Place) -> None:
    if place.at is None:
        numbers.extend((0, 0, 0))
        return
    rows = range(place.num_rows) if place.kept is None else place.kept.tolist()
    for each in (rows, place.at.blocks.tolist(), place.at.offsets.tolist()):
        numbers.append(len(each))
        numbers.extend(each)
