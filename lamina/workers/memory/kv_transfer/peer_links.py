"""The links of a worker to other ones in an epoch, for transfers while it serves."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from lamina.config.engine_config import Deadlines
from lamina.netstack import Channel, ChannelError, Geometry, Terms
from lamina.protocol.control import TransferPeer
from lamina.workers.device_selection import CPU
from lamina.workers.epoch_channels import EpochFabric
from lamina.workers.runtime import RUNTIME, Runtime

from .transfer import TransferPart
from .transfer_link import TransferLink, inbox

log = logging.getLogger(__name__)
START_S = Deadlines().start_timeout_s


class PeerLinks:
    """The links to the peers. A peer that connects and is connected to has two, each with requests of one side. One
    thread uses it. It does nothing before ``open``.
    """

    def __init__(
        self,
        fabric: EpochFabric,
        peers: Sequence[TransferPeer],
        around: Runtime = RUNTIME,
        start_s: float = START_S,
    ) -> None:
        """``peers``: by number. ``start_s``: seconds for them to connect, since they may still start; the epoch's end
        also ends it.
        """
        self._fabric, self._peers, self._runtime, self.start_s = fabric, peers, around, start_s
        self.by_number: dict[int, TransferLink] = {}  # for requests of this worker
        self._accepting: dict[str, TransferLink] = {}  # by the name of a peer that connects
        self._awaited = {peer.name for peer in peers if peer.is_awaited}
        self._due, self._deadline = set(self._awaited), math.inf
        self._waiting: list[Channel] = []

    @property
    def num_missing(self) -> int:
        """The number of workers that are still to connect; 0 after a time limit. Their KV is useful, but not
        necessary.
        """
        if self._due and self._runtime.clock() > self._deadline:
            log.warning("%s did not connect in time, and no KV is transferred there", ", ".join(sorted(self._due)))
            for name in self._due:
                self._accepting[name].give_up("it did not connect in time")
            self._due.clear()
        return len(self._due) if self.by_number else 0

    def accept(self, channel: Channel) -> bool:
        """Take ``channel`` if it is of a peer that is to connect, and return whether it is."""
        if channel.peer_name not in self._awaited:
            return False
        self._due.discard(channel.peer_name)
        if self.by_number:
            self._accepting[channel.peer_name].serve(channel)
        else:
            self._waiting.append(channel)
        return True

    def open(
        self,
        silence_s: float,
        answer: Callable[[bytes], Iterable[TransferPart]] | None = None,
        inboxes: tuple[Geometry, Geometry] | None = None,
        device: torch.device = CPU,
        *,
        connect_s: float = math.inf,
        accept_s: float = math.inf,
    ) -> None:
        """Connect in the background, and use all channels. ``connect_s``: seconds until a transfer to a peer without a
        channel fails. ``accept_s``: seconds for peers to connect. Both are at most ``start_s``. ``inboxes``: of the
        worker that is connected to, and of the one that connects; None: for parts that are no blocks. Others: as in
        TransferLink.
        """
        connect_s = min(connect_s, self.start_s)

        def link(peer: TransferPeer) -> TransferLink:
            return TransferLink(peer.name, silence_s, device, answer, self._runtime, connect_s)

        for number, peer in enumerate(self._peers):
            if not peer.is_receiver:
                self.by_number[number] = link(peer)
                self._accepting[peer.name] = link(peer) if peer.connects else self.by_number[number]
        self._deadline = self._runtime.clock() + min(accept_s, connect_s)
        for channel in self._waiting:
            self.accept(channel)
        if any(peer.connects for peer in self._peers):
            geometries = inboxes or (inbox(), inbox())
            self._runtime.start_background(lambda: self._connect(connect_s, *geometries), "lamina-meet")

    def stop(self) -> None:
        """Copy nothing from now on. After that the epoch's channels may be closed."""
        links = [*self.by_number.values(), *self._accepting.values()]
        for link in links:
            link.stop()
        if links:
            self._fabric.end_epoch(f"epoch {self._fabric.epoch} is over")
        for link in links:
            link.join()

    def _connect(self, timeout_s: float, outbound: Geometry, inbound: Geometry) -> None:
        own = next(peer.name for peer in self._peers if peer.is_receiver)
        for number, peer in enumerate(self._peers):
            if peer.connects:
                terms = Terms(outbound=outbound, inbound=inbound, name=own, peer=peer.name, key=peer.key)
                try:
                    self.by_number[number].serve(self._fabric.connect(peer.url, terms, timeout_s=timeout_s))
                except Exception as e:  # any error: else a transfer would wait for ever
                    if not isinstance(e, ChannelError):
                        log.exception("%s cannot be connected to", peer.name)
                    self.by_number[number].give_up(str(e))
