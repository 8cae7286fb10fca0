"""The compute worker's side of the layer messages: what to send to which memory worker, and the O that comes back."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.kv.partition import Partition, Share
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

    def receive_into(self, key: Key, out: Tensor) -> None:
        """Wait for the O that ``key`` names and copy it to ``out`` (strided). Raises RefusedError, ProtocolError."""
        start = self._trace.now()
        arrival = self.channel.wait_signal(timeout_s=self._timeout_s)
        came = self._trace.add(Event.WAIT_O, start, key, key.layer, self.worker)
        try:
            got = Key.unpack(arrival.tag)
            if got.kind == Kind.REFUSED:
                raise RefusedError(bytes(arrival.data).decode(errors="replace"))
            if got != key or arrival.data.nbytes != out.numel() * out.element_size():
                raise ProtocolError(f"memory worker {self.worker}: {got} of {arrival.data.nbytes} B in place of {key}")
            out.copy_(tensor_over(arrival.data, out.dtype).view(out.shape))
            self._trace.add(Event.RECEIVE_O, came, key, key.layer, self.worker, arrival.data.nbytes)
        finally:
            self.channel.release(arrival)


class MemoryPool:
    """All memory workers as one: scatters Q, K, V by the partition, gathers O.

    It is also the ``send`` that slices call: ``send.q(layer, q)`` and ``send.kv(layer, k, v)``.
    """

    def __init__(self, links: list[MemoryLink], partition: Partition, layers: list[LayerShape]) -> None:
        self.links = links
        self._partition = partition
        self._layers = layers
        self._step = 0
        self._batch = 0
        self._view = 0
        self.send_s = 0.0
        self.wait_s = 0.0

    def select(self, plan: StepPlan) -> None:
        """The messages that follow belong to this step."""
        self._step, self._batch, self._view = plan.step, plan.batch, plan.view

    def announce(self, plan: StepPlan) -> None:
        """Tell all memory workers of a step to come."""
        key, data = Key(Kind.PLAN, plan.step, plan.batch, plan.view), encode(plan)
        for link in self.links:
            link.send_plan(key, data)

    def q(self, layer: int, q: Tensor) -> None:
        """q [R, Hq, 1, D]: to each memory worker the query heads of its KV heads."""
        start = time.perf_counter()
        for share, group in self._shares(layer):
            part = q[:, share.head_start * group : share.head_stop * group, 0]
            self.links[share.worker].send_tensors(self._key(Kind.Q, layer), [part])
        self.send_s += time.perf_counter() - start

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k [R, Hkv, 1, D], v [R, Hkv, 1, Dv]: to each memory worker its KV heads."""
        start = time.perf_counter()
        for share, _ in self._shares(layer):
            heads = slice(share.head_start, share.head_stop)
            self.links[share.worker].send_tensors(self._key(Kind.KV, layer), [k[:, heads, 0], v[:, heads, 0]])
        self.send_s += time.perf_counter() - start

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Gather [R, 1, Hq, Dv] from all memory workers."""
        start = time.perf_counter()
        shape = self._layers[layer]
        out = torch.empty(num_rows, 1, shape.q_heads, shape.v_dim, dtype=dtype)
        for share, group in self._shares(layer):
            heads = slice(share.head_start * group, share.head_stop * group)
            self.links[share.worker].receive_into(self._key(Kind.O, layer), out[:, 0, heads])
        self.wait_s += time.perf_counter() - start
        return out

    def _shares(self, layer: int) -> list[tuple[Share, int]]:
        shape = self._layers[layer]
        return [(s, shape.q_heads // shape.kv_heads) for s in self._partition.shares(layer)]

    def _key(self, kind: Kind, layer: int) -> Key:
        return Key(kind, self._step, self._batch, self._view, layer)
