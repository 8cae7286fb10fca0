"""The layers of a parity worker: it stores the K and V that it receives, and attends nothing."""

from __future__ import annotations

from lamina.observe.trace import Event
from lamina.protocol.step_plan import MessageKind
from lamina.workers.memory.attention_step import AttentionStep

from .host_loop import HostLayerLoop


class ParityLayerLoop(HostLayerLoop):
    """Serves a parity worker's layers. It receives no Q, and no worker waits for its O."""

    def _serve_layer(self, step: AttentionStep, layer: int) -> None:
        if self._inbox.grants is not None:
            self._inbox.grants.receive_overdue()
        arrival = self._receive(step, layer, MessageKind.KV, step.messages(layer).kv_bytes)
        if arrival is None:
            return
        start = self._trace.now()
        with self._meter.time("write_s"):
            step.write(layer, step.rows(layer, self._message(arrival)))
        self._trace.add(Event.WRITE, start, step.plan, layer)
        self._channels[step.plan.replica_of(layer)].release(arrival)
