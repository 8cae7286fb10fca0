"""Lamina's network stack: moves bytes between workers, knows no model. See ``contract.fabric``."""

if __name__ != "lamina.netstack":
    raise ImportError("import lamina.netstack, not the top-level folder netstack/")

from .contract.fabric import (
    Arrival,
    Ceiling,
    Channel,
    ChannelAborted,
    ChannelError,
    ChannelStats,
    ChannelTimeout,
    DeviceChannel,
    DeviceSide,
    Fabric,
    Geometry,
    HandshakeError,
    Listener,
    NoResource,
    PeerFault,
    Region,
    Slot,
)
from .schemes import HERE, SCHEMES, beyond_host, check_scheme, in_process, open, within_process

__all__ = [
    "HERE",
    "SCHEMES",
    "Arrival",
    "Ceiling",
    "Channel",
    "ChannelAborted",
    "ChannelError",
    "ChannelStats",
    "ChannelTimeout",
    "DeviceChannel",
    "DeviceSide",
    "Fabric",
    "Geometry",
    "HandshakeError",
    "Listener",
    "NoResource",
    "PeerFault",
    "Region",
    "Slot",
    "beyond_host",
    "check_scheme",
    "in_process",
    "open",
    "within_process",
]
