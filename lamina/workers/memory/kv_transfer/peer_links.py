"""The links of a memory worker to other ones in an epoch, for transfers while it serves."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from lamina.netstack import Channel, ChannelError, Terms
from lamina.protocol.control import TransferPeer
from lamina.workers.device_selection import CPU
from lamina.workers.epoch_channels import EpochFabric
from lamina.workers.runtime import RUNTIME, Runtime

from .transfer_link import TransferLink, TransferPart, inbox

log = logging.getLogger(__name__)


class PeerLinks:
    """The links, by the peers' numbers. Only the thread that serves rounds uses it. It does nothing before ``open``."""

    def __init__(self, fabric: EpochFabric, peers: Sequence[TransferPeer], around: Runtime = RUNTIME) -> None:
        """``peers``: as in Connect."""
        self._fabric, self._peers, self._runtime = fabric, peers, around
        self._links: dict[int, TransferLink] = {}
        self._due = {peer.name: number for number, peer in enumerate(peers) if peer.is_awaited}
        self._awaited, self._deadline = dict(self._due), math.inf
        self._waiting: list[Channel] = []

    @property
    def num_missing(self) -> int:
        """The number of workers that are still to connect; 0 after a time limit. Their KV is useful, but not
        necessary.
        """
        if self._links and self._due and self._runtime.clock() > self._deadline:
            log.warning("%s did not connect in time, and no KV is transferred there", ", ".join(sorted(self._due)))
            for number in self._due.values():
                self._links[number].give_up("it did not connect in time")
            self._due.clear()
        return len(self._due) if self._links else 0

    def accept(self, channel: Channel) -> bool:
        """Take ``channel`` if it is of a peer that is to connect, and return whether it is."""
        number = self._awaited.get(channel.peer_name)
        if number is None:
            return False
        self._due.pop(channel.peer_name, None)
        if self._links:
            self._links[number].attach(channel)
        else:
            self._waiting.append(channel)
        return True

    def open(
        self,
        silence_s: float,
        connect_s: float,
        accept_s: float,
        answer: Callable[[bytes], Iterable[TransferPart]] | None = None,
        block_bytes: int = 0,
        device: torch.device = CPU,
    ) -> None:
        """Connect in the background, and use all channels. ``connect_s``: seconds until a transfer to a peer without a
        channel fails. ``accept_s``: seconds for peers to connect. Others: as in TransferLink and inbox.
        """
        for number, peer in enumerate(self._peers):
            if not peer.is_receiver:
                link = TransferLink(peer.name, silence_s, device, answer, self._runtime, connect_s)
                self._links[number] = link
        self._deadline = self._runtime.clock() + accept_s
        for channel in self._waiting:
            self.accept(channel)
        if any(peer.connects for peer in self._peers):
            self._runtime.start_background(lambda: self._connect(connect_s, block_bytes), "lamina-meet")

    def __getitem__(self, number: int) -> TransferLink:
        return self._links[number]

    def __iter__(self) -> Iterator[TransferLink]:
        return iter(self._links.values())

    def stop(self) -> None:
        """Copy nothing from now on. After that the epoch's channels may be closed."""
        for link in self:
            link.stop()
        if self._links:
            self._fabric.end_epoch(f"epoch {self._fabric.epoch} is over")
        for link in self:
            link.join()

    def _connect(self, timeout_s: float, block_bytes: int) -> None:
        own, geometry = next(peer.name for peer in self._peers if peer.is_receiver), inbox(block_bytes)
        for number, peer in enumerate(self._peers):
            if peer.connects:
                terms = Terms(outbound=geometry, inbound=geometry, name=own, peer=peer.name, key=peer.key)
                try:
                    self._links[number].attach(self._fabric.connect(peer.url, terms, timeout_s=timeout_s))
                except ChannelError as e:  # a lost worker ends the epoch anyway
                    self._links[number].give_up(str(e))
