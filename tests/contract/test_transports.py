"""The contract of netstack/contract/fabric.py, for every transport in the table: a new one needs no edit here.

Covers: netstack/contract/channel_terms.py, netstack/contract/fabric.py.
"""

import gc
import os
import random
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import soft_nic
from cuda_stand_in import GIN_STAND_IN, ONE_GPU, ONE_STAND_IN, STAND_IN, gpu_of, scheme_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamina import netstack
from lamina.netstack import Channel, DeviceChannel, DeviceSide, Fabric, Geometry, Listener, ListenTerms, Terms
from lamina.netstack.contract.channel_terms import EPOCH_SHIFT
from lamina.netstack.contract.fabric import DEATH_NOTICED_S, TAG_BYTES
from lamina.netstack.cuda import kernel_launches as calls
from lamina.netstack.cuda.driver import CudaStream, Driver, Pinned
from lamina.netstack.host.tcp import TcpFabric

KEY = b"k" * 32
LONG_S = 60.0  # a wait that must be ended by something else than its timeout
SOON_S = 20.0  # for what is on its way, on a busy machine
NOTICED_S = 5 * DEATH_NOTICED_S  # there
SMALL = Geometry(slots=3, slot_bytes=257)
SLOW_LINKS = [f"emulate+{other}?latency_ms=0.5&jitter_ms=0.5&gbps=5" for other in ("loopback", "shm")]
FOR_KERNELS = ["cuda", "mlx5", STAND_IN, GIN_STAND_IN, ONE_GPU, ONE_STAND_IN]
SEALED = "tcp as beyond this host"
TRANSPORTS = [*netstack.SCHEMES, *soft_nic.SCHEMES, SEALED, *SLOW_LINKS, *FOR_KERNELS[2:]]


class Task:
    """A call in a thread, with its result or its error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def until_asleep(self) -> "Task":
        """Return once the thread sleeps in the kernel, as its call does while it waits."""
        deadline = time.monotonic() + SOON_S
        quiet = 0
        while quiet < 5 and time.monotonic() < deadline and self._thread.is_alive():
            try:
                stat = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
            except FileNotFoundError:  # it has ended meanwhile
                break
            quiet = quiet + 1 if stat.rpartition(")")[2].split()[0] == "S" else 0
            time.sleep(0.005)
        return self

    def join(self, timeout_s: float = LONG_S / 2) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"still waiting after {timeout_s} s"
        if self._error is not None:
            raise self._error
        return self._result


@dataclass
class Pair:
    """Both ends of a channel: ``a`` connected, ``b`` was accepted."""

    fabric: Fabric
    listener: Listener
    a: Channel
    b: Channel


def connect(
    fabric: Fabric,
    listener: Listener,
    out: Geometry = SMALL,
    into: Geometry = SMALL,
    epoch: int = 0,
    *,
    kernels: bool = False,
) -> Pair:
    accepted = Task(lambda: listener.accept(timeout_s=SOON_S))
    terms = Terms(outbound=out, inbound=into, epoch=epoch, kernels=kernels)
    a = fabric.connect(listener.url, terms, timeout_s=SOON_S)
    return Pair(fabric, listener, a, accepted.join())


def open_or_skip(scheme: str, key: bytes = KEY, gpu: int | None = None) -> Fabric:
    try:
        if scheme == SEALED:
            return TcpFabric(key, seal=True)
        return netstack.open(scheme, key=key, gpu=gpu)
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(params=TRANSPORTS)
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    with scheme_of(request.param) as scheme:
        fabric = open_or_skip(scheme, gpu=gpu_of(request.param))
        yield fabric
        fabric.close()


@pytest.fixture
def pair(fabric: Fabric) -> Pair:
    return connect(fabric, fabric.listen())


def send(channel: Channel, payload: bytes, tag: bytes = b"", timeout_s: float = SOON_S) -> int:
    slot = channel.reserve(len(payload), timeout_s=timeout_s)
    slot.data[:] = payload
    return channel.put_signal(slot, tag)


def receive(channel: Channel, timeout_s: float = SOON_S) -> tuple[int, bytes, bytes]:
    arrival = channel.wait_signal(timeout_s=timeout_s)
    message = (arrival.seqno, arrival.tag, bytes(arrival.data))
    channel.release(arrival)
    return message


def fill(channel: Channel) -> int:
    """Send until the ring is full; how many fitted."""
    for count in range(10_000):
        try:
            send(channel, b"x", timeout_s=0)
        except netstack.NoResource:
            return count
    raise AssertionError("the ring never fills")


def raises_soon(error: type[Exception], call: Callable[[], object]) -> None:
    """The call raises ``error`` within the time in which a death must be noticed; other channel errors may precede."""
    deadline = time.monotonic() + NOTICED_S
    while time.monotonic() < deadline:
        try:
            call()
        except error:
            return
        except (netstack.NoResource, netstack.ChannelTimeout):
            pass
    call()  # the last chance shows what happens instead
    raise AssertionError(f"no {error.__name__}")


@pytest.mark.no_retry
def test_messages_arrive_in_order_exactly_once_over_many_laps(pair: Pair) -> None:
    rng = random.Random(1)
    for sender, receiver in ((pair.a, pair.b), (pair.b, pair.a)):
        for n in range(40 * SMALL.slots):
            payload = rng.randbytes(rng.randint(0, SMALL.slot_bytes))
            assert send(sender, payload, b"%d" % n) == n + 1
            assert receive(receiver) == (n + 1, (b"%d" % n).ljust(TAG_BYTES, b"\0"), payload)
        with pytest.raises(netstack.ChannelTimeout):
            receiver.wait_signal(timeout_s=0)


@pytest.mark.no_retry
def test_pipelined_messages_keep_order_between_threads(pair: Pair) -> None:
    rng = random.Random(2)
    payloads = [rng.randbytes(rng.randint(0, SMALL.slot_bytes)) for _ in range(300)]

    def pump(sender: Channel) -> None:
        for payload in payloads:
            send(sender, payload)

    tasks = [Task(lambda: pump(pair.a)), Task(lambda: pump(pair.b))]
    drains = [Task(lambda end=end: [receive(end)[2] for _ in payloads]) for end in (pair.a, pair.b)]
    for task in tasks:
        task.join()
    for drain in drains:
        assert drain.join() == payloads


def test_slots_can_be_reserved_ahead_and_are_put_in_that_order(pair: Pair) -> None:
    first, second = pair.a.reserve(3), pair.a.reserve(3)
    second.data[:] = b"two"
    first.data[:] = b"one"
    with pytest.raises(ValueError, match="order"):
        pair.a.put_signal(second, b"")
    pair.a.put_signal(first, b"")
    with pytest.raises(ValueError, match="order"):
        pair.a.put_signal(first, b"")
    pair.a.put_signal(second, b"")
    assert [receive(pair.b)[2] for _ in range(2)] == [b"one", b"two"]


def test_nothing_is_visible_before_put_signal(pair: Pair) -> None:
    slot = pair.a.reserve(4)
    slot.data[:] = b"data"
    with pytest.raises(netstack.ChannelTimeout):
        pair.b.wait_signal(timeout_s=0.05)
    pair.a.put_signal(slot, b"")
    assert receive(pair.b)[2] == b"data"


def test_full_ring_raises_no_resource_and_honours_the_timeout(pair: Pair) -> None:
    assert fill(pair.a) == SMALL.slots
    start = time.monotonic()
    with pytest.raises(netstack.NoResource):
        pair.a.reserve(1, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - start < SOON_S
    arrival = pair.b.wait_signal(timeout_s=SOON_S)
    with pytest.raises(netstack.NoResource):
        pair.a.reserve(1)  # received is not released
    pair.b.release(arrival)
    pair.a.reserve(1, timeout_s=SOON_S)
    with pytest.raises(netstack.NoResource):
        pair.a.reserve(1, timeout_s=0.3)  # one released slot is one slot


def test_a_release_wakes_a_sender_that_waits(pair: Pair) -> None:
    fill(pair.a)
    waiting = Task(lambda: pair.a.reserve(1, timeout_s=LONG_S)).until_asleep()
    receive(pair.b)
    assert waiting.join(SOON_S).data.nbytes == 1


def test_a_message_wakes_a_receiver_that_waits(pair: Pair) -> None:
    waiting = Task(lambda: receive(pair.b, LONG_S)).until_asleep()
    send(pair.a, b"wake up")
    assert waiting.join(SOON_S)[2] == b"wake up"


def test_bounds(pair: Pair) -> None:
    for nbytes in (SMALL.slot_bytes + 1, 1 << 40, -1):
        with pytest.raises(ValueError):
            pair.a.reserve(nbytes)
    slot = pair.a.reserve(SMALL.slot_bytes)
    assert slot.data.nbytes == SMALL.slot_bytes
    assert not slot.data.readonly
    with pytest.raises(ValueError, match="tag"):
        pair.a.put_signal(slot, b"t" * (TAG_BYTES + 1))
    slot.data[:] = b"z" * SMALL.slot_bytes
    pair.a.put_signal(slot, b"t" * TAG_BYTES)  # a refused put has changed nothing
    assert receive(pair.b) == (1, b"t" * TAG_BYTES, b"z" * SMALL.slot_bytes)


def test_zero_length_message_and_tag_bytes(pair: Pair) -> None:
    tag = bytes(range(TAG_BYTES))
    assert send(pair.a, b"", tag) == 1
    assert receive(pair.b) == (1, tag, b"")


def test_an_arrival_does_not_change_until_released(pair: Pair) -> None:
    for n in range(SMALL.slots):
        send(pair.a, bytes([n]) * SMALL.slot_bytes)
    arrivals = [pair.b.wait_signal(timeout_s=SOON_S) for _ in range(SMALL.slots)]
    pair.b.release(arrivals[0])
    send(pair.a, b"\xff" * SMALL.slot_bytes)
    for n, arrival in enumerate(arrivals[1:], start=1):
        assert arrival.data == bytes([n]) * SMALL.slot_bytes


def test_views_are_read_only_and_released_in_order(pair: Pair) -> None:
    send(pair.a, b"one")
    send(pair.a, b"two")
    first, second = (pair.b.wait_signal(timeout_s=SOON_S) for _ in range(2))
    assert first.data.readonly
    with pytest.raises(TypeError):
        first.data[0] = 0
    with pytest.raises(ValueError, match="order"):
        pair.b.release(second)
    pair.b.release(first)
    with pytest.raises(ValueError, match="order"):
        pair.b.release(first)
    pair.b.release(second)


def test_wait_honours_its_timeout_and_the_channel_stays_usable(pair: Pair) -> None:
    start = time.monotonic()
    with pytest.raises(netstack.ChannelTimeout):
        pair.b.wait_signal(timeout_s=0.2)
    assert 0.2 <= time.monotonic() - start < SOON_S
    send(pair.a, b"later")
    assert receive(pair.b)[2] == b"later"


class Interrupt(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("operation", ["wait_signal", "reserve"])
def test_a_signal_handler_can_end_a_wait(pair: Pair, operation: str) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        fill(pair.a)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        start = time.monotonic()
        with pytest.raises(Interrupt):
            pair.a.wait_signal(timeout_s=LONG_S) if operation == "wait_signal" else pair.a.reserve(1, timeout_s=LONG_S)
        assert time.monotonic() - start < SOON_S
    finally:
        signal.signal(signal.SIGUSR1, before)
    receive(pair.b)  # the channel is still usable
    pair.a.reserve(1, timeout_s=SOON_S)


@pytest.mark.parametrize("operation", ["wait_signal", "reserve"])
@pytest.mark.parametrize("how", ["abort", "close"])
def test_abort_and_close_wake_both_sides(pair: Pair, how: str, operation: str) -> None:
    calls: dict[str, Callable[[Channel], object]] = {
        "wait_signal": lambda end: end.wait_signal(timeout_s=LONG_S),
        "reserve": lambda end: end.reserve(1, timeout_s=LONG_S),
    }
    if operation == "reserve":
        fill(pair.a)
        fill(pair.b)
    mine, theirs = (Task(lambda end=end: calls[operation](end)).until_asleep() for end in (pair.a, pair.b))
    if how == "abort":
        pair.a.abort("enough")
    else:
        pair.a.close()
    with pytest.raises(netstack.ChannelAborted):
        mine.join(NOTICED_S)
    with pytest.raises(netstack.PeerFault):
        theirs.join(NOTICED_S)


def test_whatever_the_peer_says_is_one_line_of_text(pair: Pair) -> None:
    """Its text ends up in errors and logs, where it must not pass for another peer's."""
    pair.a.abort("enough\r\nERROR \x1b[2Jall is lost \x7f\u2028\u00e9")
    with pytest.raises(netstack.PeerFault, match="enough +ERROR .*all is lost .*\u00e9") as fault:
        pair.b.wait_signal(timeout_s=LONG_S)
    assert str(fault.value).isprintable()


def test_abort_is_idempotent_final_and_carries_its_reason(pair: Pair) -> None:
    slot = pair.a.reserve(1)
    pair.a.abort("the step was cancelled")
    pair.a.abort("again")
    for call in (
        lambda: pair.a.reserve(1),
        lambda: pair.a.put_signal(slot, b""),
        lambda: pair.a.wait_signal(timeout_s=0),
    ):
        with pytest.raises(netstack.ChannelAborted):
            call()
    with pytest.raises(netstack.PeerFault, match="the step was cancelled"):
        pair.b.wait_signal(timeout_s=SOON_S)
    with pytest.raises(netstack.PeerFault):
        pair.b.reserve(1)


def test_peer_close_is_noticed_by_every_call(pair: Pair) -> None:
    pair.b.close()
    raises_soon(netstack.PeerFault, lambda: pair.a.reserve(1))
    raises_soon(netstack.PeerFault, lambda: pair.a.wait_signal(timeout_s=0))
    with pytest.raises(netstack.PeerFault):
        pair.a.wait_signal(timeout_s=LONG_S)


def test_a_sender_that_never_waits_notices_the_death(fabric: Fabric) -> None:
    roomy = Geometry(slots=1024, slot_bytes=64)
    pair = connect(fabric, fabric.listen(), roomy, roomy)
    pair.b.close()
    deadline = time.monotonic() + NOTICED_S
    with pytest.raises(netstack.PeerFault):  # noqa: PT012
        while time.monotonic() < deadline:
            pair.a.reserve(1)
            time.sleep(0.02)  # the pace of a sender with free slots


def test_a_receiver_that_only_polls_notices_the_death(pair: Pair) -> None:
    pair.b.close()
    raises_soon(netstack.PeerFault, lambda: pair.a.wait_signal(timeout_s=0))


def test_close_is_idempotent_and_release_after_it_does_nothing(pair: Pair) -> None:
    send(pair.a, b"bye")
    arrival = pair.b.wait_signal(timeout_s=SOON_S)
    pair.b.close()
    pair.b.close()
    pair.b.release(arrival)
    pair.a.close()
    pair.fabric.close()
    pair.fabric.close()


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_end_of_a_fabric_is_the_end_of_its_channels_whoever_connected(transport: str, accepted: bool) -> None:
    with scheme_of(transport) as scheme:
        near, far = open_or_skip(scheme), open_or_skip(scheme)
        try:
            listener = far.listen()
            waiting = Task(lambda: listener.accept(timeout_s=SOON_S))
            a = near.connect(listener.url, Terms(outbound=SMALL, inbound=SMALL), timeout_s=SOON_S)
            kept, closed = (a, far) if accepted else (waiting.join(), near)
            waiting.join()
            closed.close()
            raises_soon(netstack.PeerFault, lambda: kept.wait_signal(timeout_s=0))
        finally:
            near.close()
            far.close()


def test_errors_name_the_peer_and_the_operation(pair: Pair) -> None:
    with pytest.raises(netstack.ChannelTimeout) as error:
        pair.a.wait_signal(timeout_s=0)
    assert pair.a.peer in str(error.value)
    assert "wait_signal" in str(error.value)


def test_epoch_is_the_top_of_the_seqno_and_a_reset_is_a_new_channel(pair: Pair) -> None:
    send(pair.a, b"old")
    again = connect(pair.fabric, pair.listener, epoch=65535)
    assert (again.a.epoch, again.b.epoch) == (65535, 65535)
    for n in range(1, 5):
        assert send(again.a, b"new") == (65535 << EPOCH_SHIFT) + n
        seqno, _, payload = receive(again.b)
        assert (seqno, payload) == ((65535 << EPOCH_SHIFT) + n, b"new")
    assert receive(pair.b)[2] == b"old"
    for epoch in (-1, 65536):
        with pytest.raises(ValueError, match="epoch"):
            pair.fabric.connect(pair.listener.url, Terms(outbound=SMALL, inbound=SMALL, epoch=epoch))


def test_a_fresh_channel_of_any_epoch_is_empty(fabric: Fabric) -> None:
    for epoch in (0, 1, 65535):
        pair = connect(fabric, fabric.listen(), epoch=epoch)
        for end in (pair.a, pair.b):
            with pytest.raises(netstack.ChannelTimeout):
                end.wait_signal(timeout_s=0.01)
        assert [fill(end) for end in (pair.a, pair.b)] == [SMALL.slots] * 2


def test_geometries_may_differ_and_are_seen_mirrored(fabric: Fabric) -> None:
    pair = connect(fabric, fabric.listen(), out=Geometry(slots=1, slot_bytes=5), into=Geometry(slots=4, slot_bytes=9))
    assert fill(pair.a) == 1
    assert fill(pair.b) == 4
    with pytest.raises(ValueError):
        pair.a.reserve(6)
    with pytest.raises(ValueError):
        pair.b.reserve(10)


def test_two_channels_do_not_mix(fabric: Fabric) -> None:
    listener = fabric.listen()
    pairs = [connect(fabric, listener) for _ in range(2)]
    for n in range(30):
        for k, pair in enumerate(pairs):
            send(pair.a, b"a%d.%d" % (k, n))
            send(pair.b, b"b%d.%d" % (k, n))
        for k, pair in enumerate(pairs):
            assert receive(pair.b)[2] == b"a%d.%d" % (k, n)
            assert receive(pair.a)[2] == b"b%d.%d" % (k, n)
    pairs[0].a.abort("alone")
    send(pairs[1].a, b"unharmed")
    assert receive(pairs[1].b)[2] == b"unharmed"


@pytest.mark.no_retry
def test_large_messages_put_by_both_at_once_do_not_deadlock(fabric: Fabric) -> None:
    large = Geometry(slots=2, slot_bytes=8 << 20)
    pair = connect(fabric, fabric.listen(), large, large)
    payload = random.Random(4).randbytes(large.slot_bytes)

    def exchange(end: Channel) -> bool:
        for _ in range(2):
            send(end, payload)
        return all(receive(end)[2] == payload for _ in range(2))

    tasks = [Task(lambda end=end: exchange(end)) for end in (pair.a, pair.b)]
    assert [task.join() for task in tasks] == [True, True]


def test_wrong_key_is_refused_and_the_listener_survives(fabric: Fabric) -> None:
    listener = fabric.listen()
    stranger = open_or_skip(fabric.scheme, b"x" * 32)
    accepted = Task(lambda: listener.accept(timeout_s=LONG_S))
    with pytest.raises(netstack.HandshakeError):
        stranger.connect(listener.url, Terms(outbound=SMALL, inbound=SMALL), timeout_s=SOON_S)
    channel = fabric.connect(listener.url, Terms(outbound=SMALL, inbound=SMALL), timeout_s=SOON_S)
    send(channel, b"friend")
    assert receive(accepted.join())[2] == b"friend"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_key_of_one_listener_alone_may_be_named(transport: str) -> None:
    terms = Terms(outbound=SMALL, inbound=SMALL, key=KEY)
    assert "kkk" not in repr(terms), "no text has it"
    with scheme_of(transport) as scheme:
        fabrics = [open_or_skip(scheme, key, gpu_of(transport)) for key in (KEY, b"x" * 32)]
        listener = fabrics[0].listen()
        accepted = Task(lambda: listener.accept(timeout_s=LONG_S))
        guest = fabrics[1].connect(listener.url, terms, timeout_s=SOON_S)
        send(guest, b"guest")
        assert receive(accepted.join())[2] == b"guest"
        for fabric in fabrics:
            fabric.close()


def test_accept_times_out_and_tells_of_the_refused(fabric: Fabric) -> None:
    listener = fabric.listen()
    with pytest.raises(netstack.ChannelTimeout, match="accept"):
        listener.accept(timeout_s=0.1)
    stranger = open_or_skip(fabric.scheme, b"x" * 32)
    accepting = Task(lambda: listener.accept(timeout_s=1.0))
    with pytest.raises(netstack.HandshakeError):
        stranger.connect(listener.url, Terms(outbound=SMALL, inbound=SMALL), timeout_s=SOON_S)
    with pytest.raises(netstack.ChannelTimeout, match="key"):
        accepting.join()


def test_closing_the_listener_ends_accept_but_no_channel(pair: Pair) -> None:
    accepting = Task(lambda: pair.listener.accept(timeout_s=LONG_S)).until_asleep()
    pair.listener.close()
    pair.listener.close()
    with pytest.raises(netstack.ChannelAborted):
        accepting.join(SOON_S)
    with pytest.raises(netstack.ChannelError):
        pair.fabric.connect(pair.listener.url, Terms(outbound=SMALL, inbound=SMALL), timeout_s=0.5)
    send(pair.a, b"alive")
    assert receive(pair.b)[2] == b"alive"


def test_connect_to_nobody_and_to_one_who_does_not_accept(fabric: Fabric) -> None:
    listener = fabric.listen()
    with pytest.raises(netstack.ChannelTimeout):
        fabric.connect(listener.url, Terms(outbound=SMALL, inbound=SMALL), timeout_s=0.2)
    listener.close()
    with pytest.raises(netstack.ChannelError, match=re.escape(listener.url)):
        fabric.connect(listener.url, Terms(outbound=SMALL, inbound=SMALL), timeout_s=1.0)
    with pytest.raises(ValueError, match="url"):
        fabric.connect("nowhere://x", Terms(outbound=SMALL, inbound=SMALL))


def test_an_address_in_use_is_one_clear_line(fabric: Fabric) -> None:
    listener = fabric.listen()
    address = listener.url.partition("://")[2]
    with pytest.raises(netstack.ChannelError) as error:
        fabric.listen(address)
    assert address in str(error.value)
    assert "\n" not in str(error.value)


def test_both_ends_know_the_others_name(fabric: Fabric) -> None:
    listener = fabric.listen(reception=ListenTerms(name="there"))
    accepted = Task(lambda: listener.accept(timeout_s=SOON_S))
    a = fabric.connect(listener.url, Terms(outbound=SMALL, inbound=SMALL, name="here", peer="there"), timeout_s=SOON_S)
    assert (a.peer_name, accepted.join().peer_name) == ("there", "here")
    assert "there" not in listener.url


@pytest.mark.parametrize("wanted", ["", "elsewhere"])
def test_a_listener_of_another_name_refuses_and_goes_on(fabric: Fabric, wanted: str) -> None:
    listener = fabric.listen(reception=ListenTerms(name="there"))
    accepted = Task(lambda: listener.accept(timeout_s=LONG_S))
    with pytest.raises(netstack.HandshakeError, match=f"not the peer that we want, {wanted!r}"):
        fabric.connect(listener.url, Terms(outbound=SMALL, inbound=SMALL, peer=wanted), timeout_s=SOON_S)
    a = fabric.connect(listener.url, Terms(outbound=SMALL, inbound=SMALL, peer="there"), timeout_s=SOON_S)
    send(a, b"friend")
    assert receive(accepted.join())[2] == b"friend"


def test_names_too_long_are_refused_on_both_sides(fabric: Fabric) -> None:
    listener = fabric.listen()
    for names in ({"name": "x" * 65}, {"peer": "x" * 65}):
        with pytest.raises(ValueError, match="64 bytes"):
            fabric.connect(listener.url, Terms(outbound=SMALL, inbound=SMALL, **names), timeout_s=SOON_S)
    with pytest.raises(ValueError, match="64 bytes"):
        fabric.listen(reception=ListenTerms(name="x" * 65))


def test_nobody_gets_a_larger_inbox_than_the_listener_allows(fabric: Fabric) -> None:
    """The ceiling is for both directions together."""
    listener = fabric.listen(reception=ListenTerms(inbox_bytes=8 << 20))
    large = Geometry(slots=2, slot_bytes=4 << 20)
    accepted = Task(lambda: listener.accept(timeout_s=LONG_S))
    for out, into in ((SMALL, large), (large, SMALL)):
        with pytest.raises(netstack.HandshakeError, match=r"above the listener.s ceiling"):
            fabric.connect(listener.url, Terms(outbound=out, inbound=into), timeout_s=SOON_S)
    half = Geometry(slots=4, slot_bytes=1 << 20)
    a = fabric.connect(listener.url, Terms(outbound=half, inbound=half), timeout_s=SOON_S)
    send(a, b"all that is allowed")
    assert receive(accepted.join())[2] == b"all that is allowed"


@pytest.mark.long(but=["shm", "emulate+shm?latency_ms=0.5&jitter_ms=0.5&gbps=5"])
def test_nobody_gets_more_channels_than_the_listener_allows(fabric: Fabric) -> None:
    listener = fabric.listen(reception=ListenTerms(channels=1))
    pair = connect(fabric, listener)
    accepting = Task(lambda: listener.accept(timeout_s=1.0))
    with pytest.raises(netstack.HandshakeError, match="as many channels as its ceiling allows"):
        fabric.connect(listener.url, Terms(outbound=SMALL, inbound=SMALL), timeout_s=SOON_S)
    with pytest.raises(netstack.ChannelTimeout, match="refused"):
        accepting.join()
    pair.b.close()
    pair.b = pair.a  # the last that holds the accepted end
    gc.collect()
    connect(fabric, listener)


def descriptors() -> set[tuple[str, str]]:
    """Returns the descriptors of this process: their numbers, and what each leads to."""
    links = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            links.add((fd.name, os.readlink(fd)))
    return links


@pytest.mark.no_retry
def test_a_closed_channel_holds_no_descriptor(fabric: Fabric) -> None:
    """The object is still referenced."""
    listener = fabric.listen()
    for end in (first := connect(fabric, listener)).a, first.b:  # what a process opens once is open now
        end.close()
    before = descriptors()
    pair = connect(fabric, listener)
    for end in (pair.a, pair.b):
        end.close()
    deadline = time.monotonic() + SOON_S
    while (left := descriptors() - before) and time.monotonic() < deadline:
        threading.Event().wait(0.01)  # for threads of the transport, which let go in their own time
    assert left == set()


def test_a_short_key_is_refused(fabric: Fabric) -> None:
    with pytest.raises(ValueError, match="key"):
        netstack.open(fabric.scheme, key=b"short")


def test_an_unknown_scheme_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="loopback"):
        netstack.open("carrier-pigeon", key=KEY)


STEPS = st.lists(
    st.tuples(st.sampled_from(["send", "receive", "release"]), st.integers(0, 1), st.integers(0, 64)),
    max_size=60,
)


@pytest.mark.no_retry
@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, slots=st.integers(1, 4), seed=st.integers(0, 1 << 30))
def test_random_traffic_equals_a_queue(
    transport: str, steps: list[tuple[str, int, int]], slots: int, seed: int
) -> None:
    """Against the model: per direction a queue of sent payloads, and the arrivals not yet released."""
    rng = random.Random(seed)
    with scheme_of(transport) as scheme, closing(open_or_skip(scheme, gpu=gpu_of(transport))) as fabric:
        geometry = Geometry(slots=slots, slot_bytes=64)
        pair = connect(fabric, fabric.listen(), geometry, geometry)
        ends = (pair.a, pair.b)
        sent: tuple[deque[bytes], ...] = (deque(), deque())
        held: tuple[deque[tuple[netstack.Arrival, bytes]], ...] = (deque(), deque())
        for action, side, nbytes in steps:
            other = 1 - side
            if action == "send":
                payload = rng.randbytes(nbytes)
                if len(sent[side]) + len(held[other]) == slots:
                    with pytest.raises(netstack.NoResource):
                        ends[side].reserve(nbytes)
                    continue
                slot = ends[side].reserve(nbytes, timeout_s=SOON_S)
                slot.data[:] = payload
                ends[side].put_signal(slot, payload[:TAG_BYTES])
                sent[side].append(payload)
            elif action == "receive":
                if not sent[other]:
                    with pytest.raises(netstack.ChannelTimeout):
                        ends[side].wait_signal(timeout_s=0)
                    continue
                arrival = ends[side].wait_signal(timeout_s=SOON_S)
                payload = sent[other].popleft()
                assert arrival.data == payload
                assert arrival.tag == payload[:TAG_BYTES].ljust(TAG_BYTES, b"\0")
                held[side].append((arrival, payload))
            elif held[side]:
                arrival, payload = held[side].popleft()
                assert arrival.data == payload
                ends[side].release(arrival)


class Kernels:
    """The arguments of one end's kernels, in memory that they reach: a stream, and a message's place."""

    def __init__(self, driver: Driver, channel: Channel) -> None:
        assert isinstance(channel, DeviceChannel)
        self.channel, self.side = channel, channel.hand_to_device()
        self._stream, self._memory = CudaStream(driver), Pinned(driver, 4096)
        self.view = self._memory.view  # two lengths, tag, status, note; two payloads
        self._base = self._memory.address

    def due(self, tag: bytes, *parts: bytes) -> None:
        """The message that ``send`` sends, or that ``receive`` takes: lengths and tag alone are looked at then."""
        self.view[:16] = b"".join(len(part).to_bytes(8, "little") for part in (*parts, b"")[:2])
        self.view[16:48] = tag.ljust(TAG_BYTES, b"\0")
        for part, at in zip(parts, (1024, 2048), strict=False):
            self.view[at : at + len(part)] = part

    def send(self, timeout_s: float = LONG_S, *, bulk: bool = False) -> int:
        rest = self._base, self._base + 16, int(timeout_s * 1e9), self._base + 48
        self._lane(bulk).send(self._stream.number, self._base + 1024, *rest)
        return self.status()

    def send_two(self) -> int:
        rest = self._base, self._base + 16, int(LONG_S * 1e9), self._base + 48
        self.side.send_two(self._stream.number, self._base + 1024, self._base + 2048, *rest)
        return self.status()

    def receive(self, timeout_s: float = LONG_S, *, bulk: bool = False) -> int:
        rest = self._base, self._base + 16, self._base + 64, int(timeout_s * 1e9), self._base + 48
        self._lane(bulk).receive_due(self._stream.number, self._base + 1024, *rest)
        return self.status()

    def _lane(self, bulk: bool) -> DeviceSide:
        return self.side.bulk if bulk else self.side

    def status(self) -> int:
        self._stream.synchronize()
        return int.from_bytes(self.view[48:52], "little")

    def check(self) -> None:
        self.side.check(self.status())

    def close(self) -> None:
        self._stream.close()
        self._memory.close()


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["whole", "by parts"])
def by_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every message go as a long one does, or not."""
    if request.param:
        monkeypatch.setattr(calls, "LONG_BYTES", 0)


@pytest.fixture(params=FOR_KERNELS)
def kernels(request: pytest.FixtureRequest, by_parts: None) -> Iterator[tuple[Kernels, Kernels]]:
    """The kernels of both ends of a channel whose slots and epoch wrap soon."""
    with scheme_of(request.param) as scheme:
        fabric = open_or_skip(scheme, gpu=gpu_of(request.param))
        pair, driver = connect(fabric, fabric.listen(), epoch=65535, kernels=True), Driver()
        ends = Kernels(driver, pair.a), Kernels(driver, pair.b)
        yield ends
        fabric.close()
        for end in ends:
            end.close()
        driver.close()


@pytest.mark.no_retry
def test_kernels_move_messages_both_ways_over_many_laps(kernels: tuple[Kernels, Kernels]) -> None:
    """Messages have one run of bytes or two, of any length; a ring's slots, and 8 and 16 bits of counters,
    come round.
    """
    rng = random.Random(1)
    payloads = [rng.randbytes(n * 13 % (SMALL.slot_bytes + 1)) for n in range(300)]

    def talk(mine: Kernels, first: bool) -> None:
        for n, payload in enumerate(payloads):
            for sends in (first, not first):
                mine.due(n.to_bytes(8, "little"), payload)
                if not sends:
                    assert mine.receive() == 0
                    assert mine.view[1024 : 1024 + len(payload)] == payload
                elif n % 2:
                    mine.due(n.to_bytes(8, "little"), payload[: n % 9], payload[n % 9 :])
                    assert mine.send_two() == 0
                else:
                    assert mine.send() == 0
        mine.check()

    a, b = kernels
    other = Task(lambda: talk(b, False))
    talk(a, True)
    other.join()


def test_kernels_that_send_wait_for_a_free_slot(kernels: tuple[Kernels, Kernels]) -> None:
    a, b = kernels
    for n in range(SMALL.slots):
        a.due(bytes([n]), b"x" * n)
        assert a.send() == 0
    a.due(bytes([SMALL.slots]), b"x" * SMALL.slots)
    waits = Task(a.send).until_asleep()
    for n in range(SMALL.slots + 1):
        b.due(bytes([n]), b"x" * n)
        assert b.receive() == 0
    assert waits.join() == 0
    for end in kernels:
        end.check()


@pytest.mark.parametrize("wrong", ["tag", "longer", "shorter"])
def test_kernels_take_no_message_but_the_one_that_is_due(wrong: str, kernels: tuple[Kernels, Kernels]) -> None:
    a, b = kernels
    came = b"x" * (9 + (wrong == "longer") - (wrong == "shorter"))
    for payload, tag in ((came, b"new!" if wrong == "tag" else b"due!"), (b"y" * 9, b"due!")):
        a.due(tag, payload)
        a.send()
    b.due(b"due!", bytes(9))
    b.receive()
    b.receive()
    assert bytes(b.view[1024:1040]) == bytes(16), "nor what comes behind it"
    note = len(came).to_bytes(8, "little") + (b"new!" if wrong == "tag" else b"due!")
    assert bytes(b.view[64:76]) == note
    with pytest.raises(netstack.ChannelError):
        b.check()


@pytest.mark.parametrize("call", ["send", "receive"])
@pytest.mark.parametrize("end", ["peer aborts", "peer closes", "we abort", "time"])
def test_what_kernels_wait_for_ends_with_the_peer_and_in_time(
    end: str, call: str, kernels: tuple[Kernels, Kernels]
) -> None:
    a, b = kernels
    b.due(b"", b"x")
    for _ in range(SMALL.slots if call == "send" else 0):
        assert b.send() == 0
    waits = Task(lambda: getattr(b, call)(0.1 if end == "time" else LONG_S)).until_asleep()
    if end == "peer aborts":
        a.channel.abort("no more heads")
    elif end == "peer closes":
        a.channel.close()
    elif end == "we abort":
        b.channel.abort("enough")
    waits.join(SOON_S)
    error = {"time": netstack.ChannelTimeout, "we abort": netstack.ChannelAborted}.get(end, netstack.PeerFault)
    text = {"time": "within its time", "peer aborts": "no more heads", "we abort": "this side"}.get(end, "closed")
    with pytest.raises(error, match=f"://.*{text}"):
        b.check()


def test_kernels_that_come_behind_a_failure_do_nothing(kernels: tuple[Kernels, Kernels]) -> None:
    a, b = kernels
    b.due(b"", bytes(4))
    b.receive(0.05)
    a.due(b"", b"late")
    assert a.send() == 0
    b.receive()
    assert b.view[1024:1028] == bytes(4)
    with pytest.raises(netstack.ChannelTimeout):
        b.check()


def test_what_came_before_the_end_is_received_by_kernels(kernels: tuple[Kernels, Kernels]) -> None:
    a, b = kernels
    a.due(b"", b"last words")
    assert a.send() == 0
    a.channel.abort("that was all")
    b.due(b"", bytes(10))
    b.receive()
    assert b.view[1024:1034] in (b"last words", bytes(10)), "all or nothing"


def test_what_a_failed_kernel_should_have_sent_does_not_come(kernels: tuple[Kernels, Kernels]) -> None:
    a, b = kernels
    a.due(b"", b"x" * (SMALL.slot_bytes + 1))
    assert a.send() != 0
    b.due(b"", bytes(1))
    assert b.receive(0.1) != 0
    a.channel.abort("too long")
    with pytest.raises(netstack.PeerFault, match="too long"):
        b.check()
    with pytest.raises(netstack.ChannelError):
        a.check()


@pytest.mark.no_retry
def test_messages_of_both_lanes_are_in_order_over_many_laps(kernels: tuple[Kernels, Kernels]) -> None:
    """Both ends name the same lane for a message, and so it does not matter whether there are two; calls go on then."""
    a, b = kernels
    rng = random.Random(2)
    messages = [(rng.random() < 0.5, rng.randbytes(n * 13 % (SMALL.slot_bytes + 1))) for n in range(200)]

    def receive_all() -> None:
        for n, (bulk, payload) in enumerate(messages):
            b.due(n.to_bytes(8, "little"), payload)
            assert b.receive(bulk=bulk) == 0
            assert b.view[1024 : 1024 + len(payload)] == payload

    receiver = Task(receive_all)
    for n, (bulk, payload) in enumerate(messages):
        a.due(n.to_bytes(8, "little"), payload)
        assert a.send(bulk=bulk) == 0
    receiver.join()
    for end in kernels:
        end.check()
        end.channel.take_from_device()
    for n in range(2 * SMALL.slots):
        send(a.channel, b"%d" % n)
        assert receive(b.channel)[2] == b"%d" % n


def test_no_message_waits_for_bulk(kernels: tuple[Kernels, Kernels]) -> None:
    """Bulk messages may be left unread by this peer, or by others; and all of them come."""
    a, b = kernels
    if a.side.bulk is a.side:
        pytest.skip("its messages share no queue of a NIC: one lane")

    def hear_of_free_slots() -> None:
        for end in kernels:
            end.due(b"", b"back")
        assert b.send() == 0
        assert a.receive() == 0

    for held in (True, False):
        hear_of_free_slots()
        for n in range(SMALL.slots):
            a.due(bytes([n]), b"held%d" % n)
            assert a.send(bulk=held) == 0
        for n in range(5 * SMALL.slots):
            for end in kernels:
                end.due(bytes([n]), b"goes")
            assert a.send(bulk=not held) == 0
            assert b.receive(bulk=not held) == 0
        for n in range(SMALL.slots):
            b.due(bytes([n]), b"held%d" % n)
            assert b.receive(bulk=held) == 0
            assert b.view[1024:1029] == b"held%d" % n
    hear_of_free_slots()
    for n in range(SMALL.slots):
        a.due(bytes([n]), b"full")
        assert a.send(bulk=True) == 0
    assert a.send(0.05, bulk=True) != 0
    with pytest.raises(netstack.ChannelTimeout):
        a.check()


@pytest.mark.parametrize("end", ["peer aborts", "peer closes", "we abort"])
def test_what_waits_for_bulk_ends_with_the_peer(end: str, kernels: tuple[Kernels, Kernels]) -> None:
    a, b = kernels
    b.due(b"", b"x")
    waits = Task(lambda: b.receive(bulk=True)).until_asleep()
    if end == "peer aborts":
        a.channel.abort("no more heads")
    elif end == "peer closes":
        a.channel.close()
    else:
        b.channel.abort("enough")
    waits.join(SOON_S)
    error = netstack.ChannelAborted if end == "we abort" else netstack.PeerFault
    with pytest.raises(error):
        b.check()


def test_calls_go_on_where_kernels_ended(kernels: tuple[Kernels, Kernels]) -> None:
    a, b = kernels
    for n in range(SMALL.slots + 1):
        for end in kernels:
            end.due(bytes([n]), b"kernel")
        assert a.send() == 0
        assert b.receive() == 0
    for end in kernels:
        end.channel.take_from_device()
    for n in range(2 * SMALL.slots):
        send(a.channel, b"%d" % n)
        assert receive(b.channel)[2] == b"%d" % n


@pytest.mark.parametrize("transport", FOR_KERNELS)
def test_a_fabric_is_closed_at_once_whichever_peers_its_kernels_wait_for(transport: str) -> None:
    """To close one channel waits for kernels of the others too."""
    with scheme_of(transport) as scheme:
        near, far = (open_or_skip(scheme, gpu=gpu_of(transport)) for _ in range(2))
        driver = Driver()
        pairs = [connect(near, far.listen(), kernels=True) for _ in range(3)]  # kept: a peer that is dropped ends waits
        ends = [Kernels(driver, pair.a) for pair in pairs]
        for end in ends:
            end.due(b"", b"x")
        waits = [Task(end.receive).until_asleep() for end in ends]
        Task(near.close).join(SOON_S)
        for wait, end in zip(waits, ends, strict=True):
            wait.join(SOON_S)
            with pytest.raises(netstack.ChannelAborted):
                end.check()
        far.close()
        for end in ends:
            end.close()
        driver.close()
