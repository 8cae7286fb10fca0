"""Pages that come from the memory workers of other hosts: what they have, and what becomes of lies, losses and ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

import msgspec
import pytest

from lamina import netstack
from lamina.kv.pages import PAGE, Page, PageFragment, Provenance
from lamina.kv.storage import FragmentLostError, StorageConfig
from lamina.kv.storage.host import HostStorage
from lamina.netstack import Channel, ChannelError, Geometry, ListenTerms, Terms
from lamina.netstack.checksum import checksum
from lamina.protocol.control import Address
from lamina.protocol.offload_messages import MAX_LISTED_PAGES
from lamina.protocol.step_plan import KEY_BYTES
from lamina.utils.background_thread import LowPriorityCall
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_transfer.transfer_link import PART_BYTES, MessageType, inbox, pack_header
from lamina.workers.memory.offload import remote_pages as peers_module
from lamina.workers.memory.offload.remote_pages import PageRequest, RemotePages
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.runtime import Runtime

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
    workers = [RemotePages(v, d.url, addresses, m) for v, d, m in zip(views, doors, meters, strict=True)]
    media = [HostStorage(StorageConfig(1 << 24)) for _ in doors]
    for worker, view, door in zip(workers, views, doors, strict=True):
        while worker.expected.num_missing:
            assert worker.expected.accept(view.accept(door, WAIT_S))
    yield Hosts(fabric, doors, workers, media, meters)
    for worker, view in zip(workers, views, strict=True):
        worker.stop()
        view.close()
    fabric.close()
    for thread in threading.enumerate():
        if thread.name in ("lamina-receive", "lamina-peers"):
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
        worker = RemotePages(view, door.url, addresses, Counters(), Runtime(clock=lambda: now[0]))
        expected = worker.expected
        now[0] = 2 * peers_module.ACCEPT_TIMEOUT_S
        assert expected.num_missing == 1, "its store may take long to be there, and nobody is taken meanwhile"
        worker.serve(HostStorage(StorageConfig(1 << 20)))
        now[0] += peers_module.ACCEPT_TIMEOUT_S
        assert expected.num_missing == 1
        now[0] += 0.1
        assert expected.num_missing == 0
        assert worker.set_locations(SHARE, [page(1).key]) == [page(1).key]
        geometry = Geometry(slots=2, slot_bytes=64)
        terms = Terms(outbound=geometry, inbound=geometry, epoch=VIEW, name="other", peer="one")
        for _ in range(2):
            knock = LowPriorityCall(lambda: fabric.connect(door.url, terms), "lamina-knock")
            assert expected.accept(view.accept(door, WAIT_S))
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
        worker = RemotePages(view, door.url, addresses, Counters())
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
    channel = hosts.doors[0].accept(VIEW, timeout_s=WAIT_S)
    knock.join(WAIT_S)
    assert channel is not None
    assert not hosts.workers[0].expected.accept(channel)
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


@contextmanager
def asked(share: frozenset[PageFragment]) -> Iterator[tuple[Channel, LowPriorityCall[list[bytes]]]]:
    """The channel by which a worker asks for the keys of pages, and its call."""
    with closing(netstack.open("loopback", key=b"k" * 32)) as fabric:
        door, there = (EpochListener(fabric.listen("", ListenTerms(name=name))) for name in NAMES)
        view, addresses = EpochFabric(VIEW, fabric), [Address(door.url, "one"), Address(there.url, "other")]
        worker = RemotePages(view, door.url, addresses, Counters())
        call = LowPriorityCall(lambda: worker.set_locations(share), "lamina-learn")
        channel = there.accept(VIEW, timeout_s=WAIT_S)
        assert channel is not None
        yield channel, call
        worker.stop()
        view.close()


@pytest.mark.parametrize("nbytes", [1, KEY_BYTES * (MAX_LISTED_PAGES + 1)])
def test_keys_that_cannot_be_are_no_keys(nbytes: int) -> None:
    with asked(SHARE) as (channel, call):
        channel.release(channel.wait_signal(timeout_s=WAIT_S))
        size = nbytes.to_bytes(8, "little")
        slot = channel.reserve(len(size))
        slot.data[:] = size
        channel.put_signal(slot, pack_header(MessageType.PART, 0, 0, checksum(size)))
        assert call.result(WAIT_S) == []
        with pytest.raises(ChannelError, match=f"{nbytes} bytes of keys"):
            channel.wait_signal(timeout_s=WAIT_S)


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
def test_who_asks_for_what_nobody_has_is_not_heard_any_more(said: bytes, hosts: Hosts) -> None:
    terms = Terms(outbound=inbox(), inbound=inbox(), epoch=VIEW, name=NAMES[1], peer=NAMES[0])
    knock = LowPriorityCall(lambda: hosts.fabric.connect(hosts.doors[0].url, terms), "lamina-knock")
    came = hosts.doors[0].accept(VIEW, timeout_s=WAIT_S)
    assert came is not None
    channel = knock.result(WAIT_S)
    assert hosts.workers[0].expected.accept(came)
    slot = channel.reserve(len(said))
    slot.data[:] = said
    channel.put_signal(slot, pack_header(MessageType.REQUEST, 0, 0, checksum(said)))
    with pytest.raises(ChannelError):
        channel.wait_signal(timeout_s=WAIT_S)
    came.close()
    channel.close()
