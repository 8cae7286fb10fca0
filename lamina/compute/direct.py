"""The compute worker's side of layer messages that go from device to device (workers.wire)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lamina.netstack import Channel, ChannelError
from lamina.protocol.codec import Counts, HeldPiece, held_pieces, messages
from lamina.protocol.options.resolve import LayerPath
from lamina.protocol.partition import Partition
from lamina.protocol.plan import Bound, Direct, Key, Kind, LayerShape, StepPlan
from lamina.workers.staging import Staging
from lamina.workers.wire import LINE_WORDS, LayerWire, lines

from .links import MemoryLink
from .memory_pool import MemoryPool

LINES = 3  # of a memory worker's share of a layer: Q, K and V, O


class _DirectShare(NamedTuple):
    """One memory worker's share of a layer. ``line``: the number of Q's line; the lines of K and V, and of O, follow
    it.
    """

    wire: LayerWire
    line: int
    piece: HeldPiece
    q_heads: slice
    kv_heads: slice


class DirectAttention:
    """Attention of memory workers on devices, reached from device to device; their partition has whole heads.

    Where its wires are ``recordable``, so are its ``q`` and ``kv``: what differs from step to step is in lines.
    """

    def __init__(
        self,
        pool: MemoryPool,
        wires: Sequence[LayerWire],
        partition: Partition,
        layers: Sequence[LayerShape],
        itemsize: int,
        staging: Staging,
    ) -> None:
        """``pool`` takes plans, on links of the workers that ``wires`` go to. ``itemsize``: of the wire's dtype."""
        self._pool, self._wires, self._staging = pool, wires, staging
        self.recordable = all(wire.recordable for wire in wires)
        self._layers, self._itemsize = layers, itemsize
        windows = [0] * len(layers)  # every worker has all rows, whatever their windows
        held = [held_pieces(layers, windows, partition, link.worker, []) for link in pool.links]
        self._shares, num_lines = [list[_DirectShare]() for _ in layers], 0
        for shares, by_link in zip(self._shares, zip(*held, strict=True), strict=True):
            for wire, pieces in zip(wires, by_link, strict=True):
                for piece in pieces:
                    shares.append(_share(piece, wire, num_lines))
                    num_lines += LINES
        self._lines = torch.zeros(num_lines, LINE_WORDS, dtype=torch.int64, device=staging.device)
        self._plan: StepPlan | None = None  # the plan of these lines
        self._ahead: dict[int, tuple[StepPlan, Tensor]] = {}  # batch -> its last plan, and its lines on the host
        self.wait_s = 0.0  # of a host for messages: it waits for its device alone

    @property
    def send_s(self) -> float:
        """Seconds spent sending plans. Devices send the rest."""
        return self._pool.send_s

    def announce(self, plan: StepPlan) -> None:
        """Send the plan of a step to come."""
        self._pool.announce(plan)

    def prepare(self, plan: StepPlan) -> None:
        """Nothing: lines count the messages of all steps before."""

    def select(self, plan: StepPlan) -> None:
        """Bring this step's lines to the device: messages that follow belong to it."""
        if plan is self._plan:
            return
        self._plan = plan
        known = self._ahead.get(plan.batch)
        if known is None or known[0] is not plan:
            known = self._ahead[plan.batch] = plan, lines(self._staging, self._messages(plan))
        self._lines.copy_(self._staging.up(known[1]))

    def q(self, layer: int, q: Tensor) -> None:
        """Send q [R, Hq, 1, D]. R may be above the step's rows: nobody reads the rest."""
        for share in self._shares[layer]:
            share.wire.send(Kind.Q, self._lines[share.line], q[:, share.q_heads, 0].contiguous())

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Send k [R, Hkv, 1, D] and v [R, Hkv, 1, Dv]. R may be above the step's rows: nobody reads the rest."""
        for share in self._shares[layer]:
            parts = (x[:, share.kv_heads, 0].contiguous() for x in (k, v))
            share.wire.send(Kind.KV, self._lines[share.line + 1], *parts)

    @contextmanager
    def launching(self) -> Iterator[bool]:
        """Around the launch of a graph that holds ``q`` or ``kv``; False: it must not be launched."""
        with ExitStack() as held:
            yield all(held.enter_context(wire.launching()) for wire in self._wires)

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """[R, 1, Hq, Dv]. The device has it before whatever it does next; the host does not wait."""
        shape = self._layers[layer]
        out = torch.empty(num_rows, 1, shape.q_heads, shape.v_dim, dtype=dtype, device=self._staging.device)
        for share in self._shares[layer]:
            part = out[:, :, share.q_heads]
            target = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
            share.wire.receive(Kind.O, self._lines[share.line + 2], target)
            if target is not part:
                part.copy_(target)
        return out

    def settle(self) -> None:
        """Raise what went wrong with messages; RefusedError where a memory worker left as it refused a plan."""
        try:
            for wire in self._wires:
                wire.settle()
        except ChannelError:
            for link in self._pool.links:
                with suppress(ChannelError):
                    link.poll(0.0)
            raise

    def _messages(self, plan: StepPlan) -> list[tuple[Key, int, int]]:
        rows, sizes = (Counts(plan.num_rows),), list[tuple[Key, int, int]]()
        for layer, shares in enumerate(self._shares):
            key = Key.of(Kind.Q, plan, layer)
            for share in shares:
                x = messages((share.piece,), rows, self._itemsize)
                _, v, *_ = x.kv[0]
                k_bytes = v.start * self._itemsize
                sizes.append((key, x.q_bytes, 0))
                sizes.append((key._replace(kind=Kind.KV), k_bytes, x.kv_bytes - k_bytes))
                sizes.append((key._replace(kind=Kind.O), x.o_bytes, 0))
        return sizes


def _share(piece: HeldPiece, wire: LayerWire, line: int) -> _DirectShare:
    q_heads = slice(piece.head_start * piece.each, piece.head_stop * piece.each)
    return _DirectShare(wire, line, piece, q_heads, slice(piece.head_start, piece.head_stop))


class Connector(Protocol):
    """Opens a channel to one memory worker, for kernels to send on where they can, or for hosts."""

    def __call__(self, *, kernels: bool) -> Channel: ...


def open_wires(
    links: Sequence[MemoryLink],
    connects: Sequence[Connector],
    bounds: Sequence[Bound],
    staging: Staging,
    wait_s: float,
    path: LayerPath,
    *,
    graphs: bool,
) -> list[LayerWire]:
    """The wires to the memory workers that gave ``bounds``, over the channels of their links, if ``path`` is from
    device to device; else none, and those are closed. Each worker that waits for a channel for hosts gets one, which
    ``connects`` open, in place of that of its link: for plans, or for all. ``graphs``: whether memory workers are to
    record their rounds. Raises ChannelError, RefusedError.
    """
    wires, wanted = list[LayerWire](), path is LayerPath.DEVICE
    for link, connect, bound in zip(links, connects, bounds, strict=True):
        if bound.direct:
            first, link.channel = link.channel, connect(kernels=False)
            link.direct(Direct(wait_s=wait_s if wanted else 0.0, graphs=graphs))
            if wanted:
                wires.append(LayerWire(first, staging, wait_s))
            else:
                first.close()
    return wires
