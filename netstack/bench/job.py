"""The agreement of the two sides of a measurement: the job, its messages, and the check of received messages."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, dataclass

from lamina.netstack.contract.channel_terms import Geometry
from lamina.netstack.contract.fabric import Arrival, Channel

SLOTS = 4
PAYLOADS = 3  # message n carries payload n % 3, so no slot of a ring of 4 gets the same bytes twice in a row
BYTES_MAX = 1 << 30
ROUNDS_MAX = 1 << 32
WINDOW_MAX = 1024  # slots of an inbox
CONTROL_BYTES = 512  # the smallest slot: a job or its outcome fits
FACTS_BYTES = 1 << 16  # a host's facts fit: a server's reply to a job "facts"
TIMEOUT_S = 10.0  # of every wait
ITEM_BYTES = 2  # of a shape's elements: bf16
UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20}


@dataclass(frozen=True)
class Measured:
    """``samples``: seconds each; ``busy_s``: their whole duration, without checks unless these are part of them."""

    samples: list[float]
    busy_s: float


@dataclass(frozen=True)
class Size:
    """Payload bytes of the messages of a round: the query, keys with values (pattern ``pair``), and the reply."""

    name: str
    query: int
    kv: int


def parse_size(text: str) -> Size:
    """``4096``, ``16KiB``, or a model's shape ``HEADS/KV_HEADS/HEAD_DIM[xROWS]``: bf16 queries of that many rows. If
    only bytes are given, keys and values have a quarter of them, as with 64 heads on 8. Raises ValueError.
    """
    if shape := re.fullmatch(r"(\d+)/(\d+)/(\d+)(?:x(\d+))?", text):
        heads, kv_heads, dim, rows = (int(n or 1) for n in shape.groups())
        query, kv = ITEM_BYTES * heads * dim * rows, ITEM_BYTES * 2 * kv_heads * dim * rows
    elif (number := re.fullmatch(r"(\d+)([A-Za-z]*)", text)) and number[2].upper() in UNITS:
        query = int(number[1]) * UNITS[number[2].upper()]
        kv = max(1, query // 4)
    else:
        raise ValueError(f"--sizes: {text!r} is neither bytes (64, 16KiB, 1MiB) nor a shape (64/8/128x32)")
    if not (1 <= query <= BYTES_MAX and 1 <= kv <= BYTES_MAX):
        raise ValueError(f"--sizes: {text!r} is {query} B; a message has 1 B to 1 GiB here")
    return Size(text, query, kv)


@dataclass(frozen=True)
class Job:
    """One measurement, as the client sends it to the server. ``pattern`` "end" stops the server, "facts" requests the
    facts of its host. ``driver``: the caller of channels, one of ``patterns.DRIVERS``; ``window``: messages of a round
    that leave before a side waits, for a pattern in ``floods``.
    """

    pattern: str
    driver: str = "python"
    query: int = 1
    kv: int = 1
    warm_up: int = 0
    rounds: int = 0
    window: int = 1

    def __post_init__(self) -> None:
        limits = {
            "query": BYTES_MAX,
            "kv": BYTES_MAX,
            "warm_up": ROUNDS_MAX,
            "rounds": ROUNDS_MAX,
            "window": WINDOW_MAX,
        }
        for name, most in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(f"{name} of a job must be 0..{most}, not {value!r}")
        if self.window * self.query > BYTES_MAX:
            raise ValueError(f"a window of {self.window} messages of {self.query} B is more than 1 GiB")
        if type(self.pattern) is not str or type(self.driver) is not str:
            raise ValueError("pattern and driver of a job must be names")

    @property
    def by_kernels(self) -> bool:
        """True if kernels of a GPU make its calls."""
        return self.driver in ("device", "kernel")

    def geometry(self) -> Geometry:
        return Geometry(slots=max(SLOTS, self.window), slot_bytes=max(self.query, self.kv, CONTROL_BYTES))

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def unpack(data: bytes) -> Job:
        """Return the job of ``pack``. Raises ValueError for anything else."""
        try:
            return Job(**json.loads(data))
        except TypeError as error:
            raise ValueError(f"not a job: {error}") from error


class Payloads:
    """Pseudo-random bytes that are equal on both sides."""

    def __init__(self, nbytes: int) -> None:
        block = random.Random(nbytes).randbytes(nbytes + PAYLOADS)
        self.each = [block[k : k + nbytes] for k in range(PAYLOADS)]

    def __getitem__(self, n: int) -> bytes:
        return self.each[n % PAYLOADS]


def tag_of(n: int) -> bytes:
    return n.to_bytes(8, "little")


def check(arrival: Arrival, n: int, payload: bytes) -> None:
    """Check that this is message n, with exactly that payload. Raises ValueError."""
    check_tag(arrival, n)
    check_bytes(arrival.data, n, payload)


def check_tag(arrival: Arrival, n: int) -> None:
    """Check that this is message n. Raises ValueError."""
    if int.from_bytes(arrival.tag, "little") != n:
        raise ValueError(f"message {n} was due, tag {arrival.tag.hex()} came")


def check_bytes(data: memoryview | bytearray, n: int, payload: bytes) -> None:
    # startswith compares in one sweep and copies nothing; a memoryview would compare item by item.
    if len(data) != len(payload) or not payload.startswith(data):
        raise ValueError(f"message {n}: the payload differs from what was sent")


def send(channel: Channel, data: bytes, timeout_s: float) -> None:
    slot = channel.reserve(len(data), timeout_s=timeout_s)
    slot.data[:] = data
    channel.put_signal(slot, b"")


def receive(channel: Channel, timeout_s: float) -> bytes:
    arrival = channel.wait_signal(timeout_s=timeout_s)
    data = bytes(arrival.data)
    channel.release(arrival)
    return data
