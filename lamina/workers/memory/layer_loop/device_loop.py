"""The layers of a memory worker's steps whose messages go from device to device (workers.device_transport).

If possible, rounds of decoding are graphs (``cuda_graph_loop``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.protocol.step_plan import MessageKey, MessageKind
from lamina.workers.device_transport import DESCRIPTOR_WORDS, DeviceTransport, message_descriptors
from lamina.workers.memory.attention_step import AttentionStep
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.staging import EMPTY_BYTES

from .cuda_graph_loop import RoundGraphs


class DeviceLayerLoop:
    """Serves an epoch's layers by kernels that move messages, in the order of HostLayerLoop. The host waits once a
    round.
    """

    def __init__(self, transport: DeviceTransport, store: KvStore, meter: Counters, *, graphs: bool) -> None:
        """``graphs``: use graphs, if the device has them and messages may be parts of them."""
        self.transport = transport
        self._store, self._meter = store, meter
        capture = store.staging.graph_capture() if graphs and transport.recordable else None
        self._graphs = RoundGraphs(capture, self._launch, transport.launching) if capture else None

    def run(self, steps: Sequence[AttentionStep]) -> None:
        """Serve all layers of a round, one step after another in each. Raises ChannelError, ProtocolError."""
        each_lines = [self._descriptors(step) for step in steps]
        with self._meter.time("attend_s"):  # the host's time
            left = self._graphs.run(steps, each_lines) if self._graphs and steps else steps
            self._launch(left, each_lines)
        self._meter.add("graph_turns", (len(steps) - len(left)) * len(self._store.layers))
        for step in steps:
            self._count(step)
        with self._meter.time("wait_s"):
            self.transport.check_errors()
        for step in steps:
            self._store.committed.commit(step.plan.rows)

    def _count(self, step: AttentionStep) -> None:
        for layer in range(len(self._store.layers)):
            messages = step.messages(layer)
            self._meter.add("turns", 1)
            self._meter.add("bytes_received", messages.q_bytes + messages.kv_bytes)
            self._meter.add("bytes_sent", messages.o_bytes)
            self._meter.add("stored_bytes", step.stored_bytes(layer))

    def abort(self, reason: str) -> None:
        """Abort the channel, as kernels of the compute worker wait for an O."""
        self.transport.channel.abort(reason)

    def _launch(self, steps: Sequence[AttentionStep], each_lines: Sequence[Tensor]) -> None:
        for layer in range(len(self._store.layers)):
            for step, due in zip(steps, each_lines[: len(steps)], strict=True):
                self._serve_layer(step, layer, due[layer])

    def _serve_layer(self, step: AttentionStep, layer: int, due: Tensor) -> None:
        """Serve one layer of a step, each part as soon as its input exists. ``due``: the descriptors of its messages.
        Receives Q and attends the stored tokens; receives K, V and attends the new ones. Then sends O and writes K, V.
        """
        messages, overlap = step.messages(layer), self._store.bind_request.kv.overlap
        q = self._receive(MessageKind.Q, due[0], messages.q_bytes)
        if overlap:
            stored = step.attend_stored(layer, q)
        kv = self._receive(MessageKind.KV, due[1], messages.kv_bytes)
        if not overlap:
            stored = step.attend_stored(layer, q)
        rows = step.rows(layer, kv)
        if messages.o_bytes:
            cut = messages.partial_bytes
            out = torch.empty(messages.o_bytes, dtype=torch.uint8, device=self._store.device)
            step.finish(layer, stored, q, rows, out[:cut], out[cut:])
            self.transport.send(MessageKind.O, due[2], out)
        step.write(layer, rows)
        step.add_scores(layer, q)

    def _receive(self, kind: MessageKind, line: Tensor, nbytes: int) -> Tensor:
        if not nbytes:
            return EMPTY_BYTES
        target = torch.empty(nbytes, dtype=torch.uint8, device=self._store.device)
        self.transport.receive(kind, line, target)
        return target

    def _descriptors(self, step: AttentionStep) -> Tensor:
        """Return the descriptors of the step's messages on the device: [layer, Q or KV or O, word]."""
        there = self._store.staging.to_device(
            message_descriptors(self._store.staging, _messages(step, len(self._store.layers)))
        )
        return there.view(-1, 3, DESCRIPTOR_WORDS)


def _messages(step: AttentionStep, num_layers: int) -> list[tuple[MessageKey, int, int]]:
    plan, messages = step.plan, list[tuple[MessageKey, int, int]]()
    for layer in range(num_layers):
        x = step.messages(layer)
        for kind, nbytes in ((MessageKind.Q, x.q_bytes), (MessageKind.KV, x.kv_bytes), (MessageKind.O, x.o_bytes)):
            messages.append((MessageKey.for_step(kind, plan, layer), nbytes, 0))
    return messages
