"""Pages that come from the memory workers of other hosts: what they have, and what becomes of lies, losses and ends.

Covers: lamina/workers/runtime.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from lamina import netstack
from lamina.executor.memory_worker_slots import transfer_peers
from lamina.kv.pages import PAGE, Page, PageFragment, Provenance
from lamina.kv.storage import FragmentLostError, PageGoneError, StorageConfig
from lamina.kv.storage import host as host_storage
from lamina.kv.storage.host import HostStorage
from lamina.netstack import Channel, ChannelError, ListenTerms, Terms
from lamina.netstack.checksum import checksum
from lamina.protocol.control import Address
from lamina.protocol.offload_messages import MAX_LISTED_PAGES
from lamina.protocol.step_plan import KEY_BYTES
from lamina.utils.background_thread import LowPriorityCall
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_transfer.peer_links import START_S, PeerLinks
from lamina.workers.memory.kv_transfer.transfer_link import PART_BYTES, MessageType, inbox, pack_header
from lamina.workers.memory.offload import remote_pages as pages_module
from lamina.workers.memory.offload.remote_pages import PageRequest, RemotePages
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.runtime import RUNTIME, Runtime

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
class Host:
    """A worker with a medium of its own, in one epoch."""

    door: EpochListener
    view: EpochFabric
    links: PeerLinks
    medium: HostStorage = field(default_factory=lambda: HostStorage(StorageConfig(1 << 24)))
    meter: Counters = field(default_factory=Counters)

    def serve(self) -> RemotePages:
        return RemotePages(self.medium, self.links, self.meter)

    def meet(self) -> None:
        while self.links.num_missing:
            assert self.links.accept(self.view.accept(self.door, WAIT_S))


@contextmanager
def opened(around: Runtime = RUNTIME, start_s: float = START_S) -> Iterator[list[Host]]:
    """Two who have not met."""
    fabric = netstack.open("loopback", key=b"k" * 32)
    doors = [EpochListener(fabric.listen("", ListenTerms(name=name))) for name in NAMES]
    addresses = [Address(door.url, name) for door, name in zip(doors, NAMES, strict=True)]
    hosts = list[Host]()
    for door, own in zip(doors, addresses, strict=True):
        view = EpochFabric(VIEW, fabric)
        hosts.append(Host(door, view, PeerLinks(view, transfer_peers(addresses, own, len(NAMES)), around, start_s)))
    yield hosts
    for host in hosts:
        host.links.stop()
        host.view.close()
    fabric.close()
    for thread in threading.enumerate():
        if thread.name in ("lamina-receive", "lamina-send", "lamina-meet"):
            thread.join(WAIT_S)
            assert not thread.is_alive()


@dataclass
class Hosts:
    """Two workers that have met, and their pages."""

    hosts: list[Host]
    workers: list[RemotePages]
    media: list[HostStorage]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with opened() as pair:
        workers = [host.serve() for host in pair]
        for host in pair:
            host.meet()
        yield Hosts(pair, workers, [host.medium for host in pair])


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
    assert hosts.hosts[0].meter.snapshot()["kv_peer_bytes"] == sum(map(len, [*ATOMS.values(), *large.values()]))
    with pytest.raises(FragmentLostError):
        filled(one, 2)
    with pytest.raises(FragmentLostError):
        filled(one, 7)


def test_who_opens_its_store_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than for any other answer: its pages count for the whole epoch."""
    monkeypatch.setattr(pages_module, "ANSWER_S", 0.1)
    with opened() as (one, other):
        other.medium.write(page(0), ATOMS)
        pages = one.serve()
        learning = LowPriorityCall(lambda: pages.set_locations(SHARE), "lamina-learn")
        with pytest.raises(TimeoutError):
            learning.result(0.3)
        monkeypatch.setattr(pages_module, "ANSWER_S", WAIT_S)
        other.serve()
        one.meet()
        other.meet()
        assert learning.result(WAIT_S) == [page(0).key]


def test_who_does_not_come_for_pages_is_waited_for_no_longer_than_a_limit() -> None:
    """So it is no source either. A worker that comes late does not change the limit."""
    now = [0.0]
    with opened(Runtime(clock=lambda: now[0])) as (one, other):
        pages = one.serve()
        now[0] += pages_module.ACCEPT_TIMEOUT_S
        assert one.links.num_missing == 1
        now[0] += 0.1
        assert one.links.num_missing == 0
        assert pages.set_locations(SHARE, [page(1).key]) == [page(1).key]
        other.serve()
        assert one.links.accept(one.view.accept(one.door, WAIT_S))
        assert pages.set_locations(SHARE, [page(1).key]) == [page(1).key]


def test_of_workers_that_are_not_reached_in_time_no_page_counts() -> None:
    """They accept no connection."""
    with opened(start_s=0.2) as (_, other):
        assert other.serve().set_locations(SHARE, [page(1).key]) == [page(1).key]


def test_what_has_given_way_there_is_lost_and_nothing_else(hosts: Hosts) -> None:
    one, _ = hosts.workers
    for number in range(2):
        hosts.media[1].write(page(number), ATOMS)
    assert len(one.set_locations(SHARE)) == 2
    hosts.media[1].delete([page(0).key])
    with pytest.raises(PageGoneError):
        filled(one, 0)
    assert filled(one, 1) == ATOMS
    hosts.media[1].close()
    with pytest.raises(FragmentLostError) as lost:
        filled(one, 1)
    assert not isinstance(lost.value, PageGoneError), "it may be there"


@pytest.mark.parametrize("at", [0, 1], ids=["here", "there"])
def test_a_page_that_is_damaged_at_either_end_is_not_one_that_was_evicted(
    hosts: Hosts, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = hosts.workers
    hosts.media[1].write(page(0), ATOMS)
    assert one.set_locations(SHARE) == [page(0).key]
    hosts.media[1].delete([page(0).key])
    with monkeypatch.context() as patch:
        patch.setattr(host_storage, "checksum", bytes)  # of other bytes than those that are there
        hosts.media[at].write(page(0), ATOMS)
    with pytest.raises(FragmentLostError) as lost:
        filled(one, 0)
    assert not isinstance(lost.value, PageGoneError)


def test_a_page_of_which_a_part_is_left_there_is_not_one_that_was_evicted(hosts: Hosts) -> None:
    one, _ = hosts.workers
    hosts.media[1].write(page(0), ATOMS)
    assert one.set_locations(SHARE) == [page(0).key]
    hosts.media[1].delete([page(0).key])
    hosts.media[1].write(page(0), dict(list(ATOMS.items())[:3]))
    with pytest.raises(FragmentLostError) as lost:
        filled(one, 0)
    assert not isinstance(lost.value, PageGoneError)


def test_others_than_those_who_ask_come_as_ever(hosts: Hosts) -> None:
    one = hosts.hosts[0]
    with knocking(one, "compute-0") as (channel, _):
        assert not one.links.accept(channel)


def test_nobody_is_waited_for_once_the_view_is_over(hosts: Hosts) -> None:
    hosts.media[1].write(page(0), ATOMS)
    assert hosts.workers[0].set_locations(SHARE)
    hosts.hosts[1].links.stop()
    with pytest.raises(FragmentLostError, match="other"):
        filled(hosts.workers[0], 0)
    with pytest.raises(PageGoneError):
        filled(hosts.workers[0], 0)


@contextmanager
def knocking(at: Host, name: str) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel of an unknown peer."""
    fabric = netstack.open("loopback", key=b"k" * 32)
    terms = Terms(outbound=inbox(), inbound=inbox(), epoch=VIEW, name=name, peer=NAMES[0])
    knock = LowPriorityCall(lambda: fabric.connect(at.door.url, terms), "lamina-knock")
    came = at.door.accept(VIEW, timeout_s=WAIT_S)
    assert came is not None
    channel = knock.result(WAIT_S)
    yield came, channel
    for each in (came, channel):
        each.close()
    fabric.close()


def put(channel: Channel, message: MessageType, data: bytes) -> None:
    slot = channel.reserve(len(data), timeout_s=WAIT_S)
    slot.data[:] = data
    channel.put_signal(slot, pack_header(message, 0, 0, checksum(data)))


@pytest.mark.parametrize("nbytes", [1, KEY_BYTES * (MAX_LISTED_PAGES + 1)])
def test_keys_that_cannot_be_are_no_keys(nbytes: int) -> None:
    with opened() as (one, _), knocking(one, NAMES[1]) as (came, channel):
        pages = one.serve()
        assert one.links.accept(came)
        call = LowPriorityCall(lambda: pages.set_locations(SHARE), "lamina-learn")
        channel.release(channel.wait_signal(timeout_s=WAIT_S))
        put(channel, MessageType.PART, nbytes.to_bytes(8, "little"))
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
def test_who_asks_for_what_nobody_has_is_not_heard_any_more(said: bytes) -> None:
    with opened() as (one, _), knocking(one, NAMES[1]) as (came, channel):
        one.serve()
        assert one.links.accept(came)
        put(channel, MessageType.REQUEST, said)
        with pytest.raises(ChannelError):
            channel.wait_signal(timeout_s=WAIT_S)
