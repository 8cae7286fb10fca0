"""The packet size of queue pairs: two ports agree on the smaller size, which is logged."""

from __future__ import annotations

import logging

from .card import MTU_NAMES, QueuePairAddress

log = logging.getLogger(__name__)
LARGEST = max(MTU_NAMES)
ROCE_HEADS = 96  # bytes of a frame in addition to a packet's payload (iboe_get_mtu of Linux)
FRAMES = f"`ip link set DEVICE mtu {MTU_NAMES[LARGEST] + ROCE_HEADS}`"


def remarks_on(place: str, lid: int, mtu: int) -> list[str]:
    """Return the remarks on a port, the ``place``, that sends smaller packets than NICs can; none if it does not."""
    if mtu >= LARGEST:
        return []
    fix = _fix(lid, "on both hosts and on switches")
    return [f"packets of {place} carry {MTU_NAMES[mtu]} bytes, not {MTU_NAMES[LARGEST]}: {fix}"]


class PacketSizeLog:
    """Logs, once for each port of a peer with another packet size, how to get larger packets."""

    def __init__(self) -> None:
        self._told = set[tuple[bytes, int]]()

    def compare(self, ours: QueuePairAddress, theirs: QueuePairAddress, peer: str) -> None:
        """Compare packet sizes; ``theirs`` has been checked."""
        port = theirs.gid, theirs.mtu
        if ours.mtu == theirs.mtu or port in self._told:
            return
        self._told.add(port)
        smaller, larger = sorted((MTU_NAMES[ours.mtu], MTU_NAMES[theirs.mtu]))
        whose, where = ("our port", "on this host") if ours.mtu < theirs.mtu else ("its port", "on its host")
        fix = _fix(ours.lid, f"{where}, and on switches")
        log.warning("%s: packets carry %d bytes, as %s takes no more, not %d: %s", peer, smaller, whose, larger, fix)


def _fix(lid: int, where: str) -> str:
    """Return the fix. ``lid``: 0 on Ethernet."""
    return "the subnet manager decides how large they are" if lid else f"{FRAMES} {where}"
