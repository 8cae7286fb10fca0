"""The transfer of cuts: replicas form a ring, and each slice of a batch runs on the replica after the last slice's.

See arXiv 2405.01814 section 4.3. With one replica the cut stays in place. A cut's tensors follow the step's token ids
[R, 1], since the replica that samples may need tokens that were drawn elsewhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lamina.netstack import Arrival, Channel, ChannelTimeout, Fabric, Geometry, Listener, ListenTerms, PeerFault, Terms
from lamina.protocol.step_plan import MessageKey, MessageKind, ProtocolError, StepPlan
from lamina.utils.tensor_buffers import tensor_over
from lamina.workers.epoch_channels import EpochFabric, SingleEpochListener

from .attention_client import next_of_epoch

ALIGN = 64  # bytes at which each tensor of a message begins
LEAST_SLOT_BYTES = 1 << 16
# Of a replica's listener: only the one before it connects, in up to two epochs.
PIPELINE_LISTENER_TERMS = ListenTerms(channels=2)


class RowShape(Protocol):
    """A tensor of R rows, as far as this module needs it; ``shape`` is that of one row. See converter.RowTensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class _Ids:
    """A step's token ids, the first tensor of every message."""

    shape, dtype = (1,), torch.int64


class RemotePipeline:
    """The pipeline of several replicas or stages: one channel to the next one, and one from the one before."""

    def __init__(
        self, previous: Channel | None, following: Channel | None, cuts: Sequence[Sequence[RowShape]], timeout_s: float
    ) -> None:
        """``cuts[i]``: the tensors between slice i and slice i + 1, without the ids. ``previous``, ``following``: None
        at the first and at the last stage.
        """
        self.wait_s = 0.0
        self._previous, self._next = previous, following
        self._received: Arrival | None = None  # has arrived, and was not received yet
        self._cuts = [(_Ids(), *cut) for cut in cuts]
        self._timeout_s = timeout_s

    @property
    def has_next(self) -> bool:
        """True if a replica or stage follows this one."""
        return self._next is not None

    def can_receive(self, epoch: int, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for results to arrive, and return whether they have. Raises ChannelError."""
        if self._received is None:
            begun = time.perf_counter()
            with suppress(ChannelTimeout):
                self._received = next_of_epoch(_there(self._previous), epoch, timeout_s)
            self.wait_s += time.perf_counter() - begun
        return self._received is not None

    def send(self, plan: StepPlan, index: int, carry: tuple[Tensor, ...]) -> None:
        """Send the results of slice ``index`` to the replica that runs the next slice. Raises ChannelError."""
        places, total = message_layout(self._cuts[index], plan.num_rows)
        following = _there(self._next)
        slot = following.reserve(total, timeout_s=self._timeout_s)
        for (start, stop), x in zip(places, carry, strict=True):
            tensor_over(slot.data[start:stop], x.dtype).view(x.shape).copy_(x)
        following.put_signal(slot, MessageKey.for_step(MessageKind.CARRY, plan, index).pack())

    def receive(self, plan: StepPlan, index: int) -> tuple[Tensor, ...]:
        """Receive the results of slice ``index`` from the replica that ran it. Raises ChannelError, ProtocolError."""
        previous, begun = _there(self._previous), time.perf_counter()
        arrival, self._received = self._received or next_of_epoch(previous, plan.epoch, self._timeout_s), None
        self.wait_s += time.perf_counter() - begun
        try:
            got, key = MessageKey.unpack(arrival.tag), MessageKey.for_step(MessageKind.CARRY, plan, index)
            places, total = message_layout(self._cuts[index], plan.num_rows)
            if got != key or arrival.data.nbytes != total:
                raise ProtocolError(f"ring: {got} of {arrival.data.nbytes} bytes in place of {key} of {total} bytes")
            return tuple(
                tensor_over(arrival.data[start:stop], x.dtype).view(plan.num_rows, *x.shape).clone()
                for (start, stop), x in zip(places, self._cuts[index], strict=True)
            )
        finally:
            previous.release(arrival)


def _there(channel: Channel | None) -> Channel:
    assert channel is not None, "the first stage receives no cut, and the last one sends none"
    return channel


class PipelineChannels:
    """A replica's two connected channels of the ring. The replicas connect to the memory workers one after another."""

    def __init__(
        self,
        fabric: Fabric | EpochFabric,
        listener: Listener | SingleEpochListener,
        peer: str,
        names: Sequence[str],
        cuts: Sequence[Sequence[RowShape]],
        *,
        first: bool,
        max_rows: int,
        num_batches: int,
        start_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        """``listener``: the replica before connects there. ``peer``: the address of the next one. ``names``: of the one
        before, this one and the next. Raises ChannelError, PeerFault.
        """
        self._limit = start_timeout_s
        inbox = pipeline_inbox(cuts, max_rows=max_rows, num_batches=num_batches)

        nothing = Geometry(slots=1, slot_bytes=ALIGN)
        terms = Terms(outbound=inbox, inbound=nothing, name=names[1], peer=names[2])
        connect = partial(fabric.connect, peer, terms, timeout_s=self._limit)
        # Replica 0 connects first; each other one accepts, and then connects to the next.
        following = connect() if first else None
        self.previous = listener.accept(timeout_s=self._limit)
        if self.previous.peer_name != names[0]:
            raise PeerFault(f"{self.previous.peer} is {self.previous.peer_name!r} in place of {names[0]!r}")
        self._next = following or connect()
        listener.close()
        self.pipeline = RemotePipeline(self.previous, self._next, cuts, step_timeout_s)

    def wait_for_previous(self) -> None:
        """Wait until the memory workers have accepted the replica before this one."""
        self.previous.release(self.previous.wait_signal(timeout_s=self._limit))

    def let_next_go(self) -> None:
        """Notify the next replica that the memory workers have accepted this one, so it may connect."""
        self._next.put_signal(self._next.reserve(0), MessageKey(MessageKind.BOUND).pack())


def pipeline_inbox(cuts: Sequence[Sequence[RowShape]], *, max_rows: int, num_batches: int) -> Geometry:
    """Return the inbox of a replica or stage, for the cuts from the one before it: one cut of every batch."""
    most = max(message_layout((_Ids(), *cut), max_rows)[1] for cut in cuts)
    return Geometry(slots=num_batches + 1, slot_bytes=max(LEAST_SLOT_BYTES, most))


def message_layout(tensors: Sequence[RowShape], rows: int) -> tuple[list[tuple[int, int]], int]:
    """Return the first and last byte of each tensor in a message, and the message's length."""
    places, at = [], 0
    for x in tensors:
        nbytes = rows * math.prod(x.shape) * x.dtype.itemsize
        places.append((at, at + nbytes))
        at = -(-(at + nbytes) // ALIGN) * ALIGN
    return places, places[-1][1] if places else 0
