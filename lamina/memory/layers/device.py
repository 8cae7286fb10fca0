"""The layers of a memory worker's steps, all of whose messages go from device to device (workers.wire). Where they can
be, rounds of decoding are graphs (``recorded``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.memory.meter import Meter
from lamina.memory.step import Step
from lamina.memory.store import Store
from lamina.protocol.plan import Key, Kind
from lamina.workers.staging import NOTHING
from lamina.workers.wire import LINE_WORDS, LayerWire, lines

from .recorded import RecordedRounds


class DeviceLayers:
    """The Layers of a session whose messages kernels move, in the order of HostLayers. The host waits once a round."""

    def __init__(self, wire: LayerWire, store: Store, meter: Meter, *, graphs: bool) -> None:
        """``graphs``: wanted, where the device has them and messages may be parts of them."""
        self.wire = wire
        self._store, self._meter = store, meter
        capture = store.staging.capture() if graphs and wire.recordable else None
        self._recorded = RecordedRounds(capture, self._launch, wire.launching) if capture else None

    def run(self, steps: Sequence[Step]) -> None:
        """All layers of a round, one step after another in each. Raises ChannelError, ProtocolError."""
        each_lines = [self._lines(step) for step in steps]
        with self._meter.time("attend_s"):  # of the host
            left = self._recorded.run(steps, each_lines) if self._recorded and steps else steps
            self._launch(left, each_lines)
        self._meter.add("graph_turns", (len(steps) - len(left)) * len(self._store.layers))
        for step in steps:
            self._count(step)
        with self._meter.time("wait_s"):
            self.wire.settle()
        for step in steps:
            self._store.written.done(step.plan.rows)

    def _count(self, step: Step) -> None:
        for layer in range(len(self._store.layers)):
            messages = step.messages(layer)
            self._meter.add("turns", 1)
            self._meter.add("bytes_received", messages.q_bytes + messages.kv_bytes)
            self._meter.add("bytes_sent", messages.o_bytes)
            self._meter.add("stored_bytes", step.stored_bytes(layer))

    def refuse(self, reason: str) -> None:
        """Abort the channel: kernels of the compute worker wait for an O."""
        self.wire.channel.abort(reason)

    def _launch(self, steps: Sequence[Step], each_lines: Sequence[Tensor]) -> None:
        for layer in range(len(self._store.layers)):
            for step, due in zip(steps, each_lines[: len(steps)], strict=True):
                self._turn(step, layer, due[layer])

    def _turn(self, step: Step, layer: int, due: Tensor) -> None:
        """Q in, attend the stored tokens; KV in, attend the new ones; O out, KV written: as soon as they are there.
        ``due``: the lines of the three messages.
        """
        messages, overlap = step.messages(layer), self._store.bind.kv.overlap
        q = self._receive(Kind.Q, due[0], messages.q_bytes)
        if overlap:
            stored = step.attend_stored(layer, q)
        kv = self._receive(Kind.KV, due[1], messages.kv_bytes)
        if not overlap:
            stored = step.attend_stored(layer, q)
        rows = step.rows(layer, kv)
        if messages.o_bytes:
            cut = messages.partial_bytes
            out = torch.empty(messages.o_bytes, dtype=torch.uint8, device=self._store.device)
            step.finish(layer, stored, q, rows, out[:cut], out[cut:])
            self.wire.send(Kind.O, due[2], out)
        step.write(layer, rows)
        step.score(layer, q)

    def _receive(self, kind: Kind, line: Tensor, nbytes: int) -> Tensor:
        if not nbytes:
            return NOTHING
        target = torch.empty(nbytes, dtype=torch.uint8, device=self._store.device)
        self.wire.receive(kind, line, target)
        return target

    def _lines(self, step: Step) -> Tensor:
        """[layer, Q or KV or O, word], on the device."""
        there = self._store.staging.up(lines(self._store.staging, _messages(step, len(self._store.layers))))
        return there.view(-1, 3, LINE_WORDS)


def _messages(step: Step, num_layers: int) -> list[tuple[Key, int, int]]:
    plan, messages = step.plan, list[tuple[Key, int, int]]()
    for layer in range(num_layers):
        x = step.messages(layer)
        for kind, nbytes in ((Kind.Q, x.q_bytes), (Kind.KV, x.kv_bytes), (Kind.O, x.o_bytes)):
            messages.append((Key.of(kind, plan, layer), nbytes, 0))
    return messages
