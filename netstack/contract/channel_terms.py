"""Terms of a channel: the inboxes that a connector requests, and the limits of a listener."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

NAME_BYTES = 64
EPOCH_SHIFT = 48
MAX_MESSAGE_BYTES = (1 << 30) - 64  # payload bytes of one RDMA message after a header


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The inbox of one direction: ``slots`` places of ``slot_bytes`` payload bytes each."""

    slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if not (1 <= self.slots <= 1024 and 1 <= self.slot_bytes <= 1 << 32):
            raise ValueError(f"geometry needs 1..1024 slots of 1 B..4 GiB, not {self.slots} x {self.slot_bytes} B")

    @property
    def nbytes(self) -> int:
        """Payload bytes of all slots."""
        return self.slots * self.slot_bytes


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms on which a connector requests a channel. Raises ValueError for an epoch or a name that does not fit a
    hello.
    """

    outbound: Geometry  # the inbox that the listener grants the connector
    inbound: Geometry  # the inbox that the connector grants the listener
    epoch: int = 0
    name: str = ""  # of the connector
    peer: str = ""  # of the listener that the connector wants
    key: bytes = field(default=b"", repr=False, compare=False)  # that listener's key, if it is not the fabric's own
    kernels: bool = False  # kernels will send its messages: decides the transport, and whether there is a lane for bulk

    def __post_init__(self) -> None:
        if not 0 <= self.epoch < 1 << (64 - EPOCH_SHIFT):
            raise ValueError(f"epoch must be 0..{(1 << (64 - EPOCH_SHIFT)) - 1}, not {self.epoch}")
        check_name(self.name)
        check_name(self.peer)

    def peer_name(self, *, listening: bool) -> str:
        """Return the name of the side that is not this one."""
        return self.name if listening else self.peer


@dataclass(frozen=True, kw_only=True)
class ListenTerms:
    """The connectors that a listener accepts: those that want its ``name``, up to a number of channels. Raises
    ValueError for a bad name.
    """

    name: str = ""
    inbox_bytes: int = field(default_factory=lambda: _memory_bytes() // 2)  # of a channel, both directions together
    channels: int = 256  # most accepted ones that are still in use here

    def __post_init__(self) -> None:
        check_name(self.name)

    def exceeded_limit(self, terms: Terms, channels: int) -> str:
        """Return the limit that ``terms`` exceed with ``channels`` open channels: "inbox", "channels" or ""."""
        if terms.outbound.nbytes + terms.inbound.nbytes > self.inbox_bytes:
            return "inbox"
        return "channels" if channels >= self.channels else ""


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_name(name: str) -> None:
    """Raises ValueError unless ``name`` is text that fits a hello, or empty."""
    if len(name.encode()) > NAME_BYTES or "\0" in name:
        raise ValueError(f"a peer's name has at most {NAME_BYTES} bytes in UTF-8 and no NUL, not {name!r}: shorten it")


DEFAULT_LISTEN_TERMS = ListenTerms()  # of a listener without a name
