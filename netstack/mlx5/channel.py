"""A channel whose link is a queue pair of an mlx5 device."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.netstack.contract.layout import StructLayout
from lamina.netstack.contract.terms import EPOCH_SHIFT, Terms
from lamina.netstack.cuda.driver import CudaError, Driver
from lamina.netstack.cuda.ends import ends_of
from lamina.netstack.cuda.kernel_channel import KernelChannel, LinkKind, directions
from lamina.netstack.host.native import FAILED, mlx5_layout
from lamina.netstack.meeting.lifeline import LinkEvents
from lamina.netstack.rdma.card import Card

if TYPE_CHECKING:
    from lamina.netstack.host._native import KernelPair

MLX5 = LinkKind("mlx5", StructLayout(*mlx5_layout()))
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
class NicLink:
    """``queue``: as ``pair`` tells it, with addresses as kernels name them; ``staging``, ``inbox``: their addresses."""

    pair: KernelPair
    queue: dict[str, int]
    staging: int
    inbox: int


class NicEvents:
    """The events of a queue pair and of its device; ``said``: the first that ends the pair, in libibverbs's words."""

    def __init__(self, pair: KernelPair) -> None:
        self._pair, self.said = pair, ""

    def fileno(self) -> int:
        return self._pair.events_fd()

    def is_over(self) -> bool:
        if not self.said and (said := self._pair.event()):  # several threads ask: none may lose what another one got
            self.said = said
        return bool(self.said)


class Mlx5Channel(KernelChannel):
    """Owns ``sock`` and ``parts`` once this returns; ``theirs`` is the card of the peer."""

    def __init__(
        self, driver: Driver, parts: ExitStack, link: NicLink, theirs: Card, sock: socket.socket, peer: str,
        session: Terms, *, listening: bool,
    ) -> None:  # fmt: skip
        self._nic = NicEvents(link.pair)
        facts = dict(link.queue)
        there = {"source.address": link.staging, "source.key": facts.pop("key")}
        there |= {"peer.address": theirs.address, "peer.key": theirs.key}
        there |= {f"queue.{name}": value for name, value in facts.items()}
        shapes = directions(session, listening=listening)

        def describe(abort: int) -> bytes:
            zero = session.epoch << EPOCH_SHIFT
            return MLX5.layout.pack(ends_of(link.staging, link.inbox, abort, *shapes, zero) | there)

        sock.setblocking(False)
        super().__init__(driver, MLX5, parts, describe, sock, peer, session, listening=listening)

    def _finish(self) -> None:
        """With the queue pair goes what its NIC has not sent."""
        self._flush()

    def _events(self) -> LinkEvents:
        return self._nic

    def _look(self) -> None:
        super()._look()
        if self._peer_end is None and self._nic.is_over():
            self._lose_link(f"our NIC reports: {self._nic.said}")

    def _broken(self, status: int) -> str:
        if status != FAILED:
            return super()._broken(status)
        try:
            syndrome = self._struct()["queue.syndrome"]
        except CudaError as error:
            return str(error)
        why = f"the NIC reports error {syndrome:#x} ({SYNDROMES.get(syndrome, 'see the mlx5 manual')})"
        self._lose_link(why)
        return why

    def _lose_link(self, why: str) -> None:
        """The peer, which may only wait, is told."""
        self._lose(why)
        self._say(f"aborted: {why}")
