"""The pattern ``rtt`` as kernels drive it, over a channel in GPU memory, by the GPU's clock. Two drivers:

    device  a graph for each round, like a step of Lamina. The clock runs from the end of the kernel before the send to
            the start of the kernel after the receive; the host fills and checks payloads while the clock stands
    kernel  one kernel for as many rounds as fit into KEPT_BYTES: what the network costs without a launch. The host
            compares all messages after the kernel. A kernel's first round does not count, since it waits for the other
            side's launch. A GPU's clock may step by a microsecond: then the mean means more than a percentile

HARDWARE-UNVERIFIED, as ``cuda`` is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise

from lamina.netstack.contract.fabric import Channel, ChannelError, Fabric
from lamina.netstack.cuda.driver import CudaStream, Driver
from lamina.netstack.cuda.kernel_channel import KernelChannel
from lamina.netstack.host.native_module import OK

from .job import PAYLOADS, TIMEOUT_S, Job, Measured, Payloads, check_bytes

TIMEOUT_NS = int(TIMEOUT_S * 1e9)
KEPT_BYTES = 64 << 20  # received messages in the GPU's memory: there is always space for PAYLOADS + 1 of them
HEAD = struct.Struct("<Q32si4xQ8x2Q")  # bytes, tag, status of the kernels, count of stamps, stamps
TAG_AT, STATUS_AT, COUNT_AT, STAMPS_AT, PAYLOAD_AT = 8, 40, 48, 64, 128


class KernelMessage:
    """A message in the GPU's memory, with status and time stamps of the kernels that move it."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self._nbytes = PAYLOAD_AT + nbytes
        self.address = driver.allocate(bytes(self._nbytes))
        self.payload = self.address + PAYLOAD_AT

    def write(self, n: int, payload: bytes) -> None:
        head = HEAD.pack(len(payload), n.to_bytes(32, "little"), OK, 0, 0, 0)
        self._driver.write(self.address, head.ljust(PAYLOAD_AT, b"\0") + payload)

    def clear(self) -> None:
        """Clear status and time stamps."""
        self._driver.write(self.address, bytes(PAYLOAD_AT))

    def check(self, n: int, payload: bytes, peer: str) -> float:
        """Return the seconds between its stamps. Raises ChannelError for a kernel's failure, ValueError for a wrong
        message.
        """
        data = memoryview(self._driver.read(self.address, self._nbytes))
        nbytes, tag, status, _, start, end = HEAD.unpack_from(data)
        if status != OK:
            raise ChannelError(f"{peer}: round {n}: a kernel ended with status {status} of csrc/netstack/device.h")
        if int.from_bytes(tag, "little") != n:
            raise ValueError(f"message {n} was due, tag {tag.hex()} came")
        check_bytes(data[PAYLOAD_AT : PAYLOAD_AT + nbytes], n, payload)
        return float(end - start) / 1e9

    def close(self) -> None:
        self._driver.free(self.address)


class RoundKernels:
    """The launches of one side in a round. ``came`` holds the received message and every kernel's status."""

    def __init__(self, channel: KernelChannel, job: Job, parts: ExitStack) -> None:
        self._view, self._room = channel.hand_to_device(), job.query
        self.driver = self._view.driver
        self.came = parts.enter_context(closing(KernelMessage(self.driver, job.query)))
        self.stream = parts.enter_context(closing(CudaStream(self.driver)))

    def stamp(self) -> None:
        at = self.came.address
        self.driver.launch(self.stream.number, "stamp", at + STAMPS_AT, at + COUNT_AT)

    def send(self, mail: KernelMessage) -> None:
        at, status = mail.address, self.came.address + STATUS_AT
        self._view.send(self.stream.number, mail.payload, at, at + TAG_AT, TIMEOUT_NS, status, self._room)

    def receive(self) -> None:
        at = self.came.address
        status = at + STATUS_AT
        self._view.receive(self.stream.number, self.came.payload, self._room, at, at + TAG_AT, TIMEOUT_NS, status)


def device_client(_: Fabric, channels: Sequence[Channel], job: Job, __: float) -> Measured:
    (channel,) = channels
    driven = _driven(channel)
    payloads = Payloads(job.query)
    samples = []
    with ExitStack() as parts:
        kernels = RoundKernels(driven, job, parts)
        going = parts.enter_context(closing(KernelMessage(kernels.driver, job.query)))
        with kernels.stream.capture() as graph:
            kernels.stamp()
            kernels.send(going)
            kernels.receive()
            kernels.stamp()
        parts.enter_context(closing(graph))
        for n in range(job.warm_up + job.rounds):
            going.write(n, payloads[n])
            kernels.came.clear()
            graph.replay(kernels.stream)
            kernels.stream.synchronize()
            samples.append(kernels.came.check(n, payloads[n], channel.peer))
    driven.take_from_device()
    return Measured(samples[job.warm_up :], sum(samples[job.warm_up :]))


def device_server(_: Fabric, channel: Channel, job: Job) -> None:
    driven, payloads = _driven(channel), Payloads(job.query)
    with ExitStack() as parts:
        kernels = RoundKernels(driven, job, parts)
        with kernels.stream.capture() as graph:
            kernels.receive()
            kernels.send(kernels.came)
        parts.enter_context(closing(graph))
        for n in range(job.warm_up + job.rounds):
            graph.replay(kernels.stream)
            kernels.stream.synchronize()
            kernels.came.check(n, payloads[n], channel.peer)
    driven.take_from_device()


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel for ``rounds`` rounds, beginning with message ``first``; ``skipped`` of them do not count."""

    first: int
    rounds: int
    skipped: int


def kernel_launches(job: Job) -> list[KernelLaunch]:
    """Return the launches of both sides, in which ``job.rounds`` rounds count. All but the last have a multiple of
    PAYLOADS plus one rounds, so that no place gets the same payload twice in a row.
    """
    most = max(1, KEPT_BYTES // job.query // PAYLOADS) * PAYLOADS + 1
    launches, first, unskipped, counted = list[KernelLaunch](), 0, max(1, job.warm_up), job.rounds
    while counted:
        skipped = min(max(1, unskipped), most)
        launches.append(KernelLaunch(first, min(most, skipped + counted), skipped))
        first += launches[-1].rounds
        unskipped -= skipped
        counted -= launches[-1].rounds - skipped
    return launches


class KernelRounds:
    """One side's rounds by kernels. ``run`` returns the seconds of each round that counts, and raises as
    KernelMessage.check.
    """

    def __init__(self, channel: KernelChannel, job: Job, parts: ExitStack) -> None:
        self._view, self._nbytes, self._payloads = channel.hand_to_device(), job.query, Payloads(job.query)
        self._driver, self._launches = self._view.driver, kernel_launches(job)
        self._stream = parts.enter_context(closing(CudaStream(self._driver)))
        sources = b"".join(self._payloads[n] for n in range(2 * PAYLOADS - 1))  # PAYLOADS of them from any one on
        most = max(launch.rounds for launch in self._launches)
        self._places = []
        for data, nbytes in ((sources, 0), (b"", most * job.query), (bytes(8), 8 * (most + 2))):
            self._places.append(self._driver.allocate(data, nbytes))
            parts.callback(self._driver.free, self._places[-1])

    def run(self, peer: str, *, leads: bool) -> list[float]:
        """Run all launches and return their times."""
        times: list[float] = []
        for launch in self._launches:
            times += self._run(peer, launch, leads=leads)[launch.skipped :]
        return times

    def _run(self, peer: str, launch: KernelLaunch, *, leads: bool) -> list[float]:
        sources, targets, status = self._places
        begin, times, nbytes = sources + launch.first % PAYLOADS * self._nbytes, status + 8, self._nbytes
        shape = nbytes, launch.rounds, int(leads), times
        self._view.launch(self._stream.number, "rounds", begin, PAYLOADS, targets, *shape, TIMEOUT_NS, status)
        self._stream.synchronize()
        if code := int.from_bytes(self._driver.read(status, 4), "little"):
            raise ChannelError(f"{peer}: the kernel ended with status {code} of csrc/netstack/device.h")
        for n in range(launch.rounds):
            came = memoryview(self._driver.read(targets + n * nbytes, nbytes))
            check_bytes(came, launch.first + n, self._payloads[launch.first + n])
        stamps = memoryview(self._driver.read(times, 8 * (launch.rounds + 1))).cast("Q").tolist()
        return [(end - start) / 1e9 for start, end in pairwise(stamps)]


def kernel_client(_: Fabric, channels: Sequence[Channel], job: Job, __: float) -> Measured:
    (channel,) = channels
    driven = _driven(channel)
    with ExitStack() as parts:
        samples = KernelRounds(driven, job, parts).run(channel.peer, leads=True)
    driven.take_from_device()
    return Measured(samples, sum(samples))


def kernel_server(_: Fabric, channel: Channel, job: Job) -> None:
    driven = _driven(channel)
    with ExitStack() as parts:
        KernelRounds(driven, job, parts).run(channel.peer, leads=False)
    driven.take_from_device()


def _driven(channel: Channel) -> KernelChannel:
    if not isinstance(channel, KernelChannel):
        raise ValueError(f"--device cuda: kernels do not drive {channel.peer}; use --transport cuda or mlx5")
    return channel
