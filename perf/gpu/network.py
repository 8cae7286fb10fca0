"""The network's part of gpu_suite.py: the device side's own kernels, on the GPU, drive software NICs in pinned memory.

HARDWARE-UNVERIFIED as to NICs. It shows that a GPU's stores, fences and polls do what a CPU showed of them. It measures
a round trip over the same NICs with the device in control and with the host in control. It also does so with the device
in control while products of matrices take the rest of the GPU.
"""

from __future__ import annotations

import statistics
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import gcd
from threading import Event
from time import perf_counter
from types import TracebackType
from typing import TypeVar

import torch
from soft_nic import _native as native

from lamina.netstack.contract.struct_layout import StructLayout
from lamina.netstack.cuda.driver import CudaGraph, CudaStream, Driver, Pinned

CHANNEL = StructLayout(*native.channel_layout())
BLOCKS, SLOTS, ROOM = 8, 3, 16384
NUMBER, ALTERNATE, KEYS = 0x123456, 256, (0xAABB00, 0xCCDD00)
STAGING_AT, INBOX_AT = 0x7F0000001000, 0x7E0000002000
TIMEOUT_S = 5.0
START_S, ALONE_S = 60.0, 0.3
BATCH = 4  # products that are launched one after another
T = TypeVar("T")
TIMEOUT_NS = int(TIMEOUT_S * 1e9)
REMOVED = {  # steps of a GPUDirect send (arXiv 2405.01814, 4.1) -> what is left of each when the device drives
    "1 the CPU waits for the kernels before": "removed: the send kernel follows on the stream",
    "2 the CPU posts the work request": "removed: the kernel builds it and rings",
    "3 the NIC fetches and sends": "stays",
    "4 the remote NIC writes": "stays",
    "5 the remote CPU waits for the data": "removed: a kernel polls the signal",
    "6 the remote CPU launches the next kernel": "removed: it waits on the stream after the receive",
}


@dataclass(frozen=True)
class Side:
    """One end: where its channel is, its stream, and pinned memory for bytes, tag, status, stamps and a payload."""

    driver: Driver
    channel: int
    stream: CudaStream
    mail: Pinned

    @property
    def status(self) -> int:
        return int.from_bytes(self.mail.view[40:44], "little")

    def set(self, nbytes: int, tag: int = 0) -> None:
        self.mail.view[:16] = nbytes.to_bytes(8, "little") + tag.to_bytes(8, "little")

    def send(self) -> None:
        at = self.mail.address
        self.driver.launch(self.stream.number, "mlx5_send", self.channel, at + 4096, at, at + 8, TIMEOUT_NS, at + 40)

    def receive(self) -> None:
        at = self.mail.address
        self.driver.launch(
            self.stream.number, "mlx5_receive", self.channel, at + 4096, ROOM, at, at + 8, TIMEOUT_NS, at + 40
        )

    def stamp(self) -> None:
        self.driver.launch(self.stream.number, "stamp", self.mail.address + 64, self.mail.address + 48)

    def stamps(self) -> list[int]:
        """Returns the stamps since the last call, in nanoseconds."""
        (count,) = struct.unpack_from("<Q", self.mail.view, 48)
        self.mail.view[48:56] = bytes(8)
        return list(struct.unpack_from(f"<{count}Q", self.mail.view, 64))


@contextmanager
def pair(driver: Driver, *, first: int = 0, on_device: bool = True) -> Iterator[tuple[Side, Side]]:
    """Two ends, and a NIC for each that runs on a CPU thread. ``first``: index of the first work request."""
    inbox = native.inbox_bytes(SLOTS, ROOM)
    queue = 2 * BLOCKS * 64 + 4096
    with ExitStack() as parts:
        stop = parts.enter_context(closing(Pinned(driver, 64)))
        memory = [parts.enter_context(closing(Pinned(driver, 2 * inbox + queue))) for _ in range(2)]
        pool = parts.enter_context(ThreadPoolExecutor(2))
        nics: list[Future[tuple[int, int, int]]] = []
        sides = []
        for ours, theirs in (memory, memory[::-1]):
            at = ours.address
            staging, ring = at + inbox, at + 2 * inbox
            completions, record, seen, registers = (ring + x for x in (512, 1024, 1088, 1152))
            ours.view[2 * inbox + 512 : 2 * inbox + 1024] = (bytes(63) + b"\xf1") * BLOCKS  # invalid, as after creation
            ours.view[2 * inbox + 1028 : 2 * inbox + 1032] = (first & 0xFFFF).to_bytes(4, "big")
            for offset in (1152, 1152 + ALTERNATE):
                ours.view[2 * inbox + offset : 2 * inbox + offset + 8] = b"\xff" * 8
            slots = {"out.count": SLOTS, "out.bytes": ROOM, "in.count": SLOTS, "in.bytes": ROOM}
            queue_at = {"ring": ring, "record": record, "doorbell": registers, "completions": completions, "seen": seen}
            facts = {"number": NUMBER, "blocks": BLOCKS, "cqes": BLOCKS, "alternate": ALTERNATE}
            begin = {"reserved": first, "committed": first, "completed": first}
            there = {"peer.address": INBOX_AT, "peer.key": KEYS[1], "source.address": STAGING_AT, "source.key": KEYS[0]}
            channel = CHANNEL.pack(
                {"staging": staging, "inbox": at, "abort": stop.address + 8}
                | slots
                | {f"queue.{name}": value for name, value in (queue_at | facts | begin).items()}
                | there
            )
            regions = (KEYS[0], STAGING_AT, inbox, staging), (KEYS[1], INBOX_AT, inbox, theirs.address)
            setup = (ring, record, completions, seen, registers, ALTERNATE, NUMBER, BLOCKS, BLOCKS, first)
            nics.append(pool.submit(native.serve_nic, *setup, *regions, stop.address))
            parts.callback(_stop, stop)
            mail = parts.enter_context(closing(Pinned(driver, 4096 + ROOM)))
            if on_device:
                where = driver.allocate(channel)
                parts.callback(driver.free, where)
            else:
                held = parts.enter_context(closing(Pinned(driver, len(channel))))
                held.view[: len(channel)] = channel
                where = held.address
            stream = parts.enter_context(closing(CudaStream(driver)))
            sides.append(Side(driver, where, stream, mail))
        yield sides[0], sides[1]
        _stop(stop)
        for nic in nics:
            executed, _, refused = nic.result(TIMEOUT_S)
            if not executed or refused:
                raise RuntimeError(f"the software NIC executed {executed} work requests and refused {refused}")


def _stop(word: Pinned) -> None:
    word.view[0] = 1


def captured(side: Side, *steps: str) -> CudaGraph:
    with side.stream.capture() as graph:
        for step in steps:
            getattr(side, step)()
    return graph


def replays(driver: Driver, count: int) -> dict[str, object]:
    """One graph of each end, replayed over many laps of the ring and the end of the 16-bit indices; all verified."""
    first = 0xFFFF - min(count, 0x8000) // 2
    with pair(driver, first=first) as (a, b), ExitStack() as graphs:
        send, receive = (graphs.enter_context(closing(g)) for g in (captured(a, "send"), captured(b, "receive")))
        for n in range(count):
            length = n * 4099 % (ROOM + 1)
            a.set(length, n)
            a.mail.view[4096 : 4096 + length] = bytes([n % 251]) * length
            send.replay(a.stream)
            receive.replay(b.stream)
            for side in (a, b):
                side.stream.synchronize()
            same = a.mail.view[:16] == b.mail.view[:16]
            payload = b.mail.view[4096 : 4096 + length]
            if a.status or b.status or not same or payload != bytes([n % 251]) * length:
                raise RuntimeError(f"replay {n}: status {a.status} and {b.status}, of {length} B some differ")
    return {"replays": count, "laps of the ring": 2 * count // BLOCKS, "from index": first, "verified": True}


def device_driven(driver: Driver, nbytes: int, rounds: int) -> list[float]:
    """Microseconds from the end of the producing kernel to the start of the consuming one, there and back."""
    with pair(driver) as (a, b), ExitStack() as graphs:
        asks = graphs.enter_context(closing(captured(a, "stamp", "send", "receive", "stamp")))
        answers = graphs.enter_context(closing(captured(b, "receive", "send")))
        times = []
        for _ in range(rounds):
            a.set(nbytes)
            answers.replay(b.stream)
            asks.replay(a.stream)
            for side in (a, b):
                side.stream.synchronize()
                if side.status:
                    raise RuntimeError(f"a kernel ended with status {side.status}")
            start, end = a.stamps()
            times.append((end - start) / 1e3)
        return times


def host_driven(driver: Driver, nbytes: int, rounds: int) -> list[float]:
    """The same, where CPUs wait for kernels, post, wait for messages, and launch."""
    with pair(driver, on_device=False) as (a, b), ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            for _ in range(rounds):
                _well(native.host_receive(b.channel, TIMEOUT_S))
                b.stamp()
                b.stream.synchronize()
                b.stamps()
                _well(native.host_send(b.channel, nbytes, TIMEOUT_S))

        answering = pool.submit(answer)
        times = []
        for _ in range(rounds):
            a.stamp()
            a.stream.synchronize()
            _well(native.host_send(a.channel, nbytes, TIMEOUT_S))
            _well(native.host_receive(a.channel, TIMEOUT_S))
            a.stamp()
            a.stream.synchronize()
            start, end = a.stamps()
            times.append((end - start) / 1e3)
        answering.result(TIMEOUT_S)
        return times


class GpuProducts:
    """torch's products of matrices on ``device`` while the block goes on, by a thread, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (128, torch.float32)
        self._flops = 2 * size**3
        self._factors = [torch.randn(size, size, device=device).to(dtype) for _ in range(2)]
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.done, self._over, self._begun = 0, Event(), Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> GpuProducts:
        self.running = self._pool.submit(self._run)
        if not self._begun.wait(START_S):
            self._over.set()
            self.running.result(START_S)  # says why
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self.running.result(START_S)
        self._pool.shutdown()

    def rate(self, during: Callable[[], T]) -> tuple[T, float]:
        """Returns what ``during`` gives, and the GFLOP/s of the products meanwhile."""
        before, start = self.done, perf_counter()
        result = during()
        return result, (self.done - before) * self._flops / (perf_counter() - start) / 1e9

    def _run(self) -> None:
        left, right = self._factors
        product, ahead = torch.empty_like(left), deque[torch.cuda.Event]()
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            while not self._over.is_set():
                for _ in range(BATCH):
                    torch.mm(left, right, out=product)
                if self._stream:  # one batch waits while another runs, so that the GPU is never idle
                    ahead.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                    ahead[-1].record(self._stream)
                    if len(ahead) > 1:
                        ahead.popleft().synchronize()
                self.done += BATCH
                self._begun.set()
            while ahead:
                ahead.popleft().synchronize()


def beside_products(driver: Driver, sizes: Sequence[int], rounds: int, device: torch.device) -> dict[str, object]:
    """Medians of round trips that the device drives, without and with products, and what the products keep."""
    figures: dict[str, object] = {}
    for nbytes in sizes:
        times = partial(device_driven, driver, nbytes, rounds)
        quiet = statistics.median(times())
        with GpuProducts(device) as products:
            _, alone = products.rate(lambda: Event().wait(ALONE_S))
            taken, kept = products.rate(times)
        figures[f"{nbytes} B during products"] = {
            "us": statistics.median(taken), "quiet_us": quiet, "gflop/s": kept, "gflop/s alone": alone,
        }  # fmt: skip
    return figures


def _well(status: int) -> None:
    if status != native.OK:
        raise RuntimeError(f"the host's call ended with status {status}")


def round_trips(driver: Driver, sizes: Sequence[int] = (64, 4096, 16384), rounds: int = 300) -> dict[str, object]:
    """Both ways over the same software NICs: medians, their ratio, and which steps the device removes."""
    figures: dict[str, object] = {}
    for nbytes in sizes:
        device, host = (statistics.median(way(driver, nbytes, rounds)) for way in (device_driven, host_driven))
        figures[f"{nbytes} B"] = {"device_us": device, "host_us": host, "host/device": host / device}
    return figures | {"steps": REMOVED}


def clock_step(stamps: int = 400) -> dict[str, int]:
    """The step of the GPU's clock in nanoseconds, by which waits of kernels end. It divides all differences of times
    that kernels stamp one after another; the shortest of these differences is there, too.
    """
    with closing(Driver()) as driver, closing(CudaStream(driver)) as stream, closing(Pinned(driver, 4096)) as mail:
        for _ in range(stamps):
            driver.launch(stream.number, "stamp", mail.address + 64, mail.address)
        stream.synchronize()
        times = struct.unpack_from(f"<{stamps}Q", mail.view, 64)
    later = [b - a for a, b in pairwise(times) if b != a]
    return {"step_ns": gcd(*later), "shortest_ns": min(later)}


def network(count: int = 1000, rounds: int = 300) -> dict[str, object]:
    """Everything here, on the first GPU."""
    with closing(Driver()) as driver:
        device = torch.device("cuda", driver.index) if torch.cuda.is_available() else torch.device("cpu")
        beside = beside_products(driver, (64, 16384), rounds, device)
        return {"graph": replays(driver, count)} | round_trips(driver, rounds=rounds) | beside
