"""Transfers between two workers: what comes, what is dropped, and how both ends give up."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import pytest
import torch

from lamina import netstack
from lamina.netstack import Channel, ChannelError, Fabric, Terms
from lamina.netstack.checksum import checksum
from lamina.protocol.control import TransferPeer
from lamina.protocol.step_plan import ProtocolError
from lamina.workers.device_selection import CPU
from lamina.workers.epoch_channels import EpochFabric
from lamina.workers.memory.kv_transfer import transfer_link
from lamina.workers.memory.kv_transfer.peer_links import PeerLinks
from lamina.workers.memory.kv_transfer.transfer import Transfer, TransferError, TransferPart, TransferRefusedError
from lamina.workers.memory.kv_transfer.transfer_link import (
    MessageType,
    TransferLink,
    copy_here,
    inbox,
    pack_header,
    parts_from,
    parts_into,
)
from lamina.workers.runtime import Runtime
from lamina.workers.staging import open_staging

SOON_S, SILENCE_S = 30.0, 20.0
DATA = bytes(range(256)) * 64
Answer = Callable[[bytes], Iterable[TransferPart]]


class Ends(NamedTuple):
    """A link, and the raw channel of its peer."""

    link: TransferLink
    peer: Channel
    clock: list[float]

    def put(self, message: int, index: int, number: int, data: bytes, said: bytes | None = None) -> None:
        slot = self.peer.reserve(len(data), timeout_s=SOON_S)
        slot.data[:] = data
        self.peer.put_signal(slot, pack_header(message, index, number, checksum(data) if said is None else said))


@contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    fabric = netstack.open("loopback", key=b"k" * 32)
    listener, came = fabric.listen(), queue.SimpleQueue[Channel]()
    terms = Terms(outbound=inbox(), inbound=inbox())
    knock = threading.Thread(target=lambda: came.put(fabric.connect(listener.url, terms)))
    knock.start()
    one, other = listener.accept(timeout_s=SOON_S), came.get(timeout=SOON_S)
    knock.join(SOON_S)
    yield one, other
    fabric.close()


@pytest.fixture
def linked() -> Iterator[Callable[..., TransferLink]]:
    """Makes links, which end with the test."""
    made = list[TransferLink]()

    def link(*args: Any, **named: Any) -> TransferLink:
        made.append(TransferLink(*args, **named))
        return made[-1]

    yield link
    for each in made:
        each.give_up("the test is over")
        each.stop()
        each.join()


Linked = Callable[..., TransferLink]


@contextmanager
def ends(answer: Answer | None = None) -> Iterator[Ends]:
    now = [time.monotonic()]
    with channels() as (own, peer):
        link = TransferLink("peer", SILENCE_S, CPU, answer, Runtime(clock=lambda: now[0]))
        link.serve(own)
        yield Ends(link, peer, now)
        own.abort("the test is over")
        link.stop()
        link.join()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(transfer_link, "POLL_S", 0.005)
    with ends() as found:
        yield found


def parts(data: bytes, size: int = 5000) -> list[TransferPart]:
    """One for each layer."""
    return [
        TransferPart(len(some), lambda message, staging, some=some: message.__setitem__(slice(None), some), layer)
        for layer, some in enumerate(data[low : low + size] for low in range(0, len(data), size))
    ]


def into(data: bytearray, size: int = 5000) -> list[TransferPart]:
    views = [memoryview(data)[low : low + size] for low in range(0, len(data), size)]
    return [
        TransferPart(len(view), lambda message, staging, view=view: view.__setitem__(slice(None), message), layer)
        for layer, view in enumerate(views)
    ]


def test_transfers_of_both_directions_bring_what_was_sent(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of expecting, more parts than the channel holds."""
    monkeypatch.setattr(transfer_link, "PART_BYTES", 100)
    with channels() as (one, other):
        links = [linked(name, SILENCE_S) for name in ("other", "one")]
        for link, channel in zip(links, (one, other), strict=True):
            link.serve(channel)
        for number in (1, 2):
            for link in links:
                link.send(Transfer(number, parts_from(DATA * number)))
        for number in (1, 2):
            for link in links:
                data = bytearray(len(DATA) * number)
                link.wait(link.expect(Transfer(number, parts_into(data), SILENCE_S)))
                assert data == DATA * number


def test_a_consumer_begins_with_a_layer_before_the_rest_is_there(pair: Ends) -> None:
    data = bytearray(10000)
    transfer = pair.link.expect(Transfer(3, into(data), SILENCE_S))
    pair.put(MessageType.PART, 0, 3, DATA[:5000])
    pair.link.wait(transfer, 0)
    assert data == DATA[:5000] + bytes(5000)
    assert not transfer.has_layer(1)
    pair.put(MessageType.PART, 1, 3, DATA[5000:10000])
    pair.link.wait(transfer)
    assert (data, transfer.nbytes) == (DATA[:10000], 10000)


def test_nothing_of_a_cancelled_transfer_is_copied(pair: Ends) -> None:
    first, second = bytearray(5000), bytearray(5000)
    pair.link.expect(Transfer(1, into(first)))
    assert pair.link.cancel(1)
    assert not pair.link.cancel(1)
    pair.put(MessageType.PART, 0, 1, DATA[:5000])
    pair.put(MessageType.PART, 0, 2, DATA[:5000])
    pair.link.wait(pair.link.expect(Transfer(2, into(second))))
    assert (first, second) == (bytes(5000), DATA[:5000])


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ((MessageType.PART, 0, 5, DATA[:5000], bytes(16)), "part 0 of transfer 5 is damaged"),
        ((MessageType.PART, 1, 5, DATA[:5000]), "part 1 of transfer 5 with 5000 bytes, not part 0 of 5000"),
        ((MessageType.PART, 0, 5, DATA[:4992]), "part 0 of transfer 5 with 4992 bytes, not part 0 of 5000"),
        ((MessageType.REQUEST, 0, 5, b""), "part 0 of transfer 5 is a message of type 2"),
        ((7, 0, 5, DATA[:5000]), "part 0 of transfer 5 is a message of type 7"),
    ],
)
def test_a_lie_ends_the_channel_and_names_the_peer_and_the_transfer(
    lie: tuple[int, int, int, bytes], error: str, pair: Ends
) -> None:
    data, ended = bytearray(5000), queue.SimpleQueue[Transfer]()
    transfer = pair.link.expect(Transfer(5, into(data), on_end=ended.put))
    pair.put(*lie)
    assert ended.get(timeout=SOON_S) is transfer
    with pytest.raises(TransferError) as failure:
        pair.link.wait(transfer)
    assert str(failure.value) == f"{error} (transfer 5 of peer)"
    assert not any(data)
    with pytest.raises(ChannelError):
        pair.peer.wait_signal(timeout_s=SOON_S)
    late = pair.link.expect(Transfer(6, into(data), on_end=ended.put))
    assert ended.get(timeout=SOON_S) is late, "nobody waits for what cannot come"
    assert late.error is not None


def test_an_error_without_words_ends_the_channel_too(pair: Ends) -> None:
    def fails(data: memoryview, staging: Any) -> None:
        raise MemoryError

    ended = queue.SimpleQueue[Transfer]()
    first = pair.link.expect(Transfer(5, [TransferPart(5000, fails)], on_end=ended.put))
    pair.put(MessageType.PART, 0, 5, DATA[:5000])
    assert ended.get(timeout=SOON_S) is first
    late = pair.link.expect(Transfer(6, into(bytearray(5000)), on_end=ended.put))
    assert ended.get(timeout=SOON_S) is late, "nobody waits for what cannot come"
    assert str(late.error) == "MemoryError (transfer 6 of peer)"


def test_a_silent_peer_is_waited_for_no_longer_than_a_limit(pair: Ends) -> None:
    transfer = pair.link.expect(Transfer(5, into(bytearray(10000)), SILENCE_S))
    pair.clock[0] += SILENCE_S - 1
    pair.put(MessageType.PART, 0, 5, DATA[:5000])
    pair.link.wait(transfer, 0)
    pair.clock[0] += SILENCE_S
    assert transfer.error is None, "not before the limit"
    pair.clock[0] += 1
    with pytest.raises(TransferError, match=r"^nothing has come for 20 s \(transfer 5 of peer\)$"):
        pair.link.wait(transfer)
    with pytest.raises(ChannelError):  # so it cannot come late
        pair.peer.wait_signal(timeout_s=SOON_S)


def test_who_waits_does_not_rely_on_the_threads_of_the_link(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """None receives before the channel is there, which a peer that is to send by itself may never open."""
    monkeypatch.setattr(transfer_link, "POLL_S", 0.005)
    link = linked("peer", SILENCE_S, connect_s=0.01)
    transfer = link.expect(Transfer(5, into(bytearray(10)), 0.05))
    with pytest.raises(TransferError, match=r"^no part was copied for 0.05 s \(transfer 5 of peer\)$"):
        link.wait(transfer)
    assert link.lost == "no part was copied for 0.05 s"


def test_a_peer_that_has_nothing_to_send_may_be_silent(pair: Ends) -> None:
    pair.clock[0] += 1e6
    data = bytearray(5000)
    pair.put(MessageType.PART, 0, 5, DATA[:5000])
    pair.link.wait(pair.link.expect(Transfer(5, into(data), SILENCE_S)))
    assert data == DATA[:5000]


def test_a_transfer_that_nobody_expects_ends_the_channel(linked: Linked) -> None:
    with channels() as (own, peer):
        link = linked("peer", 0.01)
        link.serve(own)
        Ends(link, peer, []).put(MessageType.PART, 0, 5, b"x")
        with pytest.raises(ChannelError, match="part 0 of transfer 5 came, and is not expected"):
            peer.wait_signal(timeout_s=SOON_S)


def test_who_receives_nothing_is_sent_no_more(linked: Linked) -> None:
    with channels() as (own, peer):
        link, ended = linked("peer", 0.01), queue.SimpleQueue[Transfer]()
        link.serve(own)
        link.send(Transfer(5, parts(DATA * 10, 1000), on_end=ended.put))
        error = ended.get(timeout=SOON_S).error
        assert "(transfer 5 of peer)" in str(error)
        for _ in range(transfer_link.SLOTS):
            peer.release(peer.wait_signal(timeout_s=SOON_S))
        with pytest.raises(ChannelError):
            peer.wait_signal(timeout_s=SOON_S)


def test_what_is_sent_in_full_has_not_failed_where_the_peer_closes_at_once(linked: Linked) -> None:
    """It has all that it wants, and the end of the channel is noticed before the end of the transfer."""
    lost, sent = queue.SimpleQueue[Transfer](), queue.SimpleQueue[Transfer]()

    class Closed:
        def __init__(self, own: Channel, peer: Channel) -> None:
            self._own, self._peer = own, peer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._own, name)

        def put_signal(self, *said: Any) -> None:
            self._own.put_signal(*said)
            self._peer.close()
            lost.get(timeout=SOON_S)

    with channels() as (own, peer):
        link = linked("peer", SILENCE_S)
        link.serve(Closed(own, peer))
        link.expect(Transfer(1, parts(DATA), on_end=lost.put))
        link.send(Transfer(2, parts(DATA, len(DATA)), on_end=sent.put))
        assert sent.get(timeout=SOON_S).error is None


def test_a_link_that_was_given_up_keeps_no_requests(linked: Linked) -> None:
    """No thread would take them, so each would stay until the epoch ends."""
    jobs = queue.SimpleQueue[Any]()
    with channels() as (own, _):
        link = linked("peer", SILENCE_S, around=Runtime(queue=lambda: jobs))
        link.serve(own)
        link.give_up("the cable is cut")
        for number in range(3):
            link.request(number, b"?")
            transfer = link.expect(Transfer(number, into(bytearray(10))))
            assert str(transfer.error) == f"the cable is cut (transfer {number} of peer)"
        assert jobs.empty()


def test_a_transfer_whose_link_is_given_up_before_it_is_sent_fails(linked: Linked) -> None:
    """It is under way by then, and the thread that would send it was not started."""
    ended = queue.SimpleQueue[Transfer]()

    class Condition(threading.Condition):
        def notify_all(self) -> None:
            super().notify_all()
            if begins:
                begins.clear()
                link.give_up("the cable is cut")

    begins = list[bool]()
    link = linked("peer", SILENCE_S, around=Runtime(condition=Condition))
    begins.append(True)
    link.send(Transfer(5, parts(DATA), on_end=ended.put))
    assert str(ended.get(timeout=SOON_S).error) == "the cable is cut (transfer 5 of peer)"
    assert ended.empty()


def test_a_transfer_to_a_peer_that_never_connects_fails(linked: Linked) -> None:
    link, ended = linked("peer", SILENCE_S, connect_s=0.01), queue.SimpleQueue[Transfer]()
    link.send(Transfer(5, parts(DATA), on_end=ended.put))
    assert str(ended.get(timeout=SOON_S).error) == "peer is not there (transfer 5 of peer)"


def test_a_transfer_from_a_device_that_cannot_be_used_fails(linked: Linked) -> None:
    link, ended = linked("peer", SILENCE_S, torch.device("meta")), queue.SimpleQueue[Transfer]()
    link.send(Transfer(5, parts(DATA), on_end=ended.put))
    assert str(ended.get(timeout=SOON_S).error) == "'meta' (transfer 5 of peer)"


def test_a_transfer_from_a_peer_that_cannot_be_connected_to_fails() -> None:
    """Also where it is not the network that fails."""

    class NoFiles:
        def connect(self, *terms: object, **named: object) -> Channel:
            raise OSError("too many open files")

    fabric, ended = EpochFabric(1, cast("Fabric", NoFiles())), queue.SimpleQueue[Transfer]()
    links = PeerLinks(fabric, [TransferPeer("own", is_receiver=True), TransferPeer("peer", connects=True)])
    links.open(SILENCE_S)
    links.by_number[1].expect(Transfer(5, into(bytearray(10)), on_end=ended.put))
    assert str(ended.get(timeout=SOON_S).error) == "too many open files (transfer 5 of peer)"
    links.stop()


def test_what_is_requested_comes_or_is_refused_and_the_next_one_comes(linked: Linked) -> None:
    def answer(wanted: bytes) -> Iterator[TransferPart]:
        if wanted == b"nothing":
            raise TransferRefusedError("it is gone")
        yield from parts(DATA)

    with channels() as (one, other):
        asks, answers = linked("other", SILENCE_S), linked("one", SILENCE_S, answer=answer)
        asks.serve(one)
        answers.serve(other)
        for number, wanted in enumerate((b"all", b"nothing", b"all")):
            asks.request(number, wanted)
            data = bytearray(len(DATA))
            transfer = asks.expect(Transfer(number, into(data), SILENCE_S))
            if wanted == b"all":
                asks.wait(transfer)
                assert data == DATA
            else:
                with pytest.raises(TransferRefusedError, match=r"^it is gone \(transfer 1 of other\)$"):
                    asks.wait(transfer)


def test_an_invalid_request_ends_the_channel() -> None:
    def answer(wanted: bytes) -> Iterator[TransferPart]:
        raise ProtocolError("that is no request")

    with ends(answer) as pair:
        pair.put(MessageType.REQUEST, 0, 1, b"?")
        with pytest.raises(ChannelError, match="that is no request"):
            pair.peer.wait_signal(timeout_s=SOON_S)


def test_who_requests_more_than_is_replied_to_is_cut_off() -> None:
    """Else its requests would fill the memory while the first reply takes its time."""
    replies = threading.Event()

    def answer(wanted: bytes) -> Iterator[TransferPart]:
        replies.wait(SOON_S)
        yield from parts(DATA)

    def request_all(pair: Ends) -> None:
        for number in range(100):
            pair.put(MessageType.REQUEST, 0, number, b"?")

    with ends(answer) as pair:
        try:
            with pytest.raises(ChannelError, match="17 requests at a time, and 16 may wait for replies"):
                request_all(pair)
        finally:
            replies.set()


def test_a_request_that_was_replied_to_makes_room_for_the_next_one(linked: Linked) -> None:
    with channels() as (one, other):
        asks, answers = linked("other", SILENCE_S), linked("one", SILENCE_S, answer=parts)
        asks.serve(one)
        answers.serve(other)
        for number in range(3 * transfer_link.MAX_REQUESTS):
            data = bytearray(5)
            asks.request(number, b"hello")
            asks.wait(asks.expect(Transfer(number, into(data), SILENCE_S)))
            assert data == b"hello"


def test_nothing_begins_after_a_stop(pair: Ends) -> None:
    data, ended = bytearray(5000), list[Transfer]()
    pair.link.stop()
    transfer = pair.link.expect(Transfer(1, into(data), on_end=ended.append))
    for _ in range(transfer_link.SLOTS + 1):  # the last one has room once the first one was received
        pair.put(MessageType.PART, 0, 1, DATA[:5000])
    assert not any(data)
    with pytest.raises(TransferError, match=r"^the epoch is over \(transfer 1 of peer\)$"):
        pair.link.wait(transfer)
    assert not ended


def test_a_channel_that_comes_after_a_stop_is_aborted(linked: Linked) -> None:
    with channels() as (own, peer):
        link = linked("peer", SILENCE_S)
        link.stop()
        link.serve(own)
        with pytest.raises(ChannelError, match="peer connects late, or again"):
            peer.wait_signal(timeout_s=SOON_S)


def test_a_local_copy_is_a_transfer_without_a_peer() -> None:
    data = bytearray(len(DATA))
    copy_here(parts(DATA), into(data), open_staging(CPU))
    assert data == DATA
