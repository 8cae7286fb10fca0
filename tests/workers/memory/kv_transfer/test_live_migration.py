"""Stripes that are copied from one memory worker to another while both serve: what comes, and what never counts.

Covers: lamina/workers/memory/kv_transfer/peer_links.py.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import memory_peer
import pytest
import torch
from memory_peer import Peer, RefusedError, memory_pool, shape

from lamina import netstack
from lamina.config.engine_config import KVOptions
from lamina.executor.memory_worker_slots import MAX_MIGRATION_WORKERS, transfer_peers
from lamina.netstack import ChannelError, ChannelTimeout, ListenTerms
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.capacity import partition_of
from lamina.protocol.control import Address, TransferPeer
from lamina.protocol.kv_placement import KvLocation, StripeRun
from lamina.protocol.step_plan import (
    BindRequest,
    CommitMigration,
    CopyStripes,
    Free,
    LayerShape,
    MessageKey,
    MessageKind,
    New,
    ProtocolError,
    RowRange,
    SequenceOp,
    StepPlan,
    StripesCopied,
)
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.attention_step import AttentionStep
from lamina.workers.memory.kv_checksums import BlockChecksums, StoredBlock
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer import block_parts
from lamina.workers.memory.kv_transfer import live_migration as copies
from lamina.workers.memory.kv_transfer.block_parts import scatter
from lamina.workers.memory.kv_transfer.live_migration import LiveMigration
from lamina.workers.memory.kv_transfer.peer_links import PeerLinks
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.worker_process import CorruptedMemoryError

VIEW, SOON_S = 3, 30.0
LAYERS = [LayerShape(4, 2, 16, 16, AttentionSpec(scale=0.25).encode())] * 2
NAMES = "one", "two", "guest"
STRIPE, LENGTH = 128, 512
PLACE = KvLocation(0, (StripeRun(1, 3, 1),))  # of sequence 1: its second and third stripes lie with worker 1


def bind(worker: int) -> BindRequest:
    partition = partition_of("spill", LAYERS, [1.0] * len(NAMES), 4096)
    kv = KVOptions(attention="reference")
    sizes = {"kv_bytes": 1 << 19, "max_rows": LENGTH, "max_model_len": 4096}
    return BindRequest(worker=worker, partition=partition, layers=LAYERS, dtype="float32", kv=kv, **sizes)  # type: ignore[arg-type]


class Worker(NamedTuple):
    store: KvStore
    copies: LiveMigration
    links: PeerLinks
    view: EpochFabric
    said: queue.SimpleQueue[StripesCopied]

    def plan(self, step: int, *parts: SequenceOp | RowRange) -> AttentionStep:
        rows = [part for part in parts if isinstance(part, RowRange)]
        plan = StepPlan(step=step, ops=[part for part in parts if not isinstance(part, RowRange)], rows=rows)
        self.copies.drop_cancelled(plan)
        self.store.apply_plan(plan)
        self.copies.begin(plan)
        return AttentionStep(self.store, plan)

    def heard(self) -> StripesCopied:
        return self.said.get(timeout=SOON_S)

    def stored(self, sequence: int, low: int, high: int) -> list[torch.Tensor]:
        ids = list(self.store.tables.block_ids(0, sequence, low, high))
        return [x[ids].clone() for layer in self.store.layers for piece in layer for x in piece.kv.tensors]


def opened(keys: tuple[bytes, bytes, bytes]) -> tuple[list[Worker], list[EpochListener]]:
    fabric, workers = netstack.open("loopback", key=b"k" * 32), list[Worker]()
    doors = [EpochListener(fabric.listen("", ListenTerms(name=name))) for name in NAMES]
    addresses = [Address(d.url, name, key) for d, name, key in zip(doors, NAMES, keys, strict=True)]
    torch.manual_seed(0)
    for number, address in enumerate(addresses):
        said, view = queue.SimpleQueue[StripesCopied](), EpochFabric(VIEW, fabric)
        links = PeerLinks(view, transfer_peers(addresses, address, MAX_MIGRATION_WORKERS))
        store = KvStore(bind(number), torch.device("cpu"))
        store.apply_plan(StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, LENGTH, PLACE)]))
        for tensor in (x for layer in store.layers for piece in layer for x in piece.kv.tensors):
            tensor.copy_(torch.randn(tensor.shape))
        workers.append(Worker(store, LiveMigration(store, links, VIEW, said.put, Counters()), links, view, said))
    return workers, doors


def met(workers: list[Worker], doors: list[EpochListener]) -> None:
    for worker, door in zip(workers, doors, strict=True):
        while worker.links.num_missing:
            with suppress(ChannelTimeout):
                assert worker.links.accept(worker.view.accept(door, 0.5))


@pytest.fixture
def street(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    """A part is one stripe of a layer."""
    monkeypatch.setattr(block_parts, "PART_BYTES", 1 << 15)
    workers, doors = opened((b"", b"", b""))
    met(workers, doors)
    yield workers
    for worker in workers:
        worker.links.stop()
        worker.view.close()


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_copy_is_what_its_source_has_which_keeps_it(street: list[Worker]) -> None:
    blocks = STRIPE // street[0].store.tables.block_size
    wanted = street[1].stored(1, blocks, 3 * blocks)
    for worker in street:
        worker.plan(1, CopyStripes(5, 1, 1, 2, 2))
    home, source, target = (worker.heard() for worker in street)
    assert [(x.epoch, x.sequence, x.error) for x in (home, source, target)] == [(VIEW, 5, "")] * 3
    assert (home.nbytes, source.nbytes) == (0, 0)
    assert target.nbytes == sum(x.nbytes for x in wanted)
    assert alike(street[2].stored(5, blocks, 3 * blocks), wanted)
    assert alike(street[1].stored(1, blocks, 3 * blocks), wanted)
    for worker in street:
        worker.plan(2, CommitMigration(1, 5, KvLocation(0, (StripeRun(1, 3, 2),))))
    assert alike(street[2].stored(1, blocks, 3 * blocks), wanted)
    assert street[1].store.tables.free_blocks == street[1].store.tables.num_blocks


def test_what_comes_before_its_plan_waits_for_it(street: list[Worker]) -> None:
    street[1].plan(1, CopyStripes(5, 1, 1, 1, 0))
    assert street[1].heard().error == ""
    street[0].plan(1, CopyStripes(5, 1, 1, 1, 0))
    assert street[0].heard().nbytes > 0


def test_what_nobody_wants_any_more_is_dropped(street: list[Worker]) -> None:
    blocks = STRIPE // street[0].store.tables.block_size
    street[0].plan(1, CopyStripes(5, 1, 1, 1, 0))
    before = street[0].stored(5, blocks, 2 * blocks)
    ids = list(street[0].store.tables.block_ids(0, 5, blocks, 2 * blocks))
    street[0].plan(2, Free(5))
    assert street[0].heard() == StripesCopied(epoch=VIEW, sequence=5), "the driver waits for no more of it"
    street[1].plan(1, CopyStripes(5, 1, 1, 1, 0))
    assert street[1].heard().error == ""
    for worker in street[:2]:
        worker.plan(3, CopyStripes(6, 1, 2, 1, 0))
    assert street[0].heard().sequence == 6
    freed = set(ids) - set(street[0].store.tables.block_ids(0, 6, 2 * blocks, 3 * blocks))
    at = [n for n, block in enumerate(ids) if block in freed]
    after = [x[[ids[n] for n in at]] for layer in street[0].store.layers for p in layer for x in p.kv.tensors]
    assert alike(after, [x[at] for x in before])


def test_damage_is_not_copied_and_what_was_known_of_the_blocks_is_forgotten(street: list[Worker]) -> None:
    """With checksums of all blocks."""
    _, source, target = street
    source.store.checksums, target.store.checksums = given, taken = (
        BlockChecksums(source.store, 1.0),
        BlockChecksums(target.store, 1.0),
    )
    taken.sums |= {StoredBlock(0, n): b"of another sequence" for n in range(target.store.tables.num_blocks[0])}
    given.update_after_step([source.plan(1, RowRange(1, LENGTH, 1, PLACE))])
    for worker in street:
        worker.plan(2, CopyStripes(5, 1, 1, 1, 2))
    assert target.heard().nbytes > 0
    there = KvLocation(0, (StripeRun(1, 2, 2), StripeRun(2, 3, 1)))
    steps = [worker.plan(3, CommitMigration(1, 5, there), RowRange(1, LENGTH, 1, there)) for worker in street]
    taken.verify_before_step(steps[2:])
    source.store.layers[-1][0].kv.k[source.store.tables.block_table(0, 1)[1][0], 0, 0, 0] += 1.0
    with pytest.raises(CorruptedMemoryError, match="is not what was written there"):
        source.plan(4, CopyStripes(6, 1, 2, 1, 2))


def test_whoever_waits_for_a_lost_one_hears_of_it(street: list[Worker]) -> None:
    street[0].plan(1, CopyStripes(5, 1, 1, 1, 0))
    street[1].links.stop()
    assert street[0].heard().error
    street[0].plan(2, Free(5), CopyStripes(6, 1, 1, 1, 0))


def test_who_is_cut_off_in_the_midst_leaves_the_source_what_it_has(
    street: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, source, target = street
    blocks = STRIPE // source.store.tables.block_size
    wanted, free = source.stored(1, blocks, 3 * blocks), target.store.tables.free_blocks
    parts = list[int]()

    def cut(*copied: Any) -> None:
        if len(parts) > 1:
            raise ChannelError("nothing comes any more")
        parts.append(0)
        scatter(*copied)

    monkeypatch.setattr(copies, "scatter", cut)
    for worker in street:
        worker.plan(1, CopyStripes(5, 1, 1, 2, 2))
    assert target.heard().error
    assert parts, "a part of it had come"
    for worker in street:
        worker.plan(2, Free(5))
    assert alike(source.stored(1, blocks, 3 * blocks), wanted)
    assert target.store.tables.free_blocks == free
    assert not home.heard().error


@pytest.mark.parametrize("op", [CopyStripes(5, 1, 0, 2, 2), CopyStripes(5, 1, 1, 1, 1)])
def test_stripes_of_several_or_for_their_owner_are_not_copied(op: CopyStripes, street: list[Worker]) -> None:
    for worker in street[:2]:
        worker.plan(1, op)
    assert "stripes of memory workers" in street[1].heard().error
    with pytest.raises(ProtocolError, match="copy 4 comes after copy 5"):
        street[0].plan(2, CopyStripes(4, 1, 1, 1, 2))


def test_two_who_have_keys_of_their_own_do_not_meet_and_nobody_waits_for_them() -> None:
    addresses = [Address(f"u{n}", str(n), key) for n, key in enumerate((b"", b"a" * 32, b"", b"b" * 32))]
    told = [transfer_peers(addresses, own, MAX_MIGRATION_WORKERS) for own in addresses]
    for n, each in enumerate(told):
        assert not each[n].connects
        assert not each[n].is_awaited
        for m, other in enumerate(each):
            assert other.connects == told[m][n].is_awaited, "who is reached waits, and nobody else"
            assert not (other.key and addresses[n].key), "a guest hears of no other's key"
            assert (other.connects or other.is_awaited) == (n != m and {n, m} != {1, 3})
    for others in addresses[:1], [Address(f"u{n}", str(n)) for n in range(MAX_MIGRATION_WORKERS + 1)]:
        alone = transfer_peers(others, others[-1], MAX_MIGRATION_WORKERS)
        assert not any(each.connects or each.is_awaited for each in alone), "of one, or of too many, none meet"
        assert [each.is_receiver for each in alone] == [x == others[-1] for x in others]


def test_steps_may_come_while_other_workers_are_still_to_come() -> None:
    """The driver may begin as soon as those who compute are there."""
    movers = [TransferPeer("here", is_receiver=True), *(TransferPeer(name, is_awaited=True) for name in NAMES)]
    with memory_pool() as pool:
        peer = Peer(pool.open(view=VIEW, movers=movers), memory_peer.bind([shape()], epoch=VIEW))
        peer.plan(StepPlan(epoch=VIEW, step=0, ops=[Free(9)], rows=[]))
        for name in NAMES:
            pool.knock(-1, VIEW, name)
        with pytest.raises(RefusedError, match="sequence 9 does not exist"):
            peer.receive(MessageKey(MessageKind.PLAN, 0, 0, VIEW))
