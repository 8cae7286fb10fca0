"""Lamina's network stack: moves bytes between workers, knows no model. See ``fabric`` for the contract."""

if __name__ != "lamina.netstack":
    raise ImportError("import lamina.netstack, not the top-level folder netstack/")

from .fabric import (
    Arrival,
    Channel,
    ChannelAborted,
    ChannelError,
    ChannelStats,
    ChannelTimeout,
    Fabric,
    Geometry,
    HandshakeError,
    Listener,
    NoResource,
    PeerFault,
    Region,
    Slot,
)

__all__ = [
    "SCHEMES",
    "Arrival",
    "Channel",
    "ChannelAborted",
    "ChannelError",
    "ChannelStats",
    "ChannelTimeout",
    "Fabric",
    "Geometry",
    "HandshakeError",
    "Listener",
    "NoResource",
    "PeerFault",
    "Region",
    "Slot",
    "open",
]

# scheme -> module of this package with a function open_fabric(key: bytes) -> Fabric; imported when first used
SCHEMES: dict[str, str] = {
    "loopback": "loopback",
    "shm": "shm",
    "tcp": "tcp",
    "mlx5": "mlx5",
    "verbs": "verbs",
    "auto": "auto",
}


def open(scheme: str, *, key: bytes) -> Fabric:
    """Open the transport ``scheme`` for peers that hold ``key``.

    Raises ValueError for an unknown scheme (it lists the known ones) and ImportError, with its cause, when the
    transport's own needs (a native module, a driver) are missing.
    """
    from importlib import import_module

    if scheme not in SCHEMES:
        raise ValueError(f"unknown transport {scheme!r}; choose one of {', '.join(SCHEMES)}")
    fabric: Fabric = import_module(f"{__name__}.{SCHEMES[scheme]}").open_fabric(key)
    return fabric
