"""An AttentionClient without Python between a slice and its messages, if all channels are native.

The bytes are the same. A message other than the expected O is handled by its MemoryWorkerClient.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from lamina.config.partition import Partition
from lamina.observe.trace import Event, native_spans
from lamina.ops.attention import AttentionBackend
from lamina.ops.attention.merge import Partial
from lamina.protocol.codec import FP32_BYTES, TensorSpan
from lamina.protocol.step_plan import LayerShape, MessageKey, MessageKind, StepPlan
from lamina.workers.staging import Staging

from .attention_client import AttentionClient, ClientLayer, ClientStep, Index, MemoryWorkerClient, WorkerShare

try:
    from ._compute import Pool, StepMessages
except ImportError:  # not built: AttentionClient sends instead
    Pool = None  # type: ignore[assignment,misc]


def open_attention_client(
    links: list[MemoryWorkerClient],
    partition: Partition,
    layers: Sequence[LayerShape],
    backend: AttentionBackend,
    dtype: torch.dtype,
    staging: Staging,
    parity: Sequence[MemoryWorkerClient] = (),
) -> AttentionClient:
    """Open a client of these memory workers: a native one if channels and tensors allow it. ``dtype``: of all messages.
    ``parity``: see AttentionClient.
    """
    calls = [link.channel.calls() for link in (*links, *parity)]
    if Pool is None or not links or staging.is_separate or None in calls:
        return AttentionClient(links, partition, layers, backend, staging, parity)
    return NativeAttentionClient(links, partition, layers, backend, dtype, parity)


class NativeAttentionClient(AttentionClient):
    """An AttentionClient whose messages are sent and received by native calls. A slice that is one native call uses
    ``native_send``; other slices call ``q`` and ``kv``.
    """

    def __init__(
        self,
        links: list[MemoryWorkerClient],
        partition: Partition,
        layers: Sequence[LayerShape],
        backend: AttentionBackend,
        dtype: torch.dtype,
        parity: Sequence[MemoryWorkerClient] = (),
    ) -> None:
        """``links``: one or more, with equal timeouts and native channels. ``dtype``: of all messages. For the other
        arguments see AttentionClient.
        """
        super().__init__(links, partition, layers, backend, parity=parity)
        self.dtype = dtype
        self._forms = sorted({layer.equal_layer for layer in self.layers})  # the first layers of each kind
        alike = array("q", [layer.equal_layer for layer in self.layers]).tobytes()
        channels = tuple(link.channel for link in self.clients)
        self._trace = links[0].trace
        self.pool = Pool(channels, alike, links[0].timeout_s, self._trace.native_buffer)
        self.native_send = self.pool.send()

    @property
    def send_s(self) -> float:
        """The seconds spent sending, in Python and in native calls."""
        return self._send_s + self.pool.send_s()

    def check_errors(self) -> None:
        """Record the step's spans, then check as AttentionClient does."""
        self._put_spans()
        super().check_errors()

    def begin_step(self, plan: StepPlan) -> None:
        """Select the step that the next messages belong to, those of native calls included."""
        self._put_spans()  # the last step's spans
        super().begin_step(plan)
        assert isinstance(self.step, NativeClientStep)
        self.pool.select(self.step.native)

    def _laid_out(self, plan: StepPlan) -> NativeClientStep:
        step = NativeClientStep(plan, self._groups, self.placement, num_parity=len(self._parity_links))
        table = _step_table(self.layers, step, self._forms, self.dtype)
        step.native = self.pool.step(table, MessageKey.packed_for_layer_0(plan))
        return step

    def _gather(self, layer: int, out: Tensor, parts: list[Partial]) -> None:
        if len(out) != self.step.num_rows or out.dtype != self.dtype:
            of = f"a step of {self.step.num_rows} rows of {self.dtype}"
            raise ValueError(f"{len(out)} rows of {out.dtype} of {of}")
        came = self.pool.receive(layer, 0, out, parts)
        while came < len(self.clients):  # that link has another message, which is dropped or raised
            self._receive(came, layer, out, parts)
            came = self.pool.receive(layer, came + 1, out, parts)

    def _put_spans(self) -> None:
        for event, layer, link, start, end, value in native_spans(self.pool.spans()):
            key = self.step.key(MessageKind.O, layer)
            self._trace.put(Event(event), start, end, key, layer, self.clients[link].number, value)


class NativeClientStep(ClientStep):
    """A ClientStep with its messages in native form."""

    native: StepMessages


def _step_table(layers: Sequence[ClientLayer], step: ClientStep, forms: Sequence[int], dtype: torch.dtype) -> bytes:
    """Return the bytes that csrc/compute/compute_module.cpp reads as a Step."""
    numbers = array("q", [step.num_rows, len(forms)])
    for like in forms:
        numbers.append(like)
        for share in step.shares(layers[like], dtype):
            _add_share(numbers, layers[like].shape, share, dtype.itemsize)
    return numbers.tobytes()


def _add_share(numbers: array[int], layer: LayerShape, share: WorkerShare, item: int) -> None:
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
    part: TensorSpan,
    item: int,
    offset: int = 0,
    *,
    over: bool = False,
) -> None:
    """Add the copy of some rows and heads of a tensor to their place in a message. ``offset``: bytes added to that
    place. ``over``: if the copy is combined with what is there by exclusive or.
    """
    head = part.shape[2] * item
    width = (heads.stop - heads.start) * head
    numbers.extend((tensor, all_heads * head, heads.start * head, width, offset + part.start * item))
    numbers.extend((int(rows is None), int(over)))
    if rows is not None:
        numbers.extend((len(rows), *rows.tolist()))
