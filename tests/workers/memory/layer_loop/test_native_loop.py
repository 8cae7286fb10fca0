"""A round in one native call against the same round in Python, bit for bit; and how the call ends.

Covers: lamina/workers/memory/layer_loop/host_loop.py.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from memory_peer import SPREAD, WAIT_S, Model, Peer, Pool, bind, memory_pool, model, placed, pools, shape
from torch import Tensor

from lamina.netstack import Geometry, PeerFault
from lamina.ops.attention.native import NativeAttention
from lamina.protocol.step_plan import (
    BlockScoresReport,
    DropBlocks,
    Free,
    MessageKey,
    MessageKind,
    New,
    RowRange,
    ScoreBlocks,
    SelectBlocks,
    SequenceOp,
    StepPlan,
    Truncate,
)
from lamina.workers.memory._memory import Loop

pytestmark = pytest.mark.no_retry

LAYERS = [
    shape(),
    shape(window=40),
    shape(8, 4, 16, 24, softcap=3.0),
    shape(window=40, sinks=1),
    shape(8, 2, alibi=1),
    shape(6, 6, 40, 40),
    shape(),
]
STEPS: list[tuple[list[SequenceOp], list[RowRange]]] = [
    ([New(1)], [RowRange(1, 0, 100)]),
    ([New(2)], [RowRange(1, 100, 100), RowRange(2, 0, 20)]),
    ([], [RowRange(2, 20, 115), RowRange(1, 200, 60)]),
    ([New(3)], [RowRange(1, 260, 1), RowRange(2, 135, 1), RowRange(3, 0, 1)]),
    ([], []),
    ([], [RowRange(3, 1, 1), RowRange(1, 261, 120), RowRange(2, 136, 1)]),
    ([], [RowRange(1, 381, 6), RowRange(2, 137, 1), RowRange(3, 2, 100)]),
    ([Free(2)], [RowRange(3, 102, 30), RowRange(1, 387, 1)]),
    ([Truncate(1, 387)], [RowRange(1, 387, 1), RowRange(3, 132, 1)]),
    ([], [RowRange(3, 133, 1), RowRange(1, 388, 1)]),
]


# Tests of one case follow each other so: a parameter of the fixture would have all cases over shm come first.
transports = pytest.mark.parametrize("native", ["shm", "tcp"], indirect=True)
native = pools("shm", "tcp")
plain = pools("loopback")


class Wanted(NamedTuple):
    """The results of the layers in Python for STEPS."""

    o: list[list[Tensor]]  # by step and layer
    stats: list[dict[str, float]]  # by worker
    stored: list[Tensor]  # of numbers of 8 bits


@lru_cache(1)
def in_python(weights: tuple[float, ...], **options: Any) -> Wanted:
    """Computed once for both transports, whose tests follow each other. No test writes to it."""
    with memory_pool() as pool:
        m = model(pool, list(weights), LAYERS, **options)
        o = [m.step(number, ops, rows) for number, (ops, rows) in enumerate(STEPS)]
        end(m, pool)
        return Wanted(o, [w.stats() for w in pool.workers], stored(pool) if "kv_cache_dtype" in options else [])


def check_steps(m: Model, wanted: Wanted) -> None:
    for number, (ops, rows) in enumerate(STEPS):
        for layer, (a, b) in enumerate(zip(m.step(number, ops, rows), wanted.o[number], strict=True)):
            assert torch.equal(a, b), (number, layer)


@pytest.mark.long(but=["head-[1.0]-float32-False-shm", "head-[1.0]-float32-True-shm"])
@transports
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("partition", "weights"), SPREAD, ids=str)
def test_bits_are_those_of_the_layers_in_python(
    native: Pool, partition: str, weights: list[float], dtype: str, overlap: bool
) -> None:
    options: dict[str, Any] = {"partition": partition, "dtype": dtype, "overlap": overlap, "max_rows": 200}
    found, wanted = model(native, weights, LAYERS, **options), in_python(tuple(weights), **options)
    check_steps(found, wanted)
    end(found, native)
    told = [worker.stats() for worker in native.workers]
    for stats, share in ((told, 1.0), (wanted.stats, 0.0)):
        for each in stats:
            assert each["native_turns"] == share * each["turns"]
            assert each["attend_s"] > 0
    for name in ("rows", "stored_bytes", "bytes_sent", "bytes_received", "turns"):
        assert [each[name] for each in told] == [each[name] for each in wanted.stats], name


def run_ahead(m: Model) -> Iterator[Tensor]:
    """O of all layers and STEPS; in the middle of each step the plan of the next one comes."""
    partition, layers = m.peers[0].bind.partition, len(m.layers)
    plans = [
        StepPlan(step=n, ops=ops, rows=[placed(r, partition) for r in rows]) for n, (ops, rows) in enumerate(STEPS)
    ]
    m.pool.send_plan(plans[0])
    for plan, then in zip(plans, [*plans[1:], None], strict=True):
        m.pool.begin_step(plan)
        for layer in range(layers):
            if then is not None and layer == (plan.step % layers if plan.rows else layers - 1):
                m.pool.send_plan(then)
            if plan.rows:
                q, k, v = (x.unsqueeze(2) for x in m.rows(plan.rows, layer))
                m.pool.q(layer, q)
                m.pool.kv(layer, k, v)
                yield m.pool.o(layer, len(q), m.dtype)


@pytest.mark.long(but=["shm-loopback-head-[1.0]"])
@pytest.mark.parametrize(("partition", "weights"), SPREAD, ids=str)
def test_a_plan_may_come_before_any_layer(native: Pool, plain: Pool, partition: str, weights: list[float]) -> None:
    """Also before K and V of a layer whose Q a worker does not need."""
    found, wanted = (model(p, weights, LAYERS, partition=partition, max_rows=200) for p in (native, plain))
    for number, (a, b) in enumerate(zip(run_ahead(found), run_ahead(wanted), strict=True)):
        assert torch.equal(a, b), number


@pytest.mark.long(but=["head-[0.7, 0.3]-bfloat16-fp8-tcp"])
@transports
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("partition", "weights"), [SPREAD[1], SPREAD[4]], ids=str)
def test_numbers_of_8_bits_are_rounded_as_in_python(
    native: Pool, kind: str, dtype: str, partition: str, weights: list[float]
) -> None:
    options: dict[str, Any] = {"partition": partition, "dtype": dtype, "kv_cache_dtype": kind, "max_rows": 200}
    found, wanted = model(native, weights, LAYERS, **options), in_python(tuple(weights), **options)
    check_steps(found, wanted)
    end(found, native)
    for a, b in zip(stored(native), wanted.stored, strict=True):
        assert same(a, b)
    assert native.workers[0].stats()["native_turns"] == len(LAYERS) * sum(bool(rows) for _, rows in STEPS)


SPARSE = [shape(), shape(8, 4, 16, 24, softcap=3.0), shape(window=40), shape(8, 2, sinks=1), shape(6, 6, 40, 40)]
BUDGET = {"kv_budget": 64, "kv_recent": 16, "max_rows": 200}


@pytest.mark.long(but=["shm-loopback-float32-auto-[1.0, 1.0]", "shm-loopback-bfloat16-auto-[1.0]"])
@pytest.mark.parametrize(
    ("dtype", "kind", "weights"),
    [
        ("float32", "auto", [1.0, 1.0]), ("bfloat16", "auto", [1.0]), ("float16", "auto", [1.0]),
        ("float32", "int8", [1.0]), ("bfloat16", "fp8", [1.0, 1.0]), ("float16", "int8", [1.0]),
    ],
    ids=str,
)  # fmt: skip
def test_rows_select_the_blocks_that_they_select_in_python(
    native: Pool, plain: Pool, dtype: str, kind: str, weights: list[float]
) -> None:
    """The rows are alone, in a step with rows that attend all, and in one with a row that could select and is to attend
    all.
    """
    options = {"dtype": dtype, "kv_cache_dtype": kind, "kv_sparsity": "select", **BUDGET}
    got, want = (model(p, weights, SPARSE, **options) for p in (native, plain))  # type: ignore[arg-type]
    for number, (ops, rows) in enumerate(STEPS):
        all_ops = [*ops, SelectBlocks(1)] if number == 7 else ops
        both = got.step(number, all_ops, rows), want.step(number, all_ops, rows)
        for layer, (a, b) in enumerate(zip(*both, strict=True)):
            assert torch.equal(a, b), (number, layer)
    for m, pool in ((got, native), (want, plain)):
        end(m, pool)
    for a, b in zip(bounds(native), bounds(plain), strict=True):
        assert torch.equal(a, b)
    stats = [[w.stats()[name] for w in pool.workers for name in ("turns", "stored_bytes")] for pool in (native, plain)]
    assert stats[0] == stats[1]
    assert all(w.stats()["native_turns"] == w.stats()["turns"] for w in native.workers)


def bounds(pool: Pool) -> list[Tensor]:
    """The least and the largest K of all blocks of layers that have them."""
    pieces = [p for w in pool.workers if w.store for layer in w.store.layers for p in layer]
    known = [p.kv.bounds[:, : p.kv.null_block] for p in pieces if p.kv.bounds is not None]
    assert known
    assert all(x.any() for x in known)
    return known


def test_a_number_that_is_none_is_seen_in_the_bounds_of_its_block(native: Pool, plain: Pool) -> None:
    for pool in (native, plain):
        m = model(pool, layers=[shape(), shape()], kv_sparsity="select", **BUDGET)
        rows = [placed(RowRange(1, 0, 40), m.peers[0].bind.partition)]
        plan = StepPlan(step=0, ops=[New(1)], rows=rows)
        m.pool.send_plan(plan)
        m.pool.begin_step(plan)
        for layer in range(2):
            q, k, v = (x.unsqueeze(2).clone() for x in m.rows(rows, layer))
            k[3, 1, 0, 5], k[20, 0, 0, 2], k[21, 0, 0, 2] = float("nan"), float("inf"), float("-inf")
            m.pool.q(layer, q)
            m.pool.kv(layer, k, v)
            m.pool.o(layer, len(q), m.dtype)
        end(m, pool)
    ((a,), (b,)) = bounds(native), bounds(plain)
    assert same(a, b)
    assert a.isnan().sum() == 2
    assert a.isinf().sum() == 2


@pytest.mark.parametrize(("kind", "weights"), [("auto", [1.0, 1.0]), ("int8", [1.0])], ids=str)
def test_rows_are_counted_as_in_python(native: Pool, plain: Pool, kind: str, weights: list[float]) -> None:
    """They are counted before and after blocks that go."""
    options = {"dtype": "bfloat16", "kv_cache_dtype": kind, "kv_sparsity": "evict", **BUDGET}
    scored: dict[int, list[SequenceOp]] = {
        1: [ScoreBlocks(1, 30), ScoreBlocks(2, 7)], 2: [DropBlocks(1, [2, 3, 7]), ScoreBlocks(2, 16)],
        3: [ScoreBlocks(1, 1)], 6: [ScoreBlocks(3, 40)]
    }  # fmt: skip
    for pool in (native, plain):
        m = model(pool, weights, SPARSE, **options)  # type: ignore[arg-type]
        for number, (ops, rows) in enumerate(STEPS[:7]):
            m.step(number, [*ops, *scored.get(number, [])], rows)
        end(m, pool)
    assert len(native.said) == 5 * len(weights)
    assert sorted(native.said, key=str) == sorted(plain.said, key=str)
    assert all(sum(said.scores) > 0 for said in native.said if isinstance(said, BlockScoresReport))
    assert all(w.stats()["native_turns"] == w.stats()["turns"] for w in native.workers)


# Of each dtype: zeros, the smallest numbers, the largest, none, and those that lie in the middle of two of 8 bits.
EDGES = [
    [0.0, -0.0],
    [1e-45, -1e-45, 6e-8, 3e-8],
    [1.2e-38, -1e-40, 5e-41],
    [3e38, -3e38, 65504.0, 1.0],
    [float("inf"), 1.0, -1.0],
    [float("nan"), 1.0],
    [127.0, *(x + 0.5 for x in range(-20, 20))],
    [448.0, *((8 + x + 0.5) * 2.0**e for x in range(8) for e in range(-9, 5)), *(x * 2.0**-10 for x in range(20))],
]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_at_the_edges_are_rounded_as_in_python(native: Pool, plain: Pool, kind: str, dtype: str) -> None:
    dim = max(map(len, EDGES))  # more than are rounded at once
    layers = [shape(1, 1, dim, 24)]
    for pool in (native, plain):
        m = model(pool, layers=layers, dtype=dtype, kv_cache_dtype=kind)
        k = torch.tensor([[*(row * dim)[:dim]] for row in EDGES]).to(m.dtype)[:, None, None]
        rows = [placed(RowRange(1, 0, len(k)), m.peers[0].bind.partition)]
        plan = StepPlan(step=0, ops=[New(1)], rows=rows)
        m.pool.send_plan(plan)
        m.pool.begin_step(plan)
        m.pool.q(0, torch.ones_like(k))
        m.pool.kv(0, k, k[..., -24:].contiguous())
        m.pool.o(0, len(k), m.dtype)
        end(m, pool)
    for a, b in zip(stored(native), stored(plain), strict=True):
        assert same(a, b)


def end(m: Model, pool: Pool) -> None:
    for peer in m.peers:
        peer.channel.close()
    for thread in pool.threads:
        thread.join(WAIT_S)


def stored(pool: Pool) -> list[Tensor]:
    """All K, V and scales, the numbers as bytes."""
    found = list[Tensor]()
    for worker in pool.workers:
        assert worker.store is not None
        for piece in (piece for layer in worker.store.layers for piece in layer):
            assert piece.kv.scales is not None
            found += [piece.kv.k.view(torch.uint8), piece.kv.v.view(torch.uint8), *piece.kv.scales]
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but that one NaN is as good as another."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_several_steps_of_a_round(native: Pool, plain: Pool) -> None:
    """Each layer of both, one after the other; between layers the next plans come."""
    alone, peer = model(plain, layers=LAYERS), native.connect(bind(LAYERS))
    for number in range(3):
        rows = [[RowRange(s, 5 * number, 5)] for s in (0, 1)]
        ops: list[list[SequenceOp]] = [[New(0)], [New(1)]] if not number else [[], []]
        wanted = [alone.step(2 * number + b, ops[b], rows[b]) for b in (0, 1)]
        for b in (0, 1):
            peer.plan(StepPlan(step=number, batch=b, ops=ops[b], rows=rows[b], has_more=b == 0))
        for layer in range(len(LAYERS)):
            if layer == 2:
                peer.plan(StepPlan(step=100 + number, batch=2, ops=[], rows=[]))
            for b in (0, 1):
                q, k, v = alone.rows(rows[b], layer)
                key = MessageKey(MessageKind.Q, number, b, 0, layer)
                peer.send_tensors(key, q)
                peer.send_tensors(key._replace(kind=MessageKind.KV), k, v)
                found = torch.frombuffer(bytearray(peer.receive(key._replace(kind=MessageKind.O))), dtype=torch.float32)
                assert torch.equal(found.view(wanted[b][layer].shape), wanted[b][layer]), (number, layer, b)


def begun(pool: Pool) -> tuple[Peer, Model]:
    """A peer whose worker waits for the K and V of layer 1."""
    m = model(pool, layers=LAYERS)
    (peer,) = m.peers
    peer.plan(StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, 3)]))
    q, k, v = m.rows([RowRange(1, 0, 3)], 0)
    peer.send_tensors(MessageKey(MessageKind.Q, 0, 0, 0, 0), q)
    peer.send_tensors(MessageKey(MessageKind.KV, 0, 0, 0, 0), k, v)
    peer.receive(MessageKey(MessageKind.O, 0, 0, 0, 0))
    peer.send_tensors(MessageKey(MessageKind.Q, 0, 0, 0, 1), q)
    return peer, m


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_peer_that_leaves_in_the_middle_of_a_turn_ends_the_session(native: Pool, end: str) -> None:
    peer, _ = begun(native)
    if end == "close":
        peer.channel.close()
    else:
        peer.channel.abort("enough")
    native.threads[0].join(WAIT_S)
    assert not native.threads[0].is_alive()
    (error,) = native.ends
    assert isinstance(error, PeerFault)


def test_a_worker_that_is_told_to_stop_while_it_waits_stops(native: Pool) -> None:
    peer, _ = begun(native)
    native.workers[0].abort("the driver says so")
    native.threads[0].join(WAIT_S)
    assert not native.threads[0].is_alive()
    with pytest.raises(PeerFault):
        peer.channel.wait_signal(timeout_s=WAIT_S)


def test_a_message_out_of_place_in_the_middle_of_a_turn_is_named(native: Pool) -> None:
    peer, _ = begun(native)
    peer.send(MessageKey(MessageKind.Q, 0, 0, 0, 1), bytes(1536))
    with pytest.raises(PeerFault, match=r"of 1536 bytes in place of .*layer=1.* of 1536 bytes"):
        peer.channel.wait_signal(timeout_s=WAIT_S)


def test_answers_that_nobody_takes_are_waited_for(native: Pool) -> None:
    """Its peer's inbox has one slot: the worker waits for it, and goes on."""
    binding = bind(LAYERS)
    peer = Peer(native.open(inbound=Geometry(slots=1, slot_bytes=1 << 20)), binding)
    m = Model([peer], binding.partition, LAYERS, "float32")
    rows = [RowRange(1, 0, 3)]
    peer.plan(StepPlan(step=0, ops=[New(1)], rows=rows))
    keys = [MessageKey(MessageKind.Q, 0, 0, 0, layer) for layer in range(len(LAYERS))]

    def send() -> None:
        for layer, key in enumerate(keys):
            q, k, v = m.rows(rows, layer)
            peer.send_tensors(key, q)
            peer.send_tensors(key._replace(kind=MessageKind.KV), k, v)

    sender = threading.Thread(target=send)
    sender.start()
    for layer, key in enumerate(keys):
        data = torch.frombuffer(bytearray(peer.receive(key._replace(kind=MessageKind.O))), dtype=torch.float32)
        wanted = m.oracle(rows, layer)
        assert torch.allclose(data.view(wanted.shape).double(), wanted, atol=1e-4)
    sender.join(WAIT_S)


def test_tables_that_make_no_sense_are_refused() -> None:
    kernels = NativeAttention(torch.float32).kernels
    for table in (b"", b"\0" * 8, b"\xff" * 800, bytes(range(256))):
        with pytest.raises(ValueError, match=r"^number \d+ of the table makes no sense$"):
            Loop(kernels, (), table, 1.0, None)
    with pytest.raises(AttributeError):
        Loop(object(), (), b"", 1.0, None)
    for traces, error in ((False, TypeError), (b"123", ValueError), (bytes(24), ValueError)):
        with pytest.raises(error):
            Loop(kernels, (), b"", 1.0, traces)


@pytest.mark.long(but=["shm"])
def test_nothing_of_a_session_stays(native: Pool) -> None:
    """Neither loops nor the channels and kernels that they keep."""

    def loops() -> int:
        gc.collect()
        return sys.getrefcount(Loop)

    counts = list[int]()
    for _ in range(3):
        m = model(native, layers=LAYERS)
        m.step(0, [New(1)], [RowRange(1, 0, 5)])
        m.peers[0].channel.close()
        native.threads[-1].join(WAIT_S)
        native.workers.pop()
        native.ends.clear()  # whose tracebacks hold the session
        counts.append(loops())
    assert counts[0] == counts[-1]


def test_a_plan_in_the_middle_of_a_turn_is_a_fault(native: Pool) -> None:
    peer, _ = begun(native)
    peer.plan(StepPlan(step=1, ops=[], rows=[]))
    with pytest.raises(PeerFault, match=r"in place of .*layer=1"):
        peer.channel.wait_signal(timeout_s=WAIT_S)
