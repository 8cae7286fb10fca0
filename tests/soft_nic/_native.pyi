from typing_extensions import Buffer

# What a step of an endpoint came to.
OK: int
PENDING: int  # the NIC's ring is full; try again
TIMEOUT: int
ABORTED: int
FAULT: int  # the peer wrote what no honest peer writes
FAILED: int  # the NIC reported an error; see Endpoint.syndrome

# Its inbox: bytes of a line, where the newest message's number is, that of the newest released one, of a lane of bulk
# too, and slots begin.
LINE: int
SIGNAL_AT: int
CREDIT_AT: int
BULK_CREDIT_AT: int
SLOTS_AT: int

SIGNALLED: int  # flag of a work request: ask for a completion
INBOX_ADDRESS: int  # how a peer's work requests name the first byte of an inbox

def channel_layout() -> tuple[int, dict[str, tuple[int, int]]]:
    """Bytes of the Channel of mlx5_channel.h, and (offset, bytes) of each of its fields."""

def inbox_bytes(slots: int, slot_bytes: int) -> int:
    """Bytes of the memory of one direction, inbox and staging alike."""

def write_wqe(
    index: int, queue: int, remote: tuple[int, int], local: tuple[int, int], nbytes: int, flags: int
) -> bytes:
    """The 64 bytes of an RDMA WRITE; ``remote`` and ``local`` are (address, key)."""

def write_word_wqe(index: int, queue: int, remote: tuple[int, int], value: int, flags: int) -> bytes:
    """The 64 bytes of an RDMA WRITE of one 8-byte word that travels in the work request."""

def host_send(channel: int, nbytes: int, timeout_s: float) -> int:
    """Put a message, whose payload is in its staging, on the Channel of mlx5_channel.h at that address: a status."""

def host_receive(channel: int, timeout_s: float) -> int:
    """Take the next message of that channel, and release it."""

def serve_nic(
    ring: int,
    record: int,
    completions: int,
    seen: int,
    registers: int,
    alternate: int,
    number: int,
    blocks: int,
    cqes: int,
    index: int,
    local: tuple[int, int, int, int],
    remote: tuple[int, int, int, int],
    stop: int,
) -> tuple[int, int, int]:
    """Be the NIC of a queue whose memory (addresses) is the caller's, until the word at ``stop`` is not 0.

    Registers hold ~0 until they are written; ``index`` is that of the first WQE; ``local`` and ``remote`` are memory
    regions: key, address as work requests name it, bytes, address here. Counts of what was executed, rung, refused.
    """  # fmt: skip

class Endpoint:
    """One end of a channel over the software NIC. ``outbound`` and ``inbound`` are (slots, slot_bytes).

    It keeps ``inbox`` and ``staging`` (writable, of ``inbox_bytes``) alive. Offsets count from their first byte.
    One thread sends and one receives; ``abort`` may be called by any.
    """

    def __new__(
        cls,
        inbox: Buffer,
        staging: Buffer,
        outbound: tuple[int, int],
        inbound: tuple[int, int],
        epoch: int,
        number: int,
        seed: int,
        proxied: bool = False,
    ) -> Endpoint: ...
    def reach(self, inbox: Buffer, address: int, key: int) -> None:
        """The peer's inbox, as mapped here, and how its NIC names it. Once, before the first publish."""

    def wait_slot(self, timeout_s: float) -> int:
        """OK, TIMEOUT, ABORTED or FAULT."""

    def grant(self) -> tuple[int, int]:
        """(slot index, offset of its payload in the staging), after wait_slot said OK."""

    def publish(self, nbytes: int, tag: Buffer) -> int:
        """Put the oldest granted slot: OK, PENDING or FAILED."""

    def wait_message(self, timeout_s: float) -> int:
        """OK, TIMEOUT, ABORTED or FAULT."""

    def take(self) -> tuple[int, bytes, int, int] | None:
        """(seqno, tag, offset of the payload in the inbox, its length), after wait_message said OK.

        None: the header is not that of the next message.
        """

    def release(self) -> None:
        """Free the slot of the oldest message that was taken; ``report`` tells the peer."""

    def report(self) -> int:
        """OK, PENDING or FAILED."""

    def syndrome(self) -> int:
        """The NIC's first error, as the manual numbers them; 0: none."""

    def ring(self, timeout_s: float) -> bool:
        """Of a proxied endpoint: wait for a doorbell and ring on. False once aborted."""

    def abort(self) -> None: ...
