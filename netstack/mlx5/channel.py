"""A channel whose lanes are queue pairs of an mlx5 device."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.netstack.contract.channel_terms import EPOCH_SHIFT, Geometry, Terms
from lamina.netstack.contract.struct_layout import StructLayout
from lamina.netstack.cuda.channel_memory import ends_of
from lamina.netstack.cuda.driver import CudaError, Driver
from lamina.netstack.cuda.kernel_channel import KernelChannel, LinkKind
from lamina.netstack.cuda.kernel_launches import KERNELS_AT_ONCE
from lamina.netstack.host.native_module import FAILED, mlx5_layout

from .laned_card import LanedCard

if TYPE_CHECKING:
    from lamina.netstack.host._netstack import KernelPair

MLX5 = LinkKind("mlx5", StructLayout(*mlx5_layout()), has_bulk=True, at_once=(*KERNELS_AT_ONCE, "flush"))
ALONE, FIRST, BULK = 0, 1, 2  # Lane of csrc/netstack/mlx5_channel.h
SYNDROMES = {  # of a failed work request, by the mlx5 manual
    0x01: "local length error",
    0x02: "local queue pair error",
    0x04: "local protection error",
    0x05: "work request flushed",
    0x13: "the peer's memory is not open to us there",
    0x15: "the peer's NIC does not answer",
    0x100: "a completion that answers nothing",
}


@dataclass(frozen=True)
class NicLane:
    """``queue``: the pair's description, with addresses as kernels use them. ``staging``, ``inbox``: their addresses,
    for the directions that have slots, those of ``outbound`` and ``inbound``.
    """

    pair: KernelPair
    queue: dict[str, int]
    outbound: Geometry | None
    inbound: Geometry | None
    staging: int
    inbox: int


class NicEvents:
    """The events of queue pairs and of their devices."""

    def __init__(self, pairs: Sequence[KernelPair]) -> None:
        self._pairs, self._failure = pairs, ""
        self._any = select.epoll()
        for fd in (fd for pair in pairs for fd in pair.events_fds()):
            self._any.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        return self._any.fileno()

    def failure(self) -> str:
        for pair in self._pairs:
            if not self._failure and (event := pair.event()):  # several threads poll: none may lose another one's event
                self._failure = f"our NIC reports: {event}"
        return self._failure

    def close(self) -> None:
        self._any.close()


class Mlx5Channel(KernelChannel):
    """Owns ``sock`` and ``parts`` once this returns. ``lanes``: the first, and that of bulk in channels of kernels;
    ``theirs``: the peer's.
    """

    def __init__(
        self, driver: Driver, parts: ExitStack, lanes: Sequence[NicLane], theirs: LanedCard, sock: socket.socket,
        peer: str, session: Terms, *, listening: bool,
    ) -> None:  # fmt: skip
        events = parts.enter_context(closing(NicEvents([lane.pair for lane in lanes])))

        def describe(abort: int) -> bytes:
            structs = list[bytes]()
            numbers = (FIRST, BULK) if len(lanes) > 1 else (ALONE,)
            for number, lane, card in zip(numbers, lanes, theirs.lanes, strict=True):
                zero, queue = session.epoch << EPOCH_SHIFT, dict(lane.queue)
                places = lane.staging or lanes[0].staging, lane.inbox or lanes[0].inbox  # never the address of nothing
                ends = ends_of(*places, abort, lane.outbound, lane.inbound, zero)
                ends |= {"source.address": lane.staging, "source.key": queue.pop("key"), "lane": number}
                ends |= {"peer.address": card.address, "peer.key": card.key}
                structs.append(MLX5.layout.pack(ends | {f"queue.{name}": value for name, value in queue.items()}))
            return b"".join(structs)

        sock.setblocking(False)
        super().__init__(driver, MLX5, parts, describe, sock, peer, session, listening=listening, events=events)

    def _broken(self, status: int) -> str:
        if status != FAILED:
            return super()._broken(status)
        try:
            syndrome = next(filter(None, (self.lane_struct(lane)["queue.syndrome"] for lane in range(self._lanes))), 0)
        except CudaError as error:
            return str(error)
        why = f"the NIC reports error {syndrome:#x} ({SYNDROMES.get(syndrome, 'see the mlx5 manual')})"
        self._lose_link(why)
        return why
