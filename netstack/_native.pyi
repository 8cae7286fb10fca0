from typing_extensions import Buffer

def ring_bytes(slots: int, slot_bytes: int) -> int:
    """Bytes of shared memory of one direction."""

class Link:
    """Both directions of one channel in shared memory. Raises the errors of ``lamina.netstack.fabric``.

    ``memory_fd`` stays the caller's; ``life_line`` (a connected stream socket that nobody writes to any more) is
    owned and closed by the link. ``outbound`` and ``inbound`` are (slots, slot_bytes). A wait may spin
    for ``spin_s`` before it sleeps; it learns whether that pays.
    """

    def __new__(
        cls,
        memory_fd: int,
        life_line: int,
        listening: bool,
        epoch: int,
        outbound: tuple[int, int],
        inbound: tuple[int, int],
        spin_s: float,
        peer: str,
    ) -> Link: ...
    def reserve(self, nbytes: int, timeout_s: float) -> tuple[int, memoryview]:
        """(slot index, writable view of the peer's inbox); NoResource when none is free in time."""

    def publish(self, nbytes: int, tag: bytes, source: Buffer | None) -> int:
        """Signal the oldest reserved slot, after copying ``source`` into it if given; the seqno."""

    def wait(self, timeout_s: float) -> tuple[int, bytes, memoryview]:
        """(seqno, tag, read-only view of our inbox) of the next message; ChannelTimeout when none comes in time."""

    def release(self) -> None:
        """Give the oldest message's slot back. Does nothing once stopped."""

    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
