"""The links between memory workers that exchange KV while no worker attends it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lamina.netstack import Terms
from lamina.protocol.reshard import RebuildKv, Reshard
from lamina.protocol.step_plan import ProtocolError
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.runtime import RUNTIME, Runtime

from .block_parts import max_block_bytes
from .state_parts import max_state_bytes
from .transfer import Transfer, TransferPart
from .transfer_link import NOTHING, TransferLink, inbox

Parts = Mapping[int, Iterable[TransferPart]]  # by the index of a peer


class TransferMesh:
    """One worker's links in one Reshard or RebuildKv, by the peer's index there. ``nbytes``: received."""

    def __init__(self, order: Reshard | RebuildKv, fabric: EpochFabric, around: Runtime = RUNTIME) -> None:
        self._order, self._fabric, self._runtime = order, fabric, around
        self._links: dict[int, TransferLink] = {}
        self._sources, self._targets = set[int](), set[int]()  # peers that have sent KV, and received some
        self.nbytes = self._number = 0

    def connect(self, peers: Iterable[int], store: KvStore, listener: EpochListener) -> None:
        """Connect to ``peers``, which exchange KV of ``store`` or of one with the same layers. Raises ChannelError,
        ProtocolError.
        """
        order, geometry = self._order, inbox(max(max_block_bytes(store), max_state_bytes(store)))
        own, due = order.peers[order.own_index], dict[str, int]()
        for peer in sorted(peers):
            there = order.peers[peer]
            self._links[peer] = TransferLink(there.name, order.timeout_s, store.device, around=self._runtime)
            if peer < order.own_index:
                terms = Terms(outbound=geometry, inbound=geometry, name=own.name, peer=there.name, key=there.key)
                self._links[peer].serve(self._fabric.connect(there.url, terms, timeout_s=order.timeout_s))
            else:
                due[there.name] = peer
        while due:
            channel = self._fabric.accept(listener, order.timeout_s)
            if channel.peer_name not in due:
                raise ProtocolError(f"{channel.peer_name!r} has connected, and sends and receives nothing")
            self._links[due.pop(channel.peer_name)].serve(channel)

    def exchange(self, out: Parts, due: Parts) -> None:
        """Send the parts ``out``, and receive the parts ``due``. All peers call this equally often. Raises
        ChannelError.
        """
        number, self._number = self._number, self._number + 1
        self._sources |= due.keys()
        self._targets |= out.keys()
        came = {
            self._links[peer]: self._links[peer].expect(Transfer(number, parts, self._order.timeout_s))
            for peer, parts in due.items()
        }
        sent = {self._links[peer]: self._links[peer].send(Transfer(number, parts)) for peer, parts in out.items()}
        for link, transfer in [*came.items(), *sent.items()]:
            link.wait(transfer)
        self.nbytes += sum(transfer.nbytes for transfer in came.values())

    def finish(self) -> None:
        """Confirm that everything has arrived, and wait until the receivers have confirmed it. Raises ChannelError."""
        self.exchange(dict.fromkeys(self._sources, (NOTHING,)), dict.fromkeys(self._targets, (NOTHING,)))

    def close(self) -> None:
        """End all links. Closes channels without aborting them: peers may still receive what was sent."""
        for link in self._links.values():
            link.stop()
        self._fabric.close()
        for link in self._links.values():
            link.join()
