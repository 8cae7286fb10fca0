"""The parity of memory workers' KV: what any one of them had comes back from the others, bit by bit.

Covers: lamina/workers/compute/kv_parity.py, lamina/workers/memory/kv_transfer/block_parts.py,
lamina/workers/memory/kv_transfer/transfer_mesh.py.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from both_sides import CPU, Both, Side
from memory_peer import bind, shape
from torch import Tensor

from lamina import netstack
from lamina.netstack import ListenTerms
from lamina.protocol.blocks.block_tables import BlockTables, PlanError
from lamina.protocol.codec import TensorSpan
from lamina.protocol.control import Address
from lamina.protocol.reshard import RebuildKv
from lamina.protocol.step_plan import Fork, Free, MessageKind, New, RowRange, StepPlan, SurvivingKv
from lamina.workers.compute.attention_client import AttentionClient, MemoryWorkerClient, fold_runs
from lamina.workers.compute.kv_parity import parity_bind, parity_layers
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer import block_parts
from lamina.workers.memory.kv_transfer.block_parts import integers
from lamina.workers.memory.kv_transfer.parity_rebuild import ParityRebuilder
from lamina.workers.memory.kv_transfer.transfer_mesh import TransferMesh

pytestmark = pytest.mark.no_retry

LAYERS = [shape(8, 4, 16, 8), shape(8, 4, 16, 8, window=40), shape(8, 4, 16, 8)]
WORKERS, BLOCK, VIEW, WAIT_S = 2, 16, 3, 30.0
# The third begins as the first does, and shares its whole blocks.
STEPS = [
    ([New(1), New(2)], [(1, 0, 70), (2, 0, 5)]),
    ([Fork(3, 1, 50)], [(3, 50, 3), (1, 70, 1)]),
    ([Free(2)], [(3, 53, 30), (1, 71, 1)]),
    ([New(4)], [(4, 0, 20), (1, 72, 1)]),
]
KEEP = [SurvivingKv(1, 73), SurvivingKv(3, 80), SurvivingKv(4, 20)]


class Guarded(Both):
    """Memory workers, and one that keeps their parity."""

    def __init__(self, dtype: str) -> None:
        fields = {"max_rows": 128, "max_model_len": 256, "kv_bytes": 1 << 20, "dtype": dtype}
        super().__init__([bind(LAYERS, [1.0] * WORKERS, w, "head", **fields) for w in range(WORKERS)])
        first = self.sides[0].store
        self.guard = Side(parity_bind(first.bind_request, "reference", first.bind_reply.kv_bytes))
        self.sides.append(self.guard)
        *links, parity = [MemoryWorkerClient(side, w, 1.0) for w, side in enumerate(self.sides)]  # type: ignore[arg-type]
        self.pool = AttentionClient(links, first.bind_request.partition, LAYERS, first.backend, parity=[parity])

    def step(self, number: int, generator: torch.Generator) -> None:
        ops, rows = STEPS[number]
        plan = self.begin(StepPlan(step=number, ops=list(ops), rows=[RowRange(*row) for row in rows]))
        dtype = self.guard.store.dtype
        for side in self.sides:
            side.store.apply_block_copies()
        for layer, of in enumerate(LAYERS):
            sizes = (of.q_heads, of.qk_dim), (of.kv_heads, of.qk_dim), (of.kv_heads, of.v_dim)
            q, k, v = (torch.randn(plan.num_rows, h, 1, d, generator=generator).to(dtype) for h, d in sizes)
            self.pool.q(layer, q)
            self.pool.kv(layer, k, v)
            for side in self.sides[:-1]:
                side.serve(layer)
            self.pool.o(layer, plan.num_rows, dtype)
            step, data = self.guard.step, self.guard.sent.pop(MessageKind.KV)
            assert MessageKind.Q not in self.guard.sent
            step.write(layer, step.rows(layer, self.guard.store.message_tensor(memoryview(data))))
        for side in self.sides:
            side.store.committed.commit(plan.rows)


@pytest.fixture(params=["float32", "bfloat16"])
def guarded(request: pytest.FixtureRequest) -> Guarded:
    x, generator = Guarded(request.param), torch.Generator().manual_seed(1)
    for number in range(len(STEPS)):
        x.step(number, generator)
    for side in x.sides:
        side.store.reconcile(KEEP)
    return x


def kept(store: KvStore) -> Iterator[tuple[Any, Tensor]]:
    """Returns K and V of each kept token, of all heads that a worker has, as integers."""
    for layer in range(len(LAYERS)):
        (piece,) = store.layers[layer]
        k_and_v = integers(store, layer, 0)
        for each in KEEP:
            start, ids = store.tables.block_table(piece.group, each.sequence)
            for at, block in enumerate(ids):
                tokens = min(BLOCK, each.length - (start + at) * BLOCK)
                for which, bits in enumerate(k_and_v):
                    yield (layer, each.sequence, start + at, which), bits[block, :, :tokens]


def rebuilt(x: Guarded, lost: int) -> KvStore:
    """The store of one that takes a lost one's place."""
    fabric = netstack.open("loopback", key=b"k" * 32)
    doors = [EpochListener(fabric.listen("", ListenTerms(name=f"memory-{i}"))) for i in range(WORKERS + 1)]
    peers = [Address(door.url, f"memory-{i}") for i, door in enumerate(doors)]
    sources, fresh = [i for i in range(WORKERS + 1) if i != lost], KvStore(x.sides[lost].store.bind_request, CPU)
    for layer in fresh.layers:
        for tensor in layer[0].kv.tensors:
            tensor.fill_(7.0)  # whatever was there before
    failures = list[Exception]()

    def work(me: int) -> None:
        order = RebuildKv(
            epoch=VIEW,
            bind=None,
            surviving=KEEP,
            peers=peers,
            own_index=me,
            sources=sources,
            targets=[lost],
            timeout_s=WAIT_S,
        )
        mesh = TransferMesh(order, EpochFabric(VIEW, fabric))
        try:
            ParityRebuilder(order, fresh if me == lost else x.sides[me].store, mesh).run(doors[me])
        except Exception as error:  # noqa: BLE001
            failures.append(error)
        finally:
            mesh.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(WORKERS + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    fabric.close()
    assert not failures
    return fresh


@pytest.mark.parametrize("slot_bytes", [block_parts.PART_BYTES, 1], ids=["one message", "a message for each block"])
@pytest.mark.parametrize("lost", range(WORKERS + 1))
def test_what_any_one_had_comes_back_to_the_last_bit(
    lost: int, slot_bytes: int, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block once, also one that two sequences have, in whichever messages it comes."""
    monkeypatch.setattr(block_parts, "PART_BYTES", slot_bytes)
    had, fresh = guarded.sides[lost].store, rebuilt(guarded, lost)
    wanted, came = dict(kept(had)), dict(kept(fresh))
    assert wanted.keys() == came.keys()
    assert all(torch.equal(wanted[at], came[at]) for at in wanted)
    assert fresh.tables.free_blocks == had.tables.free_blocks, "what sequences share they share again"
    fresh.tables.check_integrity()


def test_a_wrong_bit_of_one_that_is_left_is_a_wrong_bit_of_the_one_that_comes_back(guarded: Guarded) -> None:
    wanted = dict(kept(guarded.sides[0].store))
    (at, bits), *_ = kept(guarded.sides[1].store)
    bits[0, 0, 0] ^= 1
    came = dict(kept(rebuilt(guarded, 0)))
    assert [place for place in wanted if not torch.equal(wanted[place], came[place])][:1] == [at]


def test_parity_is_that_of_bits_and_not_of_numbers() -> None:
    """NaN, infinities and signs of zero are bits as any."""
    odd = torch.tensor([[float("nan"), float("inf")], [-0.0, 1e-45], [2.0, -3.0]])
    part, other = TensorSpan(0, 2, (2,)), TensorSpan(2, 4, (2,))
    (one, where), (same, there) = fold_runs([(odd[0], part), (odd[2], other), (odd[1], part), (odd[2], other)], 2)
    bits = odd.view(torch.int32)
    assert torch.equal(one.view(torch.int32), bits[0] ^ bits[1])
    assert not same.view(torch.int32).any()
    assert (where, there) == (part, other)


def test_who_has_no_equal_parts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^--kv-parity 1: 4 KV heads make no equal parts for --memory-"):
        parity_layers(LAYERS, 3)


@pytest.mark.parametrize("ids", [[0, 1, 1], [0, 1], [0, 1, 2, 3], [0, 1, 9], [0, 1, -1]], ids=str)
def test_tables_that_cannot_be_are_refused(ids: list[int]) -> None:
    tables = BlockTables([0], [9], BLOCK)
    with pytest.raises(PlanError):
        tables.restore([SurvivingKv(1, 3 * BLOCK)], array("q", ids))
    assert not tables.sequences
    tables.restore([SurvivingKv(1, 3 * BLOCK), SurvivingKv(2, 1)], array("q", [4, 2, 8, 4]))
    assert (tables.free_blocks, tables.exclusive_blocks(1)) == ((6,), (2,))
    tables.check_integrity()
