"""The engines of csrc/netstack behind the Channel of ``lamina.netstack.contract.fabric``, whose errors they raise."""

from lamina.netstack.contract.channel_terms import Geometry
from lamina.netstack.contract.fabric import Arrival, Slot

class Channel:
    peer: str
    peer_name: str
    epoch: int
    outbound: Geometry
    inbound: Geometry
    def reserve(self, nbytes: int, *, timeout_s: float = 0.0) -> Slot: ...
    def put_signal(self, slot: Slot, tag: bytes, /) -> int: ...
    def wait_signal(self, *, timeout_s: float) -> Arrival: ...
    def release(self, arrival: Arrival) -> None: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def calls(self) -> object: ...

def open_link(
    memory_fd: int,
    life_line: int,
    listening: bool,
    epoch: int,
    outbound: Geometry,
    inbound: Geometry,
    spin_s: float,
    peer: str,
    peer_name: str,
    /,
) -> Channel:
    """A channel in shared memory of ``ring_bytes`` for each direction. ``memory_fd`` stays the caller's; ``life_line``
    (a connected stream socket that nobody writes to any more) is the channel's once this returns."""

def open_stream(
    sock: int,
    epoch: int,
    outbound: Geometry,
    inbound: Geometry,
    keys: tuple[bytes, bytes] | None,
    spin_s: float,
    stall_s: float,
    peer: str,
    peer_name: str,
    /,
) -> Channel:
    """A channel over a connected, blocking stream socket, which is the channel's once this returns.

    ``keys``: 32 bytes each for frames sent and received, which then are sealed; None: they carry checksums. A peer that
    takes no byte of a put for ``stall_s`` is given up. Raises OSError where libcrypto cannot be used.
    """

class RdmaEnd:
    """A reliable queue pair with its protection domain, staging and inbox: one side of a channel of ``verbs``."""

    def card(self) -> tuple[bytes, int, int, int, int, int, int, int]:
        """GID, LID, number, first packet, MTU (ibv_mtu); the inbox: bytes, key, address."""

    def connect(self, gid: bytes, lid: int, number: int, psn: int, mtu: int, key: int, address: int, /) -> None:
        """To the peer whose card has these. Raises OSError."""

    def channel(self, sock: int, epoch: int, spin_s: float, stall_s: float, peer: str, peer_name: str, /) -> Channel:
        """Once connected; the end is none any more. ``sock``, the silent life line, is the channel's once this returns.
        A peer whose NIC says nothing for ``stall_s``, though it was asked, is given up.
        """

    def close(self) -> None:
        """Give all back, unless it has become a channel."""

def open_rdma_end(
    device: str,
    port: int,
    gid_index: int,
    pkey_index: int,
    service_level: int,
    traffic_class: int,
    ack_timeout: int,
    outbound: Geometry,
    inbound: Geometry,
    /,
) -> RdmaEnd:
    """Raises OSError, which says what the device refused."""

class KernelPair:
    """A queue pair of an mlx5 device whose ring, doorbell and completions kernels use."""

    def card(self) -> tuple[bytes, int, int, int, int, int, int, int]:
        """As of an RdmaEnd."""

    def connect(self, gid: bytes, lid: int, number: int, psn: int, mtu: int, key: int, address: int, /) -> None:
        """As of an RdmaEnd."""

    def queue(self) -> dict[str, int]:
        """What a Queue of csrc/netstack/mlx5.h begins with, and ``key``, that of the memory that is sent from."""

    def events_fds(self) -> tuple[int, ...]:
        """One is readable where the device has said something of the queue pair or of itself."""

    def event(self) -> str | None:
        """What the device has said that ends the queue pair, in libibverbs's words."""

    def halt(self) -> None:
        """Nothing is sent, and nothing written here, from here on."""

    def close(self) -> None:
        """Once nobody uses its ring. Idempotent."""

def open_kernel_pair(
    device: str,
    port: int,
    gid_index: int,
    pkey_index: int,
    service_level: int,
    traffic_class: int,
    ack_timeout: int,
    blocks: int,
    staging: tuple[int, int, int],
    inbox: tuple[int, int, int],
    rings: tuple[int, int, int],
    /,
) -> KernelPair:
    """For at most ``blocks`` work requests of one block that are under way, a power of two from 8 on. Memory: address,
    bytes, and the file of its dma-buf, or -1 where the kernel knows it by its address. Raises OSError, which says what
    the device refused.
    """

class Ringer:
    """A thread that rings NICs for kernels whose GPU may not (csrc/netstack/proxy/ringer.h), until it is closed."""

    def __init__(self, cores: list[int], /) -> None:
        """``cores`` of the thread; none: those of this one. Raises OSError where there is no thread."""

    def add(self, mailbox: int, doorbell: int, alternate: int, /) -> None:
        """Addresses: a word with all bits set, in which kernels ring, and the NIC's register, with ``alternate`` as of
        ``KernelPair.queue``.
        """

    def remove(self, mailbox: int, /) -> None:
        """Nobody looks there or rings for it once this returns."""

    def rung(self) -> int:
        """Doorbells so far."""

    def close(self) -> None:
        """Ends the thread. Idempotent."""

def rings_bytes(blocks: int, /) -> int:
    """Of memory for the rings of a KernelPair of so many blocks."""

def mlx5_fault() -> str:
    """Why there is no KernelPair: built without libibverbs's headers, or libmlx5 does not load; empty: there is."""

def rdma_gids(device: str, port: int, /) -> list[tuple[int, bytes, int]]:
    """Index, GID and kind (ibv_gid_type), of those that are set. Raises OSError."""

def verbs_fault() -> str:
    """Why there is no RdmaEnd: built without libibverbs's headers, or libibverbs does not load; empty: there is."""

def ring_bytes(slots: int, slot_bytes: int, /) -> int:
    """Bytes of shared memory of one direction."""

# A channel that kernels use (csrc/netstack/device.h): what a step of it came to.
OK: int
PENDING: int
TIMEOUT: int
ABORTED: int
FAULT: int  # the peer wrote what no honest peer writes
FAILED: int

# Its inbox: bytes of a line, where the newest message's number is, that of the newest released one, and slots begin.
LINE: int
SIGNAL_AT: int
BULK_CREDIT_AT: int
CREDIT_AT: int
SLOTS_AT: int

def channel_layout() -> tuple[int, dict[str, tuple[int, int]]]:
    """Bytes of the Channel of memory_channel.h, and (offset, bytes) of each of its fields."""

def mlx5_layout() -> tuple[int, dict[str, tuple[int, int]]]:
    """The same of the Channel of mlx5_channel.h."""

def gin_layout() -> tuple[int, dict[str, tuple[int, int]]]:
    """The same of the Channel of gin_channel.h."""

def slot_stride(slot_bytes: int, /) -> int:
    """Bytes from one slot to the next, header included."""

def inbox_bytes(slots: int, slot_bytes: int, /) -> int:
    """Bytes of the memory of one direction, inbox and staging alike."""

def check(part: int, frame: int, data: bytes | bytearray | memoryview, /) -> bytes:
    """The checksum of part 1 (header) or 2 (payload) of a frame, by its count in its direction, or of other bytes (3);
    16 bytes.
    """

def seal(key: bytes, counter: int, data: bytes | memoryview, /) -> bytes:
    """``data`` under AES-256-GCM, its code of 16 bytes behind it. ``key``: 32 bytes, of one direction of one session;
    ``counter``: 64 bits, never twice with one key. Raises OSError where libcrypto cannot be used.
    """

def unseal(key: bytes, counter: int, sealed: bytes | memoryview, /) -> bytes:
    """What was sealed. Raises ValueError where that was something else, or nothing; OSError as ``seal``."""

def crypto_fault() -> str:
    """Why libcrypto cannot be used; empty: it can."""

def bounce(channel: Channel, payloads: bytes, rounds: int, leads: bool, copies: bool, timeout_s: float, /) -> bytes:
    """Ping-pong without Python: message n carries the n % 3-th third of ``payloads`` and is compared on arrival, after
    the clock has stopped. ``copies``: an arrival is copied out. The leader gets the nanoseconds of each round, 8
    little-endian bytes each, the other side nothing. Raises ValueError for a wrong message, else as a wait does.
    """

def flood(
    channel: Channel,
    payloads: bytes,
    first: int,
    rounds: int,
    window: int,
    leads: bool,
    both: bool,
    timeout_s: float,
    /,
) -> bytes:
    """Rounds from ``first`` on of ``window`` messages, which the leader puts, with ``both`` the other side too; the
    other side answers each round with no bytes. Who takes copies each message out, and compares the window after the
    clock has stopped. The leader gets times, as of ``bounce``, the other side none. Raises as that.
    """
