"""Recurrent layers on a prefill worker, which computes them as memory workers do, and sends these the states.

All heads of a prompt's states are here. A step that ends where rows or prompts will continue sends its states, each as
soon as it exists. A memory worker gets the heads that it has, if the prompt's sequence lies there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.observe.trace import Event, Recorder
from lamina.protocol.mixers import Exchange, MixerShape, RecurrentLayers
from lamina.protocol.step_plan import MessageKey, MessageKind, ProtocolError, StateRows, StepPlan
from lamina.utils.tensor_buffers import tensor_over
from lamina.workers.compute.attention_client import MemoryWorkerClient
from lamina.workers.compute.compute_worker import Attention
from lamina.workers.compute.mixer_client import fill_operands
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.state_store import StateStore
from lamina.workers.mixer_messages import MixerPiece, mixer_pieces

from .prefill_worker import LocalAttention


class LocalMixers(LocalAttention):
    """A LocalAttention of a model with recurrent layers. Slices name exchanges; attention is numbered by its layers."""

    def __init__(self, store: KvStore, pool: Attention, trace: Recorder, recurrent: RecurrentLayers) -> None:
        """``store``: with all heads of all layers. Raises ProtocolError."""
        super().__init__(store, pool, trace)
        assert store.states is not None
        self._states: StateStore = store.states
        self._exchanges: Sequence[Exchange] = recurrent.exchanges
        for number, (piece, operands) in enumerate(zip(self._states.pieces, recurrent.operands, strict=True)):
            assert piece is not None
            data = memoryview(bytearray(piece.operands[-1].stop))
            fill_operands(piece, operands, data)
            self._states.set_operands(number, data)
        self._links: Sequence[MemoryWorkerClient] = ()
        self._pieces: list[list[MixerPiece | None]] = []  # by memory worker
        self._mixed: Tensor | None = None
        self._plan = StepPlan(step=-1, ops=[], rows=[])
        self._sends = False  # the states after the step

    def set_links(self, links: Sequence[MemoryWorkerClient], mixers: Sequence[MixerShape]) -> None:
        """Send states to these memory workers from now on. ``mixers``: with their shares."""
        self._links, self._pieces = links, [mixer_pieces(mixers, link.worker) for link in links]

    def begin_step(self, plan: StepPlan) -> None:
        """Select the step that the next messages belong to. Raises PlanError, NoBlocksError, ProtocolError."""
        super().begin_step(plan)
        if plan is not self._plan:
            self._plan = plan
            ends = {row.sequence: row.first + row.count for row in plan.rows}
            if len(ends) != 1:
                raise ProtocolError(f"step {plan.step} has rows of {len(ends)} prompts")
            self._sends = any(isinstance(op, StateRows) and ends.get(op.sequence) in op.snapshots for op in plan.ops)

    def q(self, layer: int, q: Tensor) -> None:
        """Attend the stored tokens with q [R, Hq, 1, D]. ``layer``: the exchange."""
        super().q(self._exchanges[layer].layer, q)

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Send k [R, Hkv, 1, D] and v [R, Hkv, 1, Dv], and store them here. ``layer``: the exchange."""
        super().kv(self._exchanges[layer].layer, k, v)

    def mix(self, exchange: int, *inputs: Tensor) -> None:
        """Compute a recurrent layer of inputs [R, ...], and send its state if the step's states are to be sent."""
        start, begun, number = self._trace.now(), time.perf_counter(), self._exchanges[exchange].mixer
        self._mixed = self._states.compute(self._plan, number, [x.flatten(1) for x in inputs])
        computed = time.perf_counter()
        self.attend_s += computed - begun
        self._in_slices_s += computed - begun
        self._trace.add(Event.NEW, start, self._plan, number)
        if self._sends:
            self._send_state(number)
        self._past_s += time.perf_counter() - computed

    def _send_state(self, number: int) -> None:
        (row,), (slot,) = self._plan.rows, self._states.slots_written(self._plan)
        state = self._states.states_of(number)[2][slot]
        key = MessageKey.for_step(MessageKind.MIXED, self._plan, number)
        for link, pieces in zip(self._links, self._pieces, strict=True):
            if (piece := pieces[number]) is not None and piece.has(row):
                own, start = piece.part.take_state(state), self._trace.now()
                link.put(key, own.nbytes, lambda data, own=own: tensor_over(data, torch.float32).copy_(own))  # type: ignore[misc]
                self._trace.add(Event.SEND_KV, start, key, number, link.number, own.nbytes)

    def outputs(self, exchange: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the outputs of an exchange: O [R, 1, Hq, Dv] of its attention, then that of its recurrent layer."""
        at = self._exchanges[exchange]
        attended = (self.o(at.layer, num_rows, dtype),) if at.layer >= 0 else ()
        if at.mixer < 0:
            return attended
        piece, mixed = self._states.pieces[at.mixer], self._mixed
        assert piece is not None
        assert mixed is not None
        return (*attended, mixed.view(num_rows, *piece.spec.output_shape))
