"""A collective over netstack: every rank has a channel to every other one, and sends its own part to all.

One message each way is the least that can be, which is what small tensors want; t - 1 times the bytes of one rank go
out, which is no more than a ring's for two ranks and twice as much for many.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lamina.netstack import Arrival, Channel, Fabric, Geometry, Listener, PeerFault
from lamina.workers.buffers import bytes_of, tensor_over

# A rank may be ahead of another by what it has been told but need not answer (two broadcasts) and one piece.
SLOTS = 4
SLOT_BYTES = 1 << 20
INBOX = Geometry(slots=SLOTS, slot_bytes=SLOT_BYTES)  # from each rank, of each rank
_TAG = struct.Struct("<QQ")  # number of the message, its bytes
_HELLO = struct.Struct("<Q")  # rank
_NARROW = (torch.bfloat16, torch.float16)


class Mesh:
    """See lamina.collective.Collective. Tensors longer than a slot go in pieces."""

    def __init__(self, rank: int, channels: Sequence[Channel | None], timeout_s: float) -> None:
        """``channels``: to each rank, None in one's own place. ``timeout_s``: of each wait."""
        self.rank, self.size = rank, len(channels)
        self.wait_s = 0.0
        self._channels = channels
        self._peers = [c for c in channels if c is not None]
        self._timeout_s = timeout_s
        self._number = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Collective. Raises ChannelError."""
        x = x.contiguous()
        out = torch.empty_like(x)
        pieces, results = x.view(-1), out.view(-1)
        wide = torch.float32 if x.dtype in _NARROW else x.dtype
        for low, high in self._spans(x):
            parts, end = self._exchange(pieces[low:high])
            total = parts[0].to(wide, copy=True)
            for part in parts[1:]:
                total += part
            results[low:high] = total
            end()
        return out

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """See Collective. Raises ChannelError."""
        x = x.contiguous()
        found = x.new_empty(self.size, x.numel())
        for low, high in self._spans(x):
            parts, end = self._exchange(x.view(-1)[low:high])
            for row, part in zip(found, parts, strict=True):
                row[low:high] = part
            end()
        return found.view(self.size, *x.shape).movedim(0, -2).flatten(-2).contiguous()

    def broadcast(self, x: Tensor) -> Tensor:
        """See Collective. Raises ChannelError."""
        x = x.contiguous()
        if self.rank == 0:
            for low, high in self._spans(x):
                self._send(x.view(-1)[low:high])
                self._number += 1
            return x
        out = torch.empty_like(x)
        for low, high in self._spans(x):
            piece, (leader, *_) = out.view(-1)[low:high], self._peers
            arrival = self._receive(leader, piece)
            piece.copy_(tensor_over(arrival.data, x.dtype))
            leader.release(arrival)
            self._number += 1
        return out

    def _spans(self, x: Tensor) -> Iterator[tuple[int, int]]:
        most = SLOT_BYTES // x.element_size()
        return ((low, min(low + most, x.numel())) for low in range(0, x.numel(), most))

    def _exchange(self, piece: Tensor) -> tuple[list[Tensor], Callable[[], None]]:
        """All ranks' pieces, in their order; and what to call when they have been read."""
        self._send(piece)
        parts, arrivals = list[Tensor](), list[tuple[Channel, Arrival]]()
        for channel in self._channels:
            if channel is None:
                parts.append(piece)
            else:
                arrivals.append((channel, self._receive(channel, piece)))
                parts.append(tensor_over(arrivals[-1][1].data, piece.dtype))
        self._number += 1

        def end() -> None:
            for channel, arrival in arrivals:
                channel.release(arrival)

        return parts, end

    def _send(self, piece: Tensor) -> None:
        data = bytes_of(piece)
        for channel in self._peers:
            slot = channel.reserve(data.nbytes, timeout_s=self._timeout_s)
            slot.data[:] = data
            channel.put_signal(slot, _TAG.pack(self._number, data.nbytes))

    def _receive(self, channel: Channel, like: Tensor) -> Arrival:
        start = time.perf_counter()
        arrival = channel.wait_signal(timeout_s=self._timeout_s)
        self.wait_s += time.perf_counter() - start
        due = self._number, like.numel() * like.element_size()
        if (got := _TAG.unpack_from(arrival.tag)) != due or arrival.data.nbytes != due[1]:
            raise PeerFault(f"{channel.peer} is out of step: message {got[0]} of {got[1]} B in place of {due}")
        return arrival


def listen_and_connect(
    fabric: Fabric, listener: Listener, urls: Sequence[str], rank: int, *, start_timeout_s: float, step_timeout_s: float
) -> Mesh:
    """The mesh of the ranks that listen at ``urls``, in their order, once all are there. Closes ``listener``, this
    rank's.

    Each rank waits for those below it, then goes to those above: rank 0 waits for nobody. Raises ChannelError.
    """
    channels: list[Channel | None] = [None] * len(urls)
    for _ in range(rank):
        channel = listener.accept(timeout_s=start_timeout_s)
        hello = channel.wait_signal(timeout_s=start_timeout_s)
        (other,) = _HELLO.unpack_from(hello.tag)
        channel.release(hello)
        if other >= rank or channels[other] is not None:
            raise PeerFault(f"{channel.peer} says that it is rank {other}")
        channels[other] = channel
    for other in range(rank + 1, len(urls)):
        channel = fabric.connect(urls[other], outbound=INBOX, inbound=INBOX, timeout_s=start_timeout_s)
        channel.put_signal(channel.reserve(0), _HELLO.pack(rank))
        channels[other] = channel
    listener.close()
    return Mesh(rank, channels, step_timeout_s)
