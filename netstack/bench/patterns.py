"""The patterns: the client's and the server's part for ``warm_up + rounds`` rounds.

    put_lat  both put a message and read nothing before the clock stops: half a round trip
    rtt      as put_lat, but both copy each received message out: a round trip
    pair     the client puts a query, then keys and values, and waits for the reply
    fan      the client puts a query to every server and waits for all replies
    rate     queries leave at fixed times, even if replies are late; the clock runs from the time that was due
    stream, both, incast, pairs  see ``floods``

Every payload and tag is checked: by the client after its clock has stopped, by the server after its reply has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from lamina.netstack.contract.fabric import Arrival, Channel, ChannelTimeout, Fabric, NoResource

from . import floods, native_loops
from .job import TIMEOUT_S, Job, Measured, Payloads, check, check_bytes, tag_of


def _put(channel: Channel, n: int, payload: bytes, timeout_s: float = TIMEOUT_S) -> None:
    slot = channel.reserve(len(payload), timeout_s=timeout_s)
    slot.data[:] = payload
    channel.put_signal(slot, tag_of(n))


def _try_put(channel: Channel, n: int, payload: bytes) -> bool:
    try:
        _put(channel, n, payload, 0.0)
    except NoResource:
        return False
    return True


def _copy_out(channel: Channel, arrival: Arrival, into: bytearray) -> None:
    into[:] = arrival.data
    channel.release(arrival)


def put_lat_client(fabric: Fabric, channels: Sequence[Channel], job: Job, _: float) -> Measured:
    (channel,) = channels
    payloads = Payloads(job.query)
    samples = []
    for n in range(job.warm_up + job.rounds):
        start = perf_counter()
        _put(channel, n, payloads[n])
        arrival = channel.wait_signal(timeout_s=TIMEOUT_S)
        samples.append((perf_counter() - start) / 2)
        check(arrival, n, payloads[n])
        channel.release(arrival)
    return Measured(samples[job.warm_up :], 2 * sum(samples[job.warm_up :]))


def put_lat_server(fabric: Fabric, channel: Channel, job: Job) -> None:
    payloads = Payloads(job.query)
    for n in range(job.warm_up + job.rounds):
        arrival = channel.wait_signal(timeout_s=TIMEOUT_S)
        _put(channel, n, payloads[n])
        check(arrival, n, payloads[n])
        channel.release(arrival)


def fan_client(fabric: Fabric, channels: Sequence[Channel], job: Job, _: float) -> Measured:
    payloads = Payloads(job.query)
    answers = [bytearray(job.query) for _ in channels]
    samples = []
    for n in range(job.warm_up + job.rounds):
        start = perf_counter()
        for channel in channels:
            _put(channel, n, payloads[n])
        for channel, into in zip(channels, answers, strict=True):
            _copy_out(channel, channel.wait_signal(timeout_s=TIMEOUT_S), into)
        samples.append(perf_counter() - start)
        for into in answers:
            check_bytes(into, n, payloads[n])
    return Measured(samples[job.warm_up :], sum(samples[job.warm_up :]))


def answer_server(fabric: Fabric, channel: Channel, job: Job) -> None:
    payloads = Payloads(job.query)
    copy = bytearray(job.query)
    for n in range(job.warm_up + job.rounds):
        _copy_out(channel, channel.wait_signal(timeout_s=TIMEOUT_S), copy)
        _put(channel, n, payloads[n])
        check_bytes(copy, n, payloads[n])


def pair_client(fabric: Fabric, channels: Sequence[Channel], job: Job, _: float) -> Measured:
    (channel,) = channels
    queries, kv = Payloads(job.query), Payloads(job.kv)
    copy = bytearray(job.query)
    samples = []
    for n in range(job.warm_up + job.rounds):
        start = perf_counter()
        _put(channel, n, queries[n])
        _put(channel, n, kv[n])
        _copy_out(channel, channel.wait_signal(timeout_s=TIMEOUT_S), copy)
        samples.append(perf_counter() - start)
        check_bytes(copy, n, queries[n])
    return Measured(samples[job.warm_up :], sum(samples[job.warm_up :]))


def pair_server(fabric: Fabric, channel: Channel, job: Job) -> None:
    queries, kv = Payloads(job.query), Payloads(job.kv)
    copy, kv_copy = bytearray(job.query), bytearray(job.kv)
    for n in range(job.warm_up + job.rounds):
        for into in (copy, kv_copy):
            _copy_out(channel, channel.wait_signal(timeout_s=TIMEOUT_S), into)
        _put(channel, n, queries[n])
        check_bytes(copy, n, queries[n])
        check_bytes(kv_copy, n, kv[n])


def rate_client(fabric: Fabric, channels: Sequence[Channel], job: Job, per_s: float) -> Measured:
    (channel,) = channels
    payloads = Payloads(job.query)
    copy = bytearray(job.query)
    total = job.warm_up + job.rounds
    due: deque[float] = deque()  # start times of the queries without a reply
    samples: list[float] = []
    sent, begin = 0, perf_counter()
    while len(samples) < total:
        now, next_s = perf_counter(), begin + sent / per_s
        if sent < total and now >= next_s:
            if _try_put(channel, sent, payloads[sent]):
                due.append(next_s)
                sent += 1
                continue
            wait_s = TIMEOUT_S  # all slots are in use: a reply has to come first
        else:
            wait_s = next_s - now if sent < total else TIMEOUT_S
        try:
            arrival = channel.wait_signal(timeout_s=wait_s)
        except ChannelTimeout:
            if wait_s == TIMEOUT_S:
                raise
            continue
        n = len(samples)
        _copy_out(channel, arrival, copy)
        samples.append(perf_counter() - due.popleft())
        check_bytes(copy, n, payloads[n])
    return Measured(samples[job.warm_up :], perf_counter() - begin - job.warm_up / per_s)


Client = Callable[[Fabric, Sequence[Channel], Job, float], Measured]
Server = Callable[[Fabric, Channel, Job], None]


class Pattern(NamedTuple):
    """The two sides of a pattern. ``payloads``: bytes of each message of a round with one server, without empty
    replies. ``fans``: whether it has several servers; ``threads``: whether the client has a thread for each.
    """

    client: Client
    server: Server
    payloads: Callable[[Job], list[int]]
    fans: bool = False
    threads: bool = False


def _query_and_answer(job: Job) -> list[int]:
    return [job.query, job.query]


def _window(job: Job) -> list[int]:
    return [job.query] * job.window


PATTERNS: dict[str, Pattern] = {
    "put_lat": Pattern(put_lat_client, put_lat_server, _query_and_answer),
    "rtt": Pattern(fan_client, answer_server, _query_and_answer),
    "pair": Pattern(pair_client, pair_server, lambda job: [job.query, job.kv, job.query]),
    "fan": Pattern(fan_client, answer_server, _query_and_answer, fans=True),
    "rate": Pattern(rate_client, answer_server, _query_and_answer),
    "stream": Pattern(floods.window_client, floods.window_server, _window),
    "both": Pattern(floods.window_client, floods.window_server, lambda job: 2 * _window(job)),
    "incast": Pattern(floods.incast_client, floods.incast_server, _window, fans=True),
    "pairs": Pattern(floods.pairs_client, floods.window_server, _window, fans=True, threads=True),
}
WINDOWED = ("stream", "both", "incast", "pairs")
NATIVE: dict[str, tuple[Client, Server]] = {
    "put_lat": (native_loops.bounce_client, native_loops.bounce_server),
    "rtt": (native_loops.bounce_client, native_loops.bounce_server),
    "stream": (native_loops.flood_client, native_loops.flood_server),
    "both": (native_loops.flood_client, native_loops.flood_server),
    "pairs": (native_loops.pairs_client, native_loops.flood_server),
}
# driver -> its patterns: the loop in Python, in C++, a kernel per message, one kernel for all
DRIVERS: dict[str, tuple[str, ...]] = {
    "python": tuple(PATTERNS),
    "native": tuple(NATIVE),
    "device": ("rtt",),
    "kernel": ("rtt",),
}


def client_of(job: Job) -> Client:
    return _sides_of(job)[0]


def server_of(job: Job) -> Server:
    """Return the server's side. Raises ValueError for an unknown pattern."""
    if job.pattern not in DRIVERS.get(job.driver, ()):
        raise ValueError(f"unknown pattern {job.pattern!r} of driver {job.driver!r}")
    return _sides_of(job)[1]


def _sides_of(job: Job) -> tuple[Client, Server]:
    if job.driver == "native":
        return NATIVE[job.pattern]
    if job.by_kernels:
        from . import device

        if job.driver == "kernel":
            return device.kernel_client, device.kernel_server
        return device.device_client, device.device_server
    pattern = PATTERNS[job.pattern]
    return pattern.client, pattern.server
