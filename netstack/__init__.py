"""Lamina's network stack: moves bytes between workers and knows no model. See ``contract.fabric``."""

if __name__ != "lamina.netstack":
    raise ImportError("import lamina.netstack, not the top-level folder netstack/")

from .contract.channel_terms import Geometry, ListenTerms, Terms
from .contract.fabric import (
    Arrival,
    Channel,
    ChannelAborted,
    ChannelError,
    ChannelTimeout,
    ChannelUnreachable,
    DeviceChannel,
    DeviceSide,
    Fabric,
    HandshakeError,
    Listener,
    NoResource,
    PeerFault,
    Slot,
)
from .schemes import (
    HERE,
    SCHEMES,
    beyond_host,
    check_rdma_device,
    check_scheme,
    in_process,
    made_at_start,
    open,
    within_process,
)

__all__ = [
    "HERE",
    "SCHEMES",
    "Arrival",
    "Channel",
    "ChannelAborted",
    "ChannelError",
    "ChannelTimeout",
    "ChannelUnreachable",
    "DeviceChannel",
    "DeviceSide",
    "Fabric",
    "Geometry",
    "HandshakeError",
    "ListenTerms",
    "Listener",
    "NoResource",
    "PeerFault",
    "Slot",
    "Terms",
    "beyond_host",
    "check_rdma_device",
    "check_scheme",
    "in_process",
    "made_at_start",
    "open",
    "within_process",
]
