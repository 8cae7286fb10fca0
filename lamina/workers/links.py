"""The compute worker's side of the layer messages: what to send to which memory worker, and the O that comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.kv.partition import Lanes, Partition, Piece
from lamina.netstack import Channel
from lamina.observe.trace import OFF, Event, Recorder

from .buffers import tensor_over
from .stepplan import Bind, Bound, Join, Key, Kind, LayerShape, ProtocolError, StepPlan, decode_bound, encode


class RefusedError(Exception):
    """A memory worker refused a Bind or a step; its reason is the text."""


class MemoryLink:
    """The channel to one memory worker, and its share of every layer."""

    def __init__(self, channel: Channel, worker: int, timeout_s: float, trace: Recorder = OFF) -> None:
        self.channel = channel
        self.worker = worker
        self._timeout_s = timeout_s
        self._trace = trace

    def bind(self, bind: Bind) -> Bound:
        """Raises RefusedError with the worker's reason."""
        return self._ask(Key(Kind.BIND), encode(bind))

    def join(self, join: Join) -> Bound:
        """Raises RefusedError with the worker's reason."""
        return self._ask(Key(Kind.JOIN), encode(join))

    def _ask(self, key: Key, data: bytes) -> Bound:
        self.send(key, data)
        arrival = self.channel.wait_signal(timeout_s=self._timeout_s)
        got, data = Key.unpack(arrival.tag), bytes(arrival.data)
        self.channel.release(arrival)
        if got.kind == Kind.REFUSED:
            raise RefusedError(data.decode(errors="replace"))
        return decode_bound(data)

    def send(self, key: Key, data: bytes) -> None:
        """Copy ``data`` into the peer's inbox."""
        slot = self.channel.reserve(len(data), timeout_s=self._timeout_s)
        slot.data[:] = data
        self.channel.put_signal(slot, key.pack())

    def send_plan(self, key: Key, data: bytes) -> None:
        """``send``, as part of a step."""
        start = self._trace.now()
        self.send(key, data)
        self._trace.add(Event.SEND_PLAN, start, key, -1, self.worker, len(data))

    def send_tensors(self, key: Key, parts: Sequence[Tensor]) -> None:
        """Write ``parts`` one behind the other straight into the peer's inbox; they may be strided."""
        start = self._trace.now()
        total = sum(p.numel() for p in parts)
        slot = self.channel.reserve(total * parts[0].element_size(), timeout_s=self._timeout_s)
        self._trace.add(Event.RESERVE, start, key, key.layer, self.worker)
        flat = tensor_over(slot.data, parts[0].dtype)
        for part in parts:
            flat[: part.numel()].view(part.shape).copy_(part)
            flat = flat[part.numel() :]
        self.channel.put_signal(slot, key.pack())
        event = Event.SEND_Q if key.kind == Kind.Q else Event.SEND_KV
        self._trace.add(event, start, key, key.layer, self.worker, total * parts[0].element_size())

    def receive_into(self, key: Key, targets: Sequence[Target]) -> None:
        """Wait for the O that ``key`` names and copy it to ``targets``. Raises RefusedError, ProtocolError."""
        start = self._trace.now()
        arrival = self.channel.wait_signal(timeout_s=self._timeout_s)
        came = self._trace.add(Event.WAIT_O, start, key, key.layer, self.worker)
        try:
            got = Key.unpack(arrival.tag)
            if got.kind == Kind.REFUSED:
                raise RefusedError(bytes(arrival.data).decode(errors="replace"))
            dtype, sizes = targets[0].out.dtype, [t.size for t in targets]
            if got != key or arrival.data.nbytes != sum(sizes) * dtype.itemsize:
                raise ProtocolError(f"memory worker {self.worker}: {got} of {arrival.data.nbytes} B in place of {key}")
            for target, part in zip(targets, torch.split(tensor_over(arrival.data, dtype), sizes), strict=True):
                target.put(part)
            self._trace.add(Event.RECEIVE_O, came, key, key.layer, self.worker, arrival.data.nbytes)
        finally:
            self.channel.release(arrival)


class Target(NamedTuple):
    """Where a piece of O goes: rows ``rows`` of ``out`` [R, Hq, Dv], a strided view; None = all rows."""

    out: Tensor
    rows: Tensor | None

    @property
    def size(self) -> int:
        return self.out.numel() if self.rows is None else len(self.rows) * prod(self.out.shape[1:])

    def put(self, part: Tensor) -> None:
        if self.rows is None:
            self.out.copy_(part.view(self.out.shape))
        else:
            self.out[self.rows] = part.view(-1, *self.out.shape[1:])


class MemoryPool:
    """All memory workers as one: scatters Q, K, V by the partition, gathers O.

    It is also the ``send`` that slices call: ``send.q(layer, q)`` and ``send.kv(layer, k, v)``.
    """

    def __init__(self, links: list[MemoryLink], partition: Partition, layers: list[LayerShape]) -> None:
        self.links = links
        self._layers = layers
        self._pieces = [[(x, partition.pieces(i, x.worker)) for x in links] for i in range(len(layers))]
        self._step = _Selected(StepPlan(step=0, ops=[], rows=[]))
        self.send_s = 0.0
        self.wait_s = 0.0

    def select(self, plan: StepPlan) -> None:
        """The messages that follow belong to this step."""
        if plan is not self._step.plan:
            self._step = _Selected(plan)

    def announce(self, plan: StepPlan) -> None:
        """Tell all memory workers of a step to come."""
        key, data = Key(Kind.PLAN, plan.step, plan.batch, plan.view), encode(plan)
        for link in self.links:
            link.send_plan(key, data)

    def q(self, layer: int, q: Tensor) -> None:
        """q [R, Hq, 1, D]: to each memory worker the query heads of its KV heads."""
        start = time.perf_counter()
        key, group = self._step.key(Kind.Q, layer), self._group(layer)
        for link, pieces in self._targets(layer):
            parts = [(q[:, p.head_start * group : p.head_stop * group, 0], rows) for p, rows in pieces]
            link.send_tensors(key, [_rows(*part) for part in parts])
        self.send_s += time.perf_counter() - start

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k [R, Hkv, 1, D], v [R, Hkv, 1, Dv]: to each memory worker its KV heads."""
        start = time.perf_counter()
        key = self._step.key(Kind.KV, layer)
        for link, pieces in self._targets(layer):
            parts = [(x[:, p.head_start : p.head_stop, 0], rows) for p, rows in pieces for x in (k, v)]
            link.send_tensors(key, [_rows(*part) for part in parts])
        self.send_s += time.perf_counter() - start

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Gather [R, 1, Hq, Dv] from all memory workers."""
        start = time.perf_counter()
        key, group, shape = self._step.key(Kind.O, layer), self._group(layer), self._layers[layer]
        out = torch.empty(num_rows, 1, shape.q_heads, shape.v_dim, dtype=dtype)
        for link, pieces in self._targets(layer):
            parts = [Target(out[:, 0, p.head_start * group : p.head_stop * group], rows) for p, rows in pieces]
            link.receive_into(key, parts)
        self.wait_s += time.perf_counter() - start
        return out

    def _targets(self, layer: int) -> Iterator[tuple[MemoryLink, list[tuple[Piece, Tensor | None]]]]:
        """The memory workers that have rows in ``layer``, with their pieces and whose rows those are (None = all)."""
        for link, pieces in self._pieces[layer]:
            selected = [(p, self._step.rows(p.lanes)) for p in pieces]
            selected = [(p, rows) for p, rows in selected if rows is None or len(rows)]
            if selected:
                yield link, selected

    def _group(self, layer: int) -> int:
        return self._layers[layer].q_heads // self._layers[layer].kv_heads


class _Selected:
    """The step that messages belong to, and its rows by lanes."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self._rows: dict[Lanes, Tensor | None] = {}

    def key(self, kind: Kind, layer: int) -> Key:
        return Key(kind, self.plan.step, self.plan.batch, self.plan.view, layer)

    def rows(self, lanes: Lanes) -> Tensor | None:
        """The rows of the sequences in ``lanes``; None = all."""
        if lanes not in self._rows:
            owned = [r.sequence in lanes for r in self.plan.rows for _ in range(r.count)]
            self._rows[lanes] = None if all(owned) else torch.tensor(owned).nonzero().view(-1)
        return self._rows[lanes]


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]
