"""MemoryPool without Python between a slice and its messages, where all channels are native.

The bytes are the same. A message other than the O that is due is left to its MemoryLink.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from lamina.attention import AttentionBackend
from lamina.attention.merge import Partial
from lamina.observe.trace import Event, native_spans
from lamina.protocol.codec import FP32_BYTES, Part
from lamina.protocol.partition import Partition
from lamina.protocol.plan import Key, Kind, LayerShape, StepPlan
from lamina.workers.staging import Staging

from .links import MemoryLink
from .memory_pool import Index, MemoryPool, PoolLayer, PoolShare, PoolStep

try:
    from ._native import Pool, StepMessages
except ImportError:  # not built: MemoryPool does it
    Pool = None  # type: ignore[assignment,misc]


def open_pool(
    links: list[MemoryLink],
    partition: Partition,
    layers: Sequence[LayerShape],
    backend: AttentionBackend,
    dtype: torch.dtype,
    staging: Staging,
    parity: MemoryLink | None = None,
) -> MemoryPool:
    """A pool of these links' memory workers, without Python where channels and tensors allow it. ``dtype``: of all
    messages; ``parity``: see MemoryPool.
    """
    each = [*links, parity] if parity else links
    if Pool is None or not links or staging.apart or any(link.channel.calls() is None for link in each):
        return MemoryPool(links, partition, layers, backend, staging, parity)
    return NativePool(links, partition, layers, backend, dtype, parity)


class NativePool(MemoryPool):
    """A MemoryPool whose messages cost no Python. ``native_send`` is for slices that are one native call; others call
    ``q`` and ``kv``.
    """

    def __init__(
        self,
        links: list[MemoryLink],
        partition: Partition,
        layers: Sequence[LayerShape],
        backend: AttentionBackend,
        dtype: torch.dtype,
        parity: MemoryLink | None = None,
    ) -> None:
        """As MemoryPool; ``dtype``: of all messages. There are links, with one timeout and channels that are native."""
        super().__init__(links, partition, layers, backend, parity=parity)
        self.dtype = dtype
        self._forms = sorted({layer.like for layer in self.layers})  # the layers that others are like
        alike = array("q", [layer.like for layer in self.layers]).tobytes()
        channels = tuple(link.channel for link in self.links)
        self._trace = links[0].trace
        self._pool = Pool(channels, alike, links[0].timeout_s, self._trace.native)
        self.native_send = self._pool.send()

    @property
    def send_s(self) -> float:
        """Seconds spent sending, in Python and in native calls."""
        return self._send_s + self._pool.send_s()

    def settle(self) -> None:
        """Record the step's spans, and as MemoryPool."""
        self._put_spans()
        super().settle()

    def select(self, plan: StepPlan) -> None:
        """The messages that follow, those of native calls, too, belong to this step."""
        self._put_spans()  # of the step before
        super().select(plan)
        assert isinstance(self._step, NativeStep)
        self._pool.select(self._step.native)

    def _laid_out(self, plan: StepPlan) -> NativeStep:
        step = NativeStep(plan, self._groups, self._placement, guarded=bool(self._silent))
        table = _step_table(self.layers, step, self._forms, self.dtype)
        step.native = self._pool.step(table, Key.of_layer(plan))
        return step

    def _gather(self, layer: int, out: Tensor, parts: list[Partial]) -> None:
        if len(out) != self._step.num_rows or out.dtype != self.dtype:
            of = f"a step of {self._step.num_rows} rows of {self.dtype}"
            raise ValueError(f"{len(out)} rows of {out.dtype} of {of}")
        targets = [out.data_ptr(), *(x.data_ptr() for part in parts for x in part)]
        came = self._pool.receive(len(out), layer, 0, *targets)
        while came < len(self.links):  # that link has another message, which it drops or raises
            self._receive(came, layer, out, parts)
            came = self._pool.receive(len(out), layer, came + 1, *targets)

    def _put_spans(self) -> None:
        for event, layer, link, start, end, value in native_spans(self._pool.spans()):
            key = self._step.key(Kind.O, layer)
            self._trace.put(Event(event), start, end, key, layer, self.links[link].number, value)


class NativeStep(PoolStep):
    """A PoolStep, and its messages as native calls have them."""

    native: StepMessages


def _step_table(layers: Sequence[PoolLayer], step: PoolStep, forms: Sequence[int], dtype: torch.dtype) -> bytes:
    """The bytes that csrc/compute/module.cpp reads as a Step."""
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
    for number, (heads, rows, both) in enumerate(share.kv):
        over = number >= len(share.kv) // share.runs
        for tensor, part in enumerate(both):
            _add_copy(numbers, tensor, layer.kv_heads, heads, rows, part, item, over=over)
    numbers.extend((x.o_bytes, len(share.final) + 2 * len(share.partial)))
    for heads, rows, part in share.final:
        _add_copy(numbers, 0, layer.q_heads, heads, rows, part, item, x.partial_bytes)
    for index, at, *results in share.partial:
        for tensor, part in enumerate(results):
            width = prod(part.shape[1:]) * FP32_BYTES
            numbers.extend((1 + 2 * index + tensor, width, 0, width, part.start * FP32_BYTES, 0, 0))
            numbers.extend((at.stop - at.start, *range(at.start, at.stop)))


def _add_copy(
    numbers: array[int],
    tensor: int,
    all_heads: int,
    heads: slice,
    rows: Index,
    part: Part,
    item: int,
    behind: int = 0,
    *,
    over: bool = False,
) -> None:
    """Add the copy of some heads of some rows of a tensor to where they lie in a message, ``behind`` so many bytes;
    ``over`` what is there, by exclusive or.
    """
    head = part.shape[2] * item
    width = (heads.stop - heads.start) * head
    numbers.extend((tensor, all_heads * head, heads.start * head, width, behind + part.start * item))
    numbers.extend((int(rows is None), int(over)))
    if rows is not None:
        numbers.extend((len(rows), *rows.tolist()))
