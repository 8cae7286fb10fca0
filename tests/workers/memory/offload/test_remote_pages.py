"""Pages that come from the memory workers of other hosts: what they have, and what becomes of lies, losses and ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import msgspec
import pytest

from lamina import netstack
from lamina.kv.pages import PAGE, Page, PageFragment, Provenance
from lamina.kv.storage import FragmentLostError, StorageConfig, StorageError
from lamina.kv.storage.host import HostStorage
from lamina.netstack import Channel, ChannelError, Geometry, ListenTerms, Terms
from lamina.netstack.checksum import checksum
from lamina.protocol.control import Address
from lamina.utils.background_thread import LowPriorityCall
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.offload import remote_pages as peers_module
from lamina.workers.memory.offload.remote_pages import PART_BYTES, PageReplyKind, PageRequest, RemotePages
from lamina.workers.memory.worker_counters import Counters

VIEW, WAIT_S = 3, 30.0
NAMES = "one", "other"
ATOMS = {PageFragment(layer, head): bytes([layer * 16 + head]) * 5000 for layer in range(2) for head in range(2)}
SHARE = frozenset(ATOMS)


def page(number: int) -> Page:
    return Page(bytes([number]) * 32, number, PAGE, b"t" * 16, Provenance("prompt"))


def filled(
    worker: RemotePages, number: int, fragments: Mapping[PageFragment, bytes] = ATOMS
) -> dict[PageFragment, bytes]:
    into = {fragment: bytearray(len(data)) for fragment, data in fragments.items()}
    worker.read(page(number).key, into)
    return {fragment: bytes(data) for fragment, data in into.items()}


@dataclass
class Hosts:
    """Two workers, each with a medium of its own, that have met under one epoch. One thread serves both."""

    fabric: netstack.Fabric
    doors: list[EpochListener]
    workers: list[RemotePages]
    media: list[HostStorage]
    meters: list[Counters]


@pytest.fixture
def pair() -> Iterator[Hosts]:
    """Who answers nobody yet."""
    fabric = netstack.open("loopback", key=b"k" * 32)
    doors = [EpochListener(fabric.listen("", ListenTerms(name=name))) for name in NAMES]
    addresses = [Address(door.url, name) for door, name in zip(doors, NAMES, strict=True)]
    views, meters = [EpochFabric(VIEW, fabric) for _ in doors], [Counters() for _ in doors]
    workers = [RemotePages(v, v.listener_for(d), addresses, m) for v, d, m in zip(views, doors, meters, strict=True)]
    media = [HostStorage(StorageConfig(1 << 24)) for _ in doors]
    for worker in workers:
        while worker.num_missing:
            assert worker.accept(WAIT_S) is None
    yield Hosts(fabric, doors, workers, media, meters)
    for worker, view in zip(workers, views, strict=True):
        worker.stop()
        view.close()
    fabric.close()
    for thread in threading.enumerate():
        if thread.name in ("lamina-answer", "lamina-peers"):
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def hosts(pair: Hosts) -> Hosts:
    for worker, medium in zip(pair.workers, pair.media, strict=True):
        worker.serve(medium)
    return pair


def test_what_is_not_here_comes_from_where_it_is(hosts: Hosts) -> None:
    """Whole pages of what a worker needs, and no others; a large one in several messages."""
    large = {fragment: data * 150 for fragment, data in ATOMS.items()}
    assert sum(map(len, large.values())) > 2 * PART_BYTES
    some = dict(list(ATOMS.items())[:3])
    for number, fragments in enumerate((ATOMS, large, some)):
        hosts.media[1].write(page(number), fragments)
    hosts.media[0].write(page(5), ATOMS)
    one, other = hosts.workers
    assert one.set_locations(SHARE) == [page(0).key, page(1).key]
    own = [page(5).key, page(1).key]
    assert one.set_locations(SHARE, own) == [page(0).key, *own], (
        "what is here stands behind what is not, and is used first"
    )
    assert other.set_locations(frozenset(some)) == [page(5).key]
    assert filled(one, 0) == ATOMS
    assert filled(one, 1, large) == large
    assert filled(one, 5) == ATOMS
    assert filled(other, 5, some) == some
    assert hosts.meters[0].snapshot()["kv_peer_bytes"] == sum(map(len, [*ATOMS.values(), *large.values()]))
    with pytest.raises(FragmentLostError):
        filled(one, 2)
    with pytest.raises(FragmentLostError):
        filled(one, 7)


def test_who_opens_its_store_late_is_waited_for(monkeypatch: pytest.MonkeyPatch, pair: Hosts) -> None:
    """Longer than for any other answer: its pages count for the whole epoch."""
    monkeypatch.setattr(peers_module, "ANSWER_S", 0.0)
    (one, other), (here, there) = pair.workers, pair.media
    there.write(page(0), ATOMS)
    one.serve(here)
    learning = LowPriorityCall(lambda: one.set_locations(SHARE), "lamina-learn")
    with pytest.raises(TimeoutError):
        learning.result(0.2)
    monkeypatch.setattr(peers_module, "ANSWER_S", WAIT_S)
    other.serve(there)
    assert learning.result(WAIT_S) == [page(0).key]


def test_who_does_not_come_for_pages_is_waited_for_no_longer_than_a_limit() -> None:
    """Nobody listens at its address: so it is no source either. Whoever comes late, or again, is none that binds."""
    now = [0.0]
    with closing(netstack.open("loopback", key=b"k" * 32)) as fabric:
        door = EpochListener(fabric.listen("", ListenTerms(name="one")))
        addresses = [Address(door.url, "one"), Address("loopback://nowhere", "other")]
        view = EpochFabric(VIEW, fabric)
        worker = RemotePages(view, view.listener_for(door), addresses, Counters(), lambda: now[0])
        now[0] = 2 * peers_module.ACCEPT_TIMEOUT_S
        assert worker.num_missing == 1, "its store may take long to be there, and nobody is taken meanwhile"
        worker.serve(HostStorage(StorageConfig(1 << 20)))
        now[0] += peers_module.ACCEPT_TIMEOUT_S
        assert worker.num_missing == 1
        now[0] += 0.1
        assert worker.num_missing == 0
        assert worker.set_locations(SHARE, [page(1).key]) == [page(1).key]
        geometry = Geometry(slots=2, slot_bytes=64)
        terms = Terms(outbound=geometry, inbound=geometry, epoch=VIEW, name="other", peer="one")
        for _ in range(2):
            knock = LowPriorityCall(lambda: fabric.connect(door.url, terms), "lamina-knock")
            assert worker.accept(WAIT_S) is None
            knock.result(WAIT_S).close()
        worker.stop()
        view.close()


def test_of_workers_that_are_not_reached_in_time_no_page_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come, and take nobody."""
    monkeypatch.setattr(peers_module, "CONNECT_S", 0.2)
    with closing(netstack.open("loopback", key=b"k" * 32)) as fabric:
        door, silent = (
            EpochListener(fabric.listen("", ListenTerms(name="one"))),
            fabric.listen("", ListenTerms(name="other")),
        )
        view, addresses = EpochFabric(VIEW, fabric), [Address(door.url, "one"), Address(silent.url, "other")]
        worker = RemotePages(view, view.listener_for(door), addresses, Counters())
        assert worker.set_locations(SHARE, [page(1).key]) == [page(1).key]
        worker.stop()
        view.close()


def test_what_has_given_way_there_is_lost_and_nothing_else(hosts: Hosts) -> None:
    one, _ = hosts.workers
    for number in range(2):
        hosts.media[1].write(page(number), ATOMS)
    assert len(one.set_locations(SHARE)) == 2
    hosts.media[1].delete([page(0).key])
    with pytest.raises(FragmentLostError):
        filled(one, 0)
    assert filled(one, 1) == ATOMS
    hosts.media[1].close()
    with pytest.raises(FragmentLostError):
        filled(one, 1)


def test_others_than_those_who_ask_come_as_ever(hosts: Hosts) -> None:
    geometry = Geometry(slots=2, slot_bytes=64)
    terms = Terms(outbound=geometry, inbound=geometry, epoch=VIEW, name="compute-0", peer=NAMES[0])
    came = list[Channel]()
    knock = threading.Thread(target=lambda: came.append(hosts.fabric.connect(hosts.doors[0].url, terms)))
    knock.start()
    channel = hosts.workers[0].accept(WAIT_S)
    knock.join(WAIT_S)
    assert channel is not None
    assert channel.peer_name == "compute-0"
    for each in (channel, *came):
        each.close()


def test_nobody_is_waited_for_once_the_view_is_over(hosts: Hosts) -> None:
    hosts.media[1].write(page(0), ATOMS)
    assert hosts.workers[0].set_locations(SHARE)
    hosts.workers[1].stop()
    with pytest.raises(FragmentLostError, match="other"):
        filled(hosts.workers[0], 0)
    with pytest.raises(FragmentLostError, match="no such fragment"):
        filled(hosts.workers[0], 0)


def lying() -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Tags and bytes of answers to an ask for ATOMS."""
    data = b"".join(ATOMS.values())
    good = peers_module._TAG.pack(PageReplyKind.PART, checksum(data))
    empty = peers_module._TAG.pack(PageReplyKind.PART, checksum(b""))
    yield [good], [data[:-1] + b"x"]
    yield [peers_module._TAG.pack(PageReplyKind.PART, checksum(data * 2))], [data * 2]
    yield [peers_module._TAG.pack(PageReplyKind.PART, checksum(data[:9])), empty], [data[:9], b""]
    yield [peers_module._TAG.pack(7, checksum(data))], [data]
    yield [peers_module._TAG.pack(PageReplyKind.MISSING, checksum(data))], [data]


@pytest.mark.parametrize(("tags", "parts"), list(lying()))
def test_an_answer_that_is_none_is_an_error_and_so_are_all_behind_it(tags: list[bytes], parts: list[bytes]) -> None:
    with closing(netstack.open("loopback", key=b"k" * 32)) as fabric:
        asked, channel = talking(fabric)
        for tag, part in zip(tags, parts, strict=True):
            slot = channel.reserve(len(part))
            slot.data[:] = part
            channel.put_signal(slot, tag)
        for _ in range(2):
            with pytest.raises(StorageError) as error:
                asked.page(page(0).key, {fragment: bytearray(len(data)) for fragment, data in ATOMS.items()})
            assert not isinstance(error.value, FragmentLostError)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xc1",
        *map(
            msgspec.msgpack.encode,
            [
                PageRequest(b"k", [PageFragment(0, 0)]),
                PageRequest(b"", []),
                PageRequest(page(0).key, [PageFragment(0, 0)] * 2),
            ],
        ),
    ],
)
def test_who_asks_for_what_nobody_has_is_not_heard_any_more(said: bytes) -> None:
    with closing(netstack.open("loopback", key=b"k" * 32)) as fabric:
        asked, channel = talking(fabric)
        answers = peers_module._PageServer(channel, HostStorage(StorageConfig(1 << 20)))
        slot = asked._channel.reserve(len(said))
        slot.data[:] = said
        asked._channel.put_signal(slot, b"")
        answers.run()
        with pytest.raises(ChannelError):
            channel.reserve(1)
        with pytest.raises(StorageError):
            asked.keys(SHARE)


def test_who_takes_no_answer_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half of it would pass for a part of the next one."""
    monkeypatch.setattr(peers_module, "ANSWER_S", 0.0)
    medium, fragment = HostStorage(StorageConfig(1 << 25)), PageFragment(0, 0)
    medium.write(page(0), {fragment: bytes(6 * PART_BYTES)})
    with closing(netstack.open("loopback", key=b"k" * 32)) as fabric:
        asked, channel = talking(fabric)
        said = msgspec.msgpack.encode(PageRequest(page(0).key, [fragment]))
        slot = asked._channel.reserve(len(said))
        slot.data[:] = said
        asked._channel.put_signal(slot, b"")
        peers_module._PageServer(channel, medium).run()
        with pytest.raises(StorageError, match="does not reply"):
            [asked._next(WAIT_S) for _ in range(6)]


def talking(fabric: netstack.Fabric) -> tuple[peers_module._PageSource, Channel]:
    """Who asks, and the channel of who is asked."""
    listener, geometry = fabric.listen(), Geometry(slots=4, slot_bytes=PART_BYTES)
    ends = list[Channel]()
    terms = Terms(outbound=geometry, inbound=geometry)
    knock = threading.Thread(target=lambda: ends.append(fabric.connect(listener.url, terms)))
    knock.start()
    channel = listener.accept(timeout_s=WAIT_S)
    knock.join(WAIT_S)
    return peers_module._PageSource(ends[0]), channel
