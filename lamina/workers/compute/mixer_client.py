"""The exchanges of a hybrid model with memory workers: attention by an AttentionClient, and recurrent layers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.observe.trace import Event
from lamina.protocol.mixers import Exchange, MixerShape
from lamina.protocol.step_plan import MessageKey, MessageKind, StepPlan
from lamina.workers.device_selection import CPU
from lamina.workers.mixer_messages import MixerPiece, mixer_pieces
from lamina.workers.staging import HostStaging, Staging

from .attention_client import AttentionClient, Index, MemoryWorkerClient


def send_operands(link: MemoryWorkerClient, mixers: Sequence[MixerShape], operands: Sequence[Sequence[Tensor]]) -> None:
    """Send a memory worker its part of the tensors that all tokens share, after a Bind. ``operands``: by recurrent
    layer, those of all heads, in the order of RecurrenceSpec.static_shapes.
    """
    for number, (piece, tensors) in enumerate(zip(mixer_pieces(mixers, link.worker), operands, strict=True)):
        if piece is not None:
            key, fill = MessageKey(MessageKind.OPERANDS, layer=number), partial(fill_operands, piece, tensors)
            link.put(key, piece.operands[-1].stop, fill)


def fill_operands(piece: MixerPiece, operands: Sequence[Tensor], data: memoryview) -> None:
    """Write the part of a piece of a layer's ``operands``, which have all heads, to a message OPERANDS."""
    own = piece.part.take_static(dict(zip(piece.part.whole.static_shapes, operands, strict=True)))
    for span, tensor in zip(piece.operands, own.values(), strict=True):
        span.of(data).copy_(tensor)


class _Rows(NamedTuple):
    """The rows of a step whose sequences have their states on one memory worker; ``at``: None for all rows."""

    size: int
    at: Index


class HybridClient:
    """The exchanges of a hybrid model, by messages in host memory. Messages of attention are numbered by attention
    layers, and those of recurrent layers by these.
    """

    def __init__(
        self,
        attention: AttentionClient,
        exchanges: Sequence[Exchange],
        mixers: Sequence[MixerShape],
        staging: Staging | None = None,
    ) -> None:
        self._attention, self._exchanges = attention, exchanges
        self._links = attention.clients
        self._staging = staging or HostStaging(CPU)
        self._pieces = [mixer_pieces(mixers, link.worker) for link in self._links]
        self._plan = StepPlan(step=0, ops=[], rows=[])
        self._rows = list[_Rows]()
        self._send_s = self._wait_s = 0.0

    @property
    def send_s(self) -> float:
        """The seconds spent sending."""
        return self._attention.send_s + self._send_s

    @property
    def wait_s(self) -> float:
        """The seconds spent waiting for outputs."""
        return self._attention.wait_s + self._wait_s

    def send_plan(self, plan: StepPlan) -> None:
        """Send the plan of a coming step to all memory workers."""
        self._attention.send_plan(plan)

    def prepare(self, plan: StepPlan) -> None:
        """Lay out the messages of a step before it begins."""
        self._attention.prepare(plan)

    def begin_step(self, plan: StepPlan) -> None:
        """Select the step that the next messages belong to."""
        self._attention.begin_step(plan)
        if plan is not self._plan:
            self._plan = plan
            self._rows = [_rows_of(plan, pieces) for pieces in self._pieces]

    def q(self, layer: int, q: Tensor) -> None:
        """Send q [R, Hq, 1, D]."""
        self._attention.q(self._exchanges[layer].layer, q)

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Send k [R, Hkv, 1, D] and v [R, Hkv, 1, Dv]."""
        self._attention.kv(self._exchanges[layer].layer, k, v)

    def mix(self, exchange: int, *inputs: Tensor) -> None:
        """Send the inputs of a recurrent layer [R, ...]: to each memory worker its rows and heads."""
        inputs = self._staging.to_host(*inputs)
        start, number = time.perf_counter(), self._exchanges[exchange].mixer
        whole = [x.flatten(1) for x in inputs]
        for link, pieces, rows in zip(self._links, self._pieces, self._rows, strict=True):
            if (piece := pieces[number]) is not None and rows.size:
                self._send(link, piece, rows, whole, number)
        self._send_s += time.perf_counter() - start

    def _send(
        self, link: MemoryWorkerClient, piece: MixerPiece, rows: _Rows, inputs: Sequence[Tensor], number: int
    ) -> None:
        key, start = MessageKey.for_step(MessageKind.MIX, self._plan, number), link.trace.now()
        places = piece.inputs(rows.size)

        def fill(data: memoryview) -> None:
            for name, place, x in zip(piece.spec.input_columns, places, inputs, strict=True):
                own, at = x if rows.at is None else x[rows.at], 0
                into = place.of(data)
                for first, size in piece.part.columns(name):
                    into[:, at : at + size].copy_(own[:, first : first + size])
                    at += size

        link.put(key, places[-1].stop, fill)
        link.trace.add(Event.SEND_KV, start, key, number, link.number, places[-1].stop)

    def outputs(self, exchange: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Receive the outputs of an exchange: O [R, 1, Hq, Dv] of its attention, then that of its recurrent layer."""
        at = self._exchanges[exchange]
        attended = (self._attention.o(at.layer, num_rows, dtype),) if at.layer >= 0 else ()
        return (*attended, self._mixed(at.mixer, num_rows)) if at.mixer >= 0 else attended

    def _mixed(self, number: int, num_rows: int) -> Tensor:
        start = time.perf_counter()
        held = [pieces[number] for pieces in self._pieces]
        whole = next(piece.part.whole for piece in held if piece is not None)
        dtype = next(piece.dtypes[0] for piece in held if piece is not None)
        out = self._staging.empty_host(num_rows, whole.output_columns, dtype=dtype)
        for link, piece, rows in zip(self._links, held, self._rows, strict=True):
            if piece is not None and rows.size:
                self._receive(link, piece, rows, number, out)
        self._wait_s += time.perf_counter() - start
        return self._staging.to_device(out.view(num_rows, *whole.output_shape))

    def _receive(self, link: MemoryWorkerClient, piece: MixerPiece, rows: _Rows, number: int, out: Tensor) -> None:
        place, ((first, size),) = piece.output(rows.size), piece.part.columns("out")

        def take(data: memoryview) -> None:
            out[slice(None) if rows.at is None else rows.at, first : first + size] = place.of(data)

        link.receive(MessageKey.for_step(MessageKind.MIXED, self._plan, number), take, place.stop)

    def check_errors(self) -> None:
        """Raise errors of messages that no caller has waited for."""
        self._attention.check_errors()


def _rows_of(plan: StepPlan, pieces: Sequence[MixerPiece | None]) -> _Rows:
    """Return the rows of a plan for a memory worker, which has the same sequences in all layers."""
    piece = next((p for p in pieces if p is not None), None)
    if piece is None:
        return _Rows(0, None)
    if piece.kv_shards.has_all:
        return _Rows(plan.num_rows, None)
    here, at = list[int](), 0
    for row in plan.rows:
        here += range(at, at + row.count) if piece.has(row) else ()
        at += row.count
    return _Rows(len(here), torch.tensor(here, dtype=torch.int64))
