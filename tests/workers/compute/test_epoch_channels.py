"""From one epoch to the next: what stays with a worker, and what is of an older epoch and is dropped.

Covers: lamina/workers/compute/epoch_group.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_peer import GEOMETRY, LAYERS, WAIT_S, Model, Peer, Pool, RefusedError, bind, error, pools
from msgspec import structs
from simulation.whole.baton import Baton, LongLife
from simulation.whole.network import SimFabric
from test_pipeline_comm import carry, ends, plan
from test_prefill_done import FakeLink, FakeWorker
from test_turns import FakePool, FakeProgram, make_round

from lamina import netstack
from lamina.netstack import Channel, ChannelAborted, ChannelTimeout, ChannelUnreachable, Fabric, PeerFault, Terms
from lamina.protocol.control import RunRound, StepDone
from lamina.protocol.step_plan import MessageKey, MessageKind, New, PrefillGrant, RowRange, StepPlan
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.workers.compute.attention_client import AttentionClient, MemoryWorkerClient
from lamina.workers.compute.compute_worker import ComputeWorker
from lamina.workers.compute.epoch_group import EpochGroup
from lamina.workers.compute.pipeline_comm import PipelineChannels
from lamina.workers.epoch_channels import CONNECT_ATTEMPT_S, SILENT_S, EpochFabric, EpochListener
from lamina.workers.memory.memory_worker import MemoryWorker
from lamina.workers.prefill.kv_sender import KvSender
from lamina.workers.prefill.prefill_worker import PrefillWorker
from lamina.workers.runtime import RUNTIME

KEY = b"k" * 32

ring_ends = ends  # a fixture
pool = pools("loopback")


def of_view(pool: Pool, view: int, weights: list[float], **fields: Any) -> Model:
    """All workers of ``pool``, bound under an epoch; they are new in the first."""
    binds = [bind(LAYERS, weights, w, epoch=view, **fields) for w in range(len(weights))]
    if len(pool.workers) < len(weights):
        peers = [pool.connect(each) for each in binds]
    else:
        peers = []
        for worker, each in enumerate(binds):
            pool.serve(worker, view)
            peers.append(Peer(pool.knock(worker, view), each))
    return Model(peers, binds[0].partition, LAYERS, "float32")


def leave(pool: Pool, m: Model) -> None:
    for peer in m.peers:
        peer.channel.close()
    for thread in pool.threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0]], ids=str)
def test_a_sequence_goes_on_under_the_next_view(pool: Pool, weights: list[float]) -> None:
    """With all its layers, windows and dtypes of K and V; each epoch has sequences of its own, too."""
    first = of_view(pool, 1, weights)
    first.step(0, [New(1)], [RowRange(1, 0, 50)], epoch=1)
    leave(pool, first)
    rows = [RowRange(1, 50, 2), RowRange(2, 0, 3)]
    # How much memory it would take now, and who comes, is not what the store was made of.
    second = of_view(pool, 3, weights, kv_bytes=5 << 20)
    for layer, o in enumerate(second.step(1, [New(2)], rows, epoch=3)):
        assert error(o, second.oracle(rows, layer)) < 1e-5
    assert [p.bound for p in second.peers] == [p.bound for p in first.peers]
    assert [w.stats()["stores"] for w in pool.workers] == [1.0] * len(weights)


def test_what_was_never_stored_is_refused_under_the_next_view_too(pool: Pool) -> None:
    first = of_view(pool, 1, [1.0])
    first.step(0, [New(1)], [RowRange(1, 0, 10)], epoch=1)
    leave(pool, first)
    m = of_view(pool, 2, [1.0])
    # The plan that came last under the older epoch, word for word: no replay, as that step is over.
    for ops, rows, reason in (
        ([], [RowRange(1, 11, 1)], "its rows start at 11"),
        ([New(1)], [RowRange(1, 0, 10)], "exists"),
    ):
        m.peers[0].plan(StepPlan(epoch=2, step=0, ops=ops, rows=rows))  # type: ignore[arg-type]
        with pytest.raises(RefusedError, match=reason):
            m.peers[0].receive(MessageKey(MessageKind.O, 0, epoch=2))


def test_prefill_workers_send_in_the_epoch_of_their_channel(pool: Pool) -> None:
    m = of_view(pool, 2, [1.0], prefill_workers=1)
    link = KvSender(pool.join(m.peers[0], 1).channel, 0, WAIT_S)
    m.step(0, [New(1), PrefillGrant(1, 0, 1, 0, 0)], [], epoch=2)
    own = AttentionClient([link], m.peers[0].bind.partition, LAYERS, m.pool.backend)
    own.begin_step(StepPlan(epoch=2, step=0, ops=[], rows=[RowRange(1, 0, 1)]))
    for layer in range(len(LAYERS)):
        _, k, v = m.rows([RowRange(1, 0, 1)], layer)
        own.kv(layer, k.unsqueeze(2), v.unsqueeze(2))
    assert link.wait_until_stored(0, WAIT_S)


def worker(pool: FakePool, log: list[Any], **fields: Any) -> ComputeWorker:
    return ComputeWorker(FakeProgram(2, pool, log), pool, dtype=torch.float64, **fields)  # type: ignore[arg-type]


def under(view: int, new: RunRound) -> RunRound:
    return structs.replace(new, steps=[structs.replace(s, plan=structs.replace(s.plan, epoch=view)) for s in new.steps])


def test_a_compute_worker_drops_rounds_and_turns_of_an_older_view() -> None:
    """And what was drawn last: the driver tells all tokens anew."""
    log, pool = list[Any](), FakePool()
    mine = worker(pool, log, epoch=1)
    mine.submit(under(1, make_round(0, [0], 1, 2, first=True)))
    done = [mine.run_next() for _ in range(3)][-1]
    assert done is not None
    assert (done.epoch, done.step) == (1, 0)
    mine.submit(under(1, make_round(1, [0], 1, 2, first=False)))
    assert mine.run_next() is None
    mine.connect(pool, 2)
    assert not mine.has_work
    mine.submit(under(1, make_round(2, [0], 1, 2, first=False)))
    assert not mine.has_work
    assert pool.announced == [(0, 0), (1, 0)]
    mine.submit(under(2, make_round(2, [0], 1, 2, first=False)))
    with pytest.raises(KeyError):
        mine.run_next()  # no token of the older epoch is taken for its own
    mine.connect(pool, 2)
    mine.submit(under(2, make_round(3, [0], 1, 2, first=True)))
    done = [mine.run_next() for _ in range(3)][-1]
    assert done is not None
    assert (done.epoch, done.step) == (2, 3)


def test_the_seconds_of_all_views_are_counted() -> None:
    pools = [SimpleNamespace(send_s=0.0, wait_s=0.0) for _ in range(2)]
    mine = worker(FakePool(), [])
    for view, (pool, seconds) in enumerate(zip(pools, (0.5, 0.25), strict=True)):
        mine.connect(pool, view)  # type: ignore[arg-type]
        pool.send_s, pool.wait_s = seconds, 10 * seconds
    mine.slice_s = 2.0
    stats = mine.stats()
    assert (stats["send_s"], stats["wait_s"], stats["slice_s"]) == (0.75, 7.5, 1.25)
    mine.connect(pools[1], 3)  # type: ignore[arg-type]
    assert mine.stats() == stats, "one that goes on counting, as a prefill worker's own attention does"


def test_a_cut_of_an_older_view_is_dropped(ring_ends: list[PipelineChannels]) -> None:
    old, new = (structs.replace(plan(3, step), epoch=view) for step, view in ((0, 1), (1, 2)))
    ring_ends[0].pipeline.send(old, 1, tuple(x + 1 for x in carry(1, 3)))
    ring_ends[0].pipeline.send(new, 1, carry(1, 3))
    for got, want in zip(ring_ends[1].pipeline.receive(new, 1), carry(1, 3), strict=True):
        assert torch.equal(got, want)


def test_an_o_of_an_older_view_is_dropped() -> None:
    keys = [MessageKey(MessageKind.O, 5, epoch=1, layer=0), MessageKey(MessageKind.O, 5, epoch=2, layer=0)]
    arrivals = deque(SimpleNamespace(tag=k.pack(), data=memoryview(bytes([k.epoch]))) for k in keys)
    released = list[Any]()
    channel: Any = SimpleNamespace(wait_signal=lambda timeout_s: arrivals.popleft(), release=released.append)
    taken = list[bytes]()
    MemoryWorkerClient(channel, 0, 1.0).receive(keys[1], lambda data: taken.append(bytes(data)), 1)
    assert taken == [b"\2"]
    assert len(released) == 2


def test_a_prefill_worker_waits_anew_for_steps_of_the_new_view() -> None:
    now, connected = [100.0], list[Any]()
    inner: Any = FakeWorker(0)
    inner.connect = lambda own, view: connected.append(view)
    inner.left.append(StepDone(epoch=1, batch=1, step=4, sampled_tokens=[]))
    own: Any = SimpleNamespace(connect=lambda pool, keep: connected.extend([pool, keep]), fetch_s=0.0)
    old, new = FakeLink(now), FakeLink(now)
    mine = PrefillWorker(inner, own, [old], 1.0, lambda: now[0], epoch=1)  # type: ignore[list-item]
    assert mine.run_next() is None
    mine.connect([new], "pool", 2, [])  # type: ignore[arg-type,list-item]
    assert connected == ["pool", [], 2]
    assert not mine.has_work, "the chunk of the older epoch is dropped"
    inner.left.append(StepDone(epoch=2, batch=1, step=7, sampled_tokens=[]))
    new.stored.append(7)
    done = mine.run_next()
    assert done is not None
    assert done.step == 7


def test_ranks_that_meet_again_are_called_in_place_of_the_old_ones() -> None:
    def group(wait_s: float, *, recordable: bool = False) -> Any:
        told = SimpleNamespace(rank=1, size=2, recordable=recordable, wait_s=wait_s)
        told.all_reduce = lambda x: (wait_s, x)
        return told

    ranks = EpochGroup(group(1.0))
    assert ranks.all_reduce(7) == (1.0, 7)  # type: ignore[arg-type,comparison-overlap]
    ranks.begin_epoch(group(2.0))
    assert ranks.all_reduce(7) == (2.0, 7)  # type: ignore[arg-type,comparison-overlap]
    assert ranks.wait_s == 3.0
    with pytest.raises(ValueError, match="--collective auto"):
        ranks.begin_epoch(group(2.0, recordable=True))


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    opened = netstack.open("loopback", key=b"k" * 32)
    yield opened
    opened.close()


@contextmanager
def knocking(fabric: Fabric, door: EpochListener, *epochs: int) -> Iterator[list[Future[Channel]]]:
    """Peers that come, each of an epoch."""
    with ThreadPoolExecutor(len(epochs)) as threads:
        yield [
            threads.submit(fabric.connect, door.url, Terms(outbound=GEOMETRY, inbound=GEOMETRY, epoch=epoch))
            for epoch in epochs
        ]


def test_a_door_lets_in_whom_the_view_is_for(fabric: Fabric) -> None:
    """An older peer gets an error that says so; a newer one waits for its epoch."""
    door, second, third = EpochListener(fabric.listen()), EpochFabric(2), EpochFabric(3)
    with knocking(fabric, door, 1, 3, 2) as (late, early, due):
        assert second.accept(door, WAIT_S).epoch == 2
        with pytest.raises(ChannelTimeout):  # also where the others came later
            second.accept(door, 0.5)
        with pytest.raises(PeerFault, match="epoch 1 is over: this worker is in epoch 2"):
            late.result().wait_signal(timeout_s=WAIT_S)
        second.close()
        with pytest.raises(PeerFault):
            due.result().wait_signal(timeout_s=WAIT_S)
        channel = third.accept(door, WAIT_S)
        channel.put_signal(channel.reserve(0), b"")
        early.result().wait_signal(timeout_s=WAIT_S)


def test_a_view_that_is_over_waits_for_nobody(fabric: Fabric) -> None:
    """Neither for who may come, nor for who was about to be there."""
    door, view = EpochListener(fabric.listen()), EpochFabric(1, fabric)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(view.accept, door, WAIT_S)
        view.end_epoch("epoch 1 is over: epoch 2 begins")
        with pytest.raises(ChannelAborted, match="epoch 1 is over: epoch 2 begins"):
            waiting.result()
        with pytest.raises(ChannelAborted, match="epoch 1 is over: epoch 2 begins"):
            view.connect(door.url, Terms(outbound=GEOMETRY, inbound=GEOMETRY), timeout_s=WAIT_S)


def test_who_is_reached_as_the_view_ends_is_let_go_of(fabric: Fabric) -> None:
    """A view that has ended has no other user that would close it."""
    door, came = EpochListener(fabric.listen()), list[Channel]()

    def connect(url: str, terms: Terms, *, timeout_s: float) -> Channel:
        came.append(fabric.connect(url, terms, timeout_s=timeout_s))
        view.close()
        return came[0]

    view = EpochFabric(1, SimpleNamespace(connect=connect))  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as threads:
        theirs = threads.submit(EpochFabric(1).accept, door, WAIT_S)
        with pytest.raises(ChannelAborted, match="epoch 1 is over"):
            view.connect(door.url, Terms(outbound=GEOMETRY, inbound=GEOMETRY), timeout_s=WAIT_S)
        with pytest.raises(PeerFault):
            theirs.result().wait_signal(timeout_s=WAIT_S)


def test_a_connect_that_waits_ends_with_its_view() -> None:
    """Its peer lives, and accepts no worker of that epoch any more: it has heard of the next one before."""
    baton = Baton(VirtualClock(), Random(0))
    fabric = SimFabric(KEY, baton, lambda: 0.0, None)
    view, place = EpochFabric(1, fabric, baton.clock), fabric.listen()

    def leave() -> None:
        baton.sleep(5.0)
        view.end_epoch("epoch 1 is over: epoch 2 begins")

    baton.start(leave, "leave", LongLife())
    with pytest.raises(ChannelAborted, match="epoch 2 begins"):
        view.connect(place.url, Terms(outbound=GEOMETRY, inbound=GEOMETRY), timeout_s=600.0)
    assert baton.clock.now < 5.0 + 2 * CONNECT_ATTEMPT_S
    baton.end()


@pytest.mark.parametrize("answers", [0, 9])
def test_a_connect_ends_where_nothing_answers_for_long(answers: int) -> None:
    """And waits where the host answers now and then, as the peer may only be late."""
    clock, attempts = VirtualClock(), list[float]()

    def connect(url: str, terms: Terms, *, timeout_s: float) -> Channel:
        attempts.append(clock.now)
        clock.now += timeout_s
        kind = ChannelTimeout if answers and len(attempts) % answers == 0 else ChannelUnreachable
        raise kind(f"{url}: connect: the listener did not accept in time")

    view = EpochFabric(1, SimpleNamespace(connect=connect), lambda: clock.now)  # type: ignore[arg-type]
    with pytest.raises(ChannelTimeout) as told:
        view.connect("tcp://10.0.0.3:7", Terms(outbound=GEOMETRY, inbound=GEOMETRY, peer="memory-1"), timeout_s=60.0)
    assert SILENT_S < clock.now <= SILENT_S + 2 * CONNECT_ATTEMPT_S if not answers else clock.now == 60.0
    assert view.peer_in_error(told.value) == "memory-1"


def test_who_comes_to_a_view_that_has_ended_is_told_so() -> None:
    """The error holds until the next view is called for."""
    baton = Baton(VirtualClock(), Random(0))
    fabric = SimFabric(KEY, baton, lambda: 0.0, None)
    worker, door = MemoryWorker(around=RUNTIME._replace(clock=baton.clock)), EpochListener(fabric.listen())
    baton.start(lambda: worker.reject_until_next_epoch(door, 1), "worker", LongLife())
    view = EpochFabric(1, fabric, baton.clock)
    channel = view.connect(door.url, Terms(outbound=GEOMETRY, inbound=GEOMETRY), timeout_s=600.0)
    with pytest.raises(PeerFault, match="epoch 1 has ended"):
        channel.wait_signal(timeout_s=600.0)
    worker.leave_epochs_before(2)
    baton.end()
    assert baton.clock.now < 1.0


@pytest.mark.parametrize("ends", [True, False])
def test_pages_are_saved_to_the_last_where_the_driver_ends_and_not_behind_a_loss(ends: bool) -> None:
    """The driver says which of both it is, and before anything else that it asks for."""
    told = list[bool]()
    worker, door = MemoryWorker(), EpochListener(netstack.open("loopback", key=KEY).listen())
    worker.transfers = SimpleNamespace(end=lambda *, finish: told.append(finish))  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as serving:
        over = serving.submit(worker.reject_until_next_epoch, door, 1)
        assert told == []
        if ends:
            worker.abort("the driver ends")
        else:
            worker.leave_epochs_before(2)
        over.result(WAIT_S)
    assert told == [ends]
    worker.close()
    assert told == [ends]


@pytest.mark.parametrize("scheme", ["loopback", "shm", "tcp"])
def test_a_lost_way_tells_to_whom_it_was(scheme: str) -> None:
    """The driver thus hears of a memory worker that no worker reaches: of one that ends, of one that is not there."""
    fabric = netstack.open(scheme, key=KEY)
    here = EpochFabric(1, fabric)
    listener = fabric.listen(reception=netstack.ListenTerms(name="memory-1"))
    terms = Terms(outbound=GEOMETRY, inbound=GEOMETRY, name="compute-0", peer="memory-1")
    with ThreadPoolExecutor(1) as other:
        there = other.submit(listener.accept, timeout_s=WAIT_S)
        channel = here.connect(listener.url, terms, timeout_s=WAIT_S)
        there.result().close()
    with pytest.raises(PeerFault) as ended:
        channel.wait_signal(timeout_s=WAIT_S)
    assert here.peer_in_error(ended.value) == "memory-1"
    listener.close()
    with pytest.raises(netstack.ChannelError) as absent:
        here.connect(listener.url, terms, timeout_s=0.1)
    assert here.peer_in_error(absent.value) == "memory-1"
    assert here.peer_in_error(ChannelAborted("ring: aborted")) == ""
    here.close()
    fabric.close()
