"""Patterns of many messages at once: a window of ``job.window`` messages leaves before a side waits for a reply.

    stream  the client puts a window, the server replies to its last message: bandwidth and message rate one way
    both    both put a window at the same time: bandwidth both ways
    incast  every server puts a window to the one client at the same time: how many senders one receiver bears
    pairs   the stream of every server at the same time, each from a thread of the client: message rate over many pairs

A receiver copies each message out, as a receive of MPI does. It compares the whole window after the clock has stopped,
or after its reply. A sample is the seconds of a whole window, so percentiles are of windows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from lamina.netstack.contract.fabric import Channel, Fabric

from .job import TIMEOUT_S, Job, Measured, Payloads, check_bytes, check_tag, receive, send, tag_of


class FloodSide:
    """One side's windows: the messages that it puts, and buffers for the messages of ``senders``."""

    def __init__(self, job: Job, senders: int) -> None:
        self._payloads, self._payload_bytes = Payloads(job.query), job.query
        self._job = job
        self._copies = [[bytearray(job.query) for _ in range(job.window)] for _ in range(senders)]

    def put(self, channel: Channel, number: int) -> None:
        """Put all messages of round ``number``."""
        for n in self._numbers(number):
            slot = channel.reserve(self._payload_bytes, timeout_s=TIMEOUT_S)
            slot.data[:] = self._payloads[n]
            channel.put_signal(slot, tag_of(n))

    def take(self, channels: Sequence[Channel], number: int) -> None:
        """Copy all messages of round ``number`` from each of ``channels``, one of each in turn."""
        for i, n in enumerate(self._numbers(number)):
            for channel, copies in zip(channels, self._copies, strict=True):
                arrival = channel.wait_signal(timeout_s=TIMEOUT_S)
                check_tag(arrival, n)
                copies[i][:] = arrival.data
                channel.release(arrival)

    def check(self, number: int) -> None:
        """Raises ValueError if the received bytes of round ``number`` differ from those that were put."""
        for copies in self._copies:
            for n, copy in zip(self._numbers(number), copies, strict=True):
                check_bytes(copy, n, self._payloads[n])

    def time_rounds(self, step: Callable[[int], None]) -> Measured:
        """Time rounds of ``step``; each is checked while the clock stands."""
        samples = []
        for number in range(self._job.warm_up + self._job.rounds):
            start = perf_counter()
            step(number)
            samples.append(perf_counter() - start)
            self.check(number)
        counted = samples[self._job.warm_up :]
        return Measured(counted, sum(counted))

    def _numbers(self, number: int) -> range:
        return range(number * self._job.window, (number + 1) * self._job.window)


def window_client(_: Fabric, channels: Sequence[Channel], job: Job, __: float) -> Measured:
    """Put windows; in the pattern ``both`` also take one in each round."""
    (channel,) = channels
    side = FloodSide(job, senders=int(job.pattern == "both"))

    def step(number: int) -> None:
        side.put(channel, number)
        if job.pattern == "both":
            side.take([channel], number)
        receive(channel, TIMEOUT_S)  # the server has all of the window

    return side.time_rounds(step)


def window_server(_: Fabric, channel: Channel, job: Job) -> None:
    """Take windows; in the pattern ``both`` also put one in each round."""
    side = FloodSide(job, senders=1)
    for number in range(job.warm_up + job.rounds):
        if job.pattern == "both":
            side.put(channel, number)
        side.take([channel], number)
        send(channel, b"", TIMEOUT_S)
        side.check(number)


def incast_client(fabric: Fabric, channels: Sequence[Channel], job: Job, _: float) -> Measured:
    side = FloodSide(job, senders=len(channels))

    def step(number: int) -> None:
        for channel in channels:
            send(channel, b"", TIMEOUT_S)
        side.take(channels, number)

    return side.time_rounds(step)


def incast_server(fabric: Fabric, channel: Channel, job: Job) -> None:
    side = FloodSide(job, senders=0)
    for number in range(job.warm_up + job.rounds):
        receive(channel, TIMEOUT_S)
        side.put(channel, number)


def pairs_client(fabric: Fabric, channels: Sequence[Channel], job: Job, _: float) -> Measured:
    sides = [FloodSide(job, senders=0) for _ in channels]

    def play(pair: int, first: int, rounds: int) -> list[float]:
        samples = []
        for number in range(first, first + rounds):
            start = perf_counter()
            sides[pair].put(channels[pair], number)
            receive(channels[pair], TIMEOUT_S)
            samples.append(perf_counter() - start)
        return samples

    return in_pairs(job, len(channels), play)


def in_pairs(job: Job, pairs: int, play: Callable[[int, int, int], list[float]]) -> Measured:
    """Run each pair in a thread; ``play(pair, first round, rounds)`` returns a pair's seconds. All begin the rounds
    that count together, and each is busy until the last one is done.
    """
    begun: list[float] = []
    ready = threading.Barrier(pairs, action=lambda: begun.append(perf_counter()))

    def run(pair: int) -> tuple[list[float], float]:
        try:
            play(pair, 0, job.warm_up)
            ready.wait(TIMEOUT_S * (1 + job.warm_up))
            return play(pair, job.warm_up, job.rounds), perf_counter()
        except threading.BrokenBarrierError:
            return [], 0.0  # another pair reports why
        except BaseException:
            ready.abort()
            raise

    with ThreadPoolExecutor(pairs) as pool:
        results = list(pool.map(run, range(pairs)))
    samples = [sample for taken, _ in results for sample in taken]
    return Measured(samples, pairs * (max(end for _, end in results) - begun[0]))
