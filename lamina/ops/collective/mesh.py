"""A collective over netstack: every rank has a channel to every other one, and sends its own part to all.

One message each way is the minimum, which suits small tensors. A rank sends t - 1 times its bytes: no more than in a
ring for two ranks, and twice as much for many.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from lamina.netstack import Arrival, Channel, ChannelTimeout, Geometry, Listener, ListenTerms, PeerFault, Terms
from lamina.utils.tensor_buffers import bytes_of, tensor_over

from . import RankFacts, RankLocation
from .reduce import concatenate_last_dim, ordered_sum

# A rank may be ahead of another one by two broadcasts, which need no reply, and by one piece.
SLOTS = 4
SLOT_BYTES = 1 << 20
INBOX = Geometry(slots=SLOTS, slot_bytes=SLOT_BYTES)  # each rank's inbox for each other rank
_TAG = struct.Struct("<QQ")  # number of the message, its bytes
_LETTER = 1 << 63  # instead of a number, for a message that is no part of a tensor
_LOOK_S = 0.001  # seconds at each rank in rotation, while waiting for a letter


class MeshCollective:
    """One rank's end of a group that communicates over channels. Tensors longer than a slot are sent in pieces."""

    recordable = False  # messages are sent from host memory

    def __init__(self, rank: int, channels: Sequence[Channel | None], timeout_s: float) -> None:
        """``channels``: to each rank, None in this rank's place. ``timeout_s``: seconds of each wait."""
        self.rank, self.size = rank, len(channels)
        self.wait_s = 0.0
        self._channels = channels
        self.peers = [c for c in channels if c is not None]
        self._early: dict[int, deque[Arrival]] = {id(c): deque() for c in self.peers}
        self._timeout_s = timeout_s
        self._number = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, in the order of ranks. Raises ChannelError."""
        x = x.contiguous()
        out = torch.empty_like(x)
        pieces, results = x.view(-1), out.view(-1)
        for low, high in self._spans(x):
            parts, end = self._exchange(pieces[low:high])
            results[low:high] = ordered_sum(parts)
            end()
        return out

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """Return all ranks' ``x``, concatenated in the order of ranks. Raises ChannelError."""
        x = x.contiguous()
        rows = x.new_empty(self.size, x.numel())
        for low, high in self._spans(x):
            parts, end = self._exchange(x.view(-1)[low:high])
            for row, part in zip(rows, parts, strict=True):
                row[low:high] = part
            end()
        return concatenate_last_dim(rows, x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's ``x``, a tensor of the host. Raises ChannelError."""
        x = x.contiguous()
        if self.rank == 0:
            for low, high in self._spans(x):
                self._send(bytes_of(x.view(-1)[low:high]))
                self._number += 1
            return x
        out = torch.empty_like(x)
        for low, high in self._spans(x):
            piece, (leader, *_) = out.view(-1)[low:high], self.peers
            arrival = self._receive(leader, _nbytes(piece))
            piece.copy_(tensor_over(arrival.data, x.dtype))
            leader.release(arrival)
            self._number += 1
        return out

    def check(self, within_s: float = 0.0) -> None:
        """Look ``within_s`` seconds for a rank that has ended. Messages that arrive meanwhile are kept. Raises
        PeerFault if there is one, ChannelAborted if this rank's fabric was closed.
        """
        deadline = time.monotonic() + within_s
        while True:
            for channel in self.peers:
                with suppress(ChannelTimeout):
                    self._early[id(channel)].append(channel.wait_signal(timeout_s=min(within_s, _LOOK_S)))
            if time.monotonic() >= deadline:
                return

    def send_letter(self, letter: bytes) -> None:
        """Send a letter to all other ranks, which must call ``receive_letter``. Raises ChannelError."""
        self._put(memoryview(letter), _LETTER, len(letter))

    def receive_letter(self, ranks: Collection[int], timeout_s: float) -> tuple[int, bytes]:
        """Return the next letter from any of ``ranks``, after its rank. Raises ChannelError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for rank in ranks:
                if (channel := self._channels[rank]) is None:
                    continue
                with suppress(ChannelTimeout):
                    arrival = self._next(channel, _LOOK_S)
                    letter = bytes(arrival.data)
                    if _TAG.unpack_from(arrival.tag) != (_LETTER, len(letter)):
                        raise PeerFault(f"{channel.peer} is out of step: it sends a tensor in place of a letter")
                    channel.release(arrival)
                    return rank, letter
        raise ChannelTimeout(f"rank {self.rank}: no letter of ranks {sorted(ranks)} within {timeout_s:g} s")

    def on_graph_launched(self) -> None:
        """Do nothing: no graph of a device holds calls of a mesh."""

    def close(self) -> None:
        """Do nothing: the channels belong to their fabric."""

    def _spans(self, x: Tensor) -> Iterator[tuple[int, int]]:
        most = SLOT_BYTES // x.element_size()
        return ((low, min(low + most, x.numel())) for low in range(0, x.numel(), most))

    def _exchange(self, piece: Tensor) -> tuple[list[Tensor], Callable[[], None]]:
        """Return all ranks' pieces in order, and a function to call after they were read."""
        self._send(bytes_of(piece))
        parts, arrivals = list[Tensor](), list[tuple[Channel, Arrival]]()
        for channel in self._channels:
            if channel is None:
                parts.append(piece)
            else:
                arrivals.append((channel, self._receive(channel, _nbytes(piece))))
                parts.append(tensor_over(arrivals[-1][1].data, piece.dtype))
        self._number += 1

        def end() -> None:
            for channel, arrival in arrivals:
                channel.release(arrival)

        return parts, end

    def _send(self, data: memoryview) -> None:
        self._put(data, self._number, data.nbytes)

    def _put(self, data: memoryview, number: int, nbytes: int) -> None:
        for channel in self.peers:
            slot = channel.reserve(data.nbytes, timeout_s=self._timeout_s)
            slot.data[:] = data
            channel.put_signal(slot, _TAG.pack(number, nbytes))

    def _receive(self, channel: Channel, nbytes: int) -> Arrival:
        """Return the next message, which must have ``nbytes`` bytes."""
        start = time.perf_counter()
        arrival = self._next(channel, self._timeout_s)
        self.wait_s += time.perf_counter() - start
        due = self._number, nbytes
        if (got := _TAG.unpack_from(arrival.tag)) != due or arrival.data.nbytes != nbytes:
            raise PeerFault(f"{channel.peer} is out of step: message {got[0]} of {got[1]} B in place of {due}")
        return arrival

    def _next(self, channel: Channel, timeout_s: float) -> Arrival:
        early = self._early[id(channel)]
        return early.popleft() if early else channel.wait_signal(timeout_s=timeout_s)


def _nbytes(piece: Tensor) -> int:
    return piece.numel() * piece.element_size()


def why_unavailable(device: torch.device) -> str:
    """Return "": a mesh carries tensors of every device."""
    return ""


def why_unusable_together(ranks: Sequence[RankFacts]) -> str:
    """Return "": any ranks can use a mesh."""
    return ""


def open_collective(mesh: MeshCollective, at: RankLocation) -> MeshCollective:
    """Return the mesh itself."""
    return mesh


class RankConnector(Protocol):
    """The part of a Fabric by which ranks connect to each other."""

    def connect(self, url: str, terms: Terms, *, timeout_s: float) -> Channel:
        """Connect as Fabric.connect does."""
        ...


def listener_terms(name: str, ranks: int) -> ListenTerms:
    """Return the terms of the listener of rank ``name``, which stays open in all epochs: ranks of two may be
    connected.
    """
    return ListenTerms(name=name, inbox_bytes=2 * SLOTS * SLOT_BYTES, channels=2 * (ranks - 1))


def connect_mesh(
    fabric: RankConnector,
    listener: Listener,
    urls: Sequence[str],
    names: Sequence[str],
    rank: int,
    *,
    start_timeout_s: float,
    step_timeout_s: float,
) -> MeshCollective:
    """Connect all ranks and return the mesh. Rank r listens at ``urls[r]`` under the name ``names[r]``; names differ.
    Closes ``listener``, this rank's. Each rank waits for the ranks below it, then connects to the ranks above; rank 0
    waits for none. Raises ChannelError.
    """
    if len(set(names)) < len(urls):
        raise ValueError(f"{len(urls)} ranks need as many names, each its own, not {', '.join(map(repr, names))}")
    channels: list[Channel | None] = [None] * len(urls)
    for _ in range(rank):
        channel = listener.accept(timeout_s=start_timeout_s)
        other = names.index(channel.peer_name) if channel.peer_name in names else rank
        if other >= rank or channels[other] is not None:
            raise PeerFault(f"{channel.peer} is {channel.peer_name!r}, which rank {rank} does not wait for")
        channels[other] = channel
    for other in range(rank + 1, len(urls)):
        terms = Terms(outbound=INBOX, inbound=INBOX, name=names[rank], peer=names[other])
        channels[other] = fabric.connect(urls[other], terms, timeout_s=start_timeout_s)
    listener.close()
    return MeshCollective(rank, channels, step_timeout_s)
