"""The exchanges of a hybrid model's steps on a memory worker: attention, and recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from lamina.observe.trace import Event
from lamina.protocol.mixers import Exchange
from lamina.protocol.step_plan import MessageKey, MessageKind
from lamina.workers.memory.attention_step import AttentionStep
from lamina.workers.memory.epoch_messages import RESERVE_S

from .host_loop import HostLayerLoop


class HybridLayerLoop(HostLayerLoop):
    """Serves an epoch's exchanges in their order, with messages in host memory."""

    def run(self, steps: Sequence[AttentionStep]) -> None:
        """Serve all exchanges of a round, one step after another in each."""
        last = len(self._exchanges) - 1
        for number, exchange in enumerate(self._exchanges):
            for step in steps:
                if exchange.layer >= 0:
                    self._serve_layer(step, exchange.layer)
                if exchange.mixer >= 0:
                    self._serve_mixer(step, exchange.mixer, number)
                self._meter.add("turns", 1)
                if number == last:
                    self._commit_rows(step)

    def _commit_rows(self, step: AttentionStep) -> None:
        super()._commit_rows(step)
        if self._store.states:
            self._store.states.versions.commit(step.plan.rows)

    @cached_property
    def _exchanges(self) -> list[Exchange]:
        return self._store.bind_request.exchanges

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {exchange.layer: number for number, exchange in enumerate(self._exchanges)}

    def _exchange_of(self, layer: int) -> int:
        return self._numbers[layer]

    def _serve_mixer(self, step: AttentionStep, mixer: int, exchange: int) -> None:
        """Serve one recurrent layer of a step: receive its inputs, compute and store its states, send the output."""
        states = self._store.states
        assert states is not None
        piece, rows = states.pieces[mixer], states.num_rows(step.plan)
        if piece is None or not rows:
            return
        meter, trace = self._meter, self._trace
        source, reply = (self._channels[step.plan.replica_of(i)] for i in (exchange, exchange + 1))
        arrival = self._receive(step, mixer, MessageKind.MIX, piece.inputs(rows)[-1].stop, exchange)
        assert arrival is not None
        start, place = trace.now(), piece.output(rows)
        with meter.time("mix_s"):
            out = states.update(step.plan, mixer, arrival.data)
        start = trace.add(Event.NEW, start, step.plan, mixer)
        slot = reply.reserve(place.stop, timeout_s=RESERVE_S)
        place.of(slot.data).copy_(out)
        reply.put_signal(slot, MessageKey.for_step(MessageKind.MIXED, step.plan, mixer).pack())
        trace.add(Event.SEND_O, start, step.plan, mixer, 0, place.stop)
        meter.add("bytes_sent", place.stop)
        source.release(arrival)
