"""MemoryPool without Python between a slice and its messages, where all channels are native.

The bytes are the same. What is not the O that is due is left to the links, which know what to make of it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor

from lamina.attention import AttentionBackend
from lamina.observe.trace import OFF, Event
from lamina.protocol.codec import Part
from lamina.protocol.partition import Partition
from lamina.protocol.plan import Key, Kind, LayerShape, StepPlan
from lamina.workers.staging import Staging

from .links import MemoryLink
from .memory_pool import FP32, Index, MemoryPool, PoolLayer, PoolShare, PoolStep, take

try:
    from ._native import Pool
    from ._native import Step as NativeStep
except ImportError:  # not built: MemoryPool does it
    Pool = None  # type: ignore[assignment,misc]

KINDS = Kind.Q, Kind.KV, Kind.O
EVENTS = Event.RESERVE, Event.SEND_Q, Event.SEND_KV, Event.WAIT_O, Event.RECEIVE_O
SPAN = np.dtype([(name, np.int64) for name in ("event", "layer", "link", "start", "end", "value")])


def open_pool(
    links: list[MemoryLink],
    partition: Partition,
    layers: Sequence[LayerShape],
    backend: AttentionBackend,
    dtype: torch.dtype,
    staging: Staging,
) -> MemoryPool:
    """See MemoryPool; without Python where the channels and the tensors allow it. ``dtype``: of all messages."""
    if Pool is None or not links or staging.apart or not all(hasattr(link.channel, "calls") for link in links):
        return MemoryPool(links, partition, layers, backend, staging)
    return NativePool(links, partition, layers, backend, dtype)


class NativePool(MemoryPool):
    """See Attention. ``native_send`` is for slices that are one native call; others call ``q`` and ``kv``."""

    def __init__(
        self,
        links: list[MemoryLink],
        partition: Partition,
        layers: Sequence[LayerShape],
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        """As MemoryPool; ``dtype``: of all messages. There are links, with one timeout and channels that are native."""
        super().__init__(links, partition, layers, backend)
        alike = array("q", [layer.like for layer in self.layers]).tobytes()
        channels = tuple(link.channel for link in links)
        self._trace, self.dtype = links[0].trace, dtype
        self._pool = Pool(channels, alike, links[0].timeout_s, self._trace is not OFF)
        self._native_steps: dict[int, tuple[PoolStep, NativeStep]] = {}  # of every batch, its last one
        self.native_send = self._pool.send()

    @property
    def send_s(self) -> float:
        """See Attention."""
        return self._send_s + self._pool.send_s()

    def settle(self) -> None:
        """See Attention."""
        self._put_spans()

    def select(self, plan: StepPlan) -> None:
        """See Attention."""
        self._put_spans()  # of the step before
        super().select(plan)
        if plan.num_rows:
            self._pool.select(self._native())

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """See Attention."""
        start, step, of = time.perf_counter(), self._step, self.layers[layer]
        if num_rows != step.num_rows or dtype != self.dtype:
            raise ValueError(f"{num_rows} rows of {dtype} of a step of {step.num_rows} rows of {self.dtype}")
        out = torch.empty(num_rows, of.num_q_heads, of.v_dim, dtype=dtype)
        cut = step.cut_heads(of)
        parts = [x.room(of.v_dim) for x in cut]
        targets = [out.data_ptr(), *(x.data_ptr() for part in parts for x in part)]
        came = self._pool.receive(num_rows, layer, 0, *targets)
        while came < len(self.links):  # that link has another message, which it drops or raises
            share = step.shares(of, dtype)[came]
            self.links[came].receive(step.key(Kind.O, layer), partial(take, share, out, parts), share.messages.o_bytes)
            came = self._pool.receive(num_rows, layer, came + 1, *targets)
        for each, merged in zip(cut, parts, strict=True):
            self._merge(of, each, merged, out)
        self._wait_s += time.perf_counter() - start
        return out.unsqueeze(1)

    def _native(self) -> NativeStep:
        plan = self._step.plan
        known = self._native_steps.get(plan.batch)
        if known is None or known[0] is not self._step:
            tags = b"".join(Key.of(kind, plan, 0).pack() for kind in KINDS)
            step = self._pool.step(_step_table(self.layers, self._step, self.dtype), tags)
            known = self._native_steps[plan.batch] = self._step, step
        return known[1]

    def _put_spans(self) -> None:
        if self._trace is OFF:
            return
        for event, layer, link, start, end, value in np.frombuffer(self._pool.spans(), SPAN).tolist():
            key = self._step.key(Kind.O, layer)
            self._trace.put(EVENTS[event], start / 1e9, end / 1e9, key, layer, self.links[link].number, value)


def _step_table(layers: Sequence[PoolLayer], step: PoolStep, dtype: torch.dtype) -> bytes:
    """What csrc/compute/module.cpp reads as a Step."""
    forms = sorted({layer.like for layer in layers})
    numbers = array("q", [step.num_rows, len(forms)])
    for like in forms:
        numbers.append(like)
        for share in step.shares(layers[like], dtype):
            _add_share(numbers, layers[like].shape, share, dtype.itemsize)
    return numbers.tobytes()


def _add_share(numbers: array[int], layer: LayerShape, share: PoolShare, item: int) -> None:
    x = share.messages
    numbers.extend((x.q_bytes, len(share.q)))
    for heads, rows, part in share.q:
        _add_copy(numbers, 0, layer.q_heads, heads, rows, part, item)
    numbers.extend((x.kv_bytes, 2 * len(share.kv)))
    for heads, rows, both in share.kv:
        for tensor, part in enumerate(both):
            _add_copy(numbers, tensor, layer.kv_heads, heads, rows, part, item)
    numbers.extend((x.o_bytes, len(share.final) + 2 * len(share.partial)))
    for heads, rows, part in share.final:
        _add_copy(numbers, 0, layer.q_heads, heads, rows, part, item, x.partial_bytes)
    for index, at, *results in share.partial:
        for tensor, part in enumerate(results):
            width = prod(part.shape[1:]) * FP32.itemsize
            numbers.extend((1 + 2 * index + tensor, width, 0, width, part.start * FP32.itemsize, 0))
            numbers.extend((at.stop - at.start, *range(at.start, at.stop)))


def _add_copy(
    numbers: array[int], tensor: int, all_heads: int, heads: slice, rows: Index, part: Part, item: int, behind: int = 0
) -> None:
    """Some heads of some rows of a tensor, and where they lie ``behind`` so many bytes of a message."""
    head = part.shape[2] * item
    width = (heads.stop - heads.start) * head
    numbers.extend((tensor, all_heads * head, heads.start * head, width, behind + part.start * item, int(rows is None)))
    if rows is not None:
        numbers.extend((len(rows), *rows.tolist()))
