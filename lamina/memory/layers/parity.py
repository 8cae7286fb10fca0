"""The layers of a worker that keeps the parity of others' K and V: it stores what comes, and attends nothing."""

from __future__ import annotations

from lamina.memory.step import Step
from lamina.observe.trace import Event
from lamina.protocol.plan import Kind

from .host import HostLayers


class ParityLayers(HostLayers):
    """The Layers of such a session. No Q comes, and nobody waits for O."""

    def _turn(self, step: Step, layer: int) -> None:
        self._grants.take_overdue()
        arrival = self._expect(step, layer, Kind.KV, step.messages(layer).kv_bytes)
        if arrival is None:
            return
        start = self._trace.now()
        with self._meter.time("write_s"):
            step.write(layer, step.rows(layer, self._message(arrival)))
        self._trace.add(Event.WRITE, start, step.plan, layer)
        self._channels[step.plan.replica_of(layer)].release(arrival)
