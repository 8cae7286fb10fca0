"""A memory worker at the end of a real channel: it computes the right thing, bit for bit the same however it is split.

Covers: lamina/workers/memory/epoch_bind.py, lamina/workers/memory/epoch_messages.py,
lamina/workers/memory/epoch_server.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from memory_peer import SCHEMES, WAIT_S, Pool, RefusedError, error, model, pools, shape
from torch import Tensor

from lamina.config.partition import KvShards
from lamina.ops.attention import BACKENDS
from lamina.protocol.step_plan import (
    BindReply,
    Fork,
    Free,
    MessageKey,
    MessageKind,
    New,
    RowRange,
    SequenceOp,
    StepPlan,
    SurvivingKv,
    Truncate,
    encode,
)
from lamina.workers.compute.attention_client import RefusedError as ClientRefusedError

pool = pools("loopback")
either = pools(*SCHEMES)


@pytest.mark.long(but=["loopback-native-False-float32-1e-05"])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_ragged_prefill_and_decode_in_one_step(
    pool: Pool, dtype: str, limit: float, overlap: bool, backend: str
) -> None:
    m = model(pool, dtype=dtype, overlap=overlap, attention=backend)
    steps: list[tuple[list[SequenceOp], list[RowRange]]] = [
        ([New(1), New(2)], [RowRange(1, 0, 30), RowRange(2, 0, 7)]),
        ([], [RowRange(2, 7, 1), RowRange(1, 30, 50)]),
        ([New(3)], [RowRange(3, 0, 33), RowRange(1, 80, 1), RowRange(2, 8, 1)]),
        ([Free(2)], [RowRange(1, 81, 1), RowRange(3, 33, 1)]),
        ([], [RowRange(3, 34, 17), RowRange(1, 82, 1)]),
        ([], [RowRange(3, 51, 1), RowRange(1, 83, 60)]),
        ([Truncate(1, 100), New(2)], [RowRange(1, 100, 1), RowRange(3, 52, 1), RowRange(2, 0, 1)]),
    ]
    for number, (ops, rows) in enumerate(steps):
        for layer, o in enumerate(m.step(number, ops, rows)):
            assert error(o, m.oracle(rows, layer)) < limit, (number, layer)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


STEPS: list[tuple[list[SequenceOp], list[RowRange]]] = [
    ([New(1), New(2)], [RowRange(1, 0, 40), RowRange(2, 0, 5)]),
    ([], [RowRange(1, 40, 1), RowRange(2, 5, 20)]),
    ([], [RowRange(2, 25, 1), RowRange(1, 41, 1)]),
    ([Free(2), New(3)], [RowRange(3, 0, 10), RowRange(1, 42, 1)]),
    ([], [RowRange(3, 10, 1), RowRange(1, 43, 1)]),
]


LONG_STEPS: list[tuple[list[SequenceOp], list[RowRange]]] = [
    ([New(1)], [RowRange(1, 0, 100)]),
    ([New(2)], [RowRange(1, 100, 100), RowRange(2, 0, 20)]),
    ([], [RowRange(2, 20, 115), RowRange(1, 200, 60)]),
    ([New(3)], [RowRange(1, 260, 1), RowRange(2, 135, 1), RowRange(3, 0, 1)]),
    ([], [RowRange(3, 1, 1), RowRange(1, 261, 120), RowRange(2, 136, 1)]),
    ([], [RowRange(1, 381, 6), RowRange(2, 137, 1), RowRange(3, 2, 100)]),  # over a border of stripes
    ([Free(2)], [RowRange(3, 102, 30), RowRange(1, 387, 1)]),
    ([Truncate(1, 387)], [RowRange(1, 387, 1), RowRange(3, 132, 1)]),
    ([New(2)], [RowRange(2, 0, 70), RowRange(1, 388, 100), RowRange(3, 133, 1)]),
    ([], [RowRange(1, 488, 1), RowRange(3, 134, 1), RowRange(2, 70, 1)]),
]


@pytest.mark.no_retry
@pytest.mark.long(but=["loopback-short-float32-native"])
@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [STEPS, LONG_STEPS], ids=["short", "long"])
def test_workers_partition_and_overlap_make_no_difference_bit_for_bit(
    pool: Pool, dtype: str, backend: str, steps: list[tuple[list[SequenceOp], list[RowRange]]]
) -> None:
    """The cases are one worker, and several by heads that divide and that do not, by whole sequences, by tokens, and by
    weights.
    """
    spread = [
        ("head", [1.0]), ("head", [1.0, 1.0]), ("head", [1.0] * 3), ("head", [0.7, 0.3]), ("request", [2.0, 1.0]),
        ("token", [1.0, 1.0]), ("token", [2.0, 1.0, 1.0]),
    ]  # fmt: skip
    models = [
        model(pool, weights=w, partition=p, dtype=dtype, overlap=i % 2 == 0, attention=backend, max_rows=200)
        for i, (p, w) in enumerate(spread)
    ]
    for number, (ops, rows) in enumerate(steps):
        first, *others = [m.step(number, ops, rows) for m in models]
        assert not any(o.isnan().any() for o in first)
        assert [equal(first, other) for other in others] == [True] * len(others), number


@pytest.mark.long(but=["shm-192-head-float32", "shm-192-head-bfloat16", "shm-192-request-float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("partition", ["head", "request", "token"])
@pytest.mark.parametrize("length", [192, 187])
def test_a_fork_attends_what_its_source_has_stored(either: Pool, partition: str, dtype: str, length: int) -> None:
    """Bit for bit as a sequence that was given the same tokens; and neither sees what the other goes on with, in the
    same block neither.
    """
    weights, source, fork = [2.0, 1.0], 1, 7  # which begin in the same KV shard
    forked, given = (model(either, weights, partition=partition, dtype=dtype, max_rows=200) for _ in range(2))
    given.forks[fork] = Fork(fork, source, length)  # tokens, no op
    for m in (forked, given):
        m.step(0, [New(source)], [RowRange(source, 0, 180)])
        m.step(1, [], [RowRange(source, 180, 20)])
    forked.step(2, [Fork(fork, source, length)], [])
    given.step(2, [New(fork)], [RowRange(fork, 0, 180)])
    given.step(3, [], [RowRange(fork, 180, length - 180)])
    steps: list[tuple[list[SequenceOp], list[RowRange]]] = [
        ([], [RowRange(fork, length, 9), RowRange(source, 200, 3)]),
        ([], [RowRange(source, 203, 1), RowRange(fork, length + 9, 1)]),
        ([Free(source), New(3)], [RowRange(fork, length + 10, 1), RowRange(3, 0, 60)]),
        ([], [RowRange(fork, length + 11, 60), RowRange(3, 60, 1)]),
    ]
    for number, (ops, rows) in enumerate(steps, 4):
        found, wanted = (m.step(number, ops, rows) for m in (forked, given))
        assert equal(found, wanted), number
        for layer, o in enumerate(found):
            assert error(o, forked.oracle(rows, layer)) < (1e-5 if dtype == "float32" else 1e-2)


def test_a_block_is_not_copied_before_it_is_written(pool: Pool) -> None:
    m = model(pool)
    m.step(0, [New(1)], [RowRange(1, 0, 40)])
    written, limit = pool.workers[0].store.committed, time.monotonic() + WAIT_S  # type: ignore[union-attr]
    while written.tokens_of(1) < 40 and time.monotonic() < limit:  # O may come before that is noted
        time.sleep(0)
    written.reconcile([SurvivingKv(1, 36)])
    with pytest.raises(ClientRefusedError, match="cannot fork 37 tokens of sequence 1: 36 are stored"):
        m.step(1, [Fork(7, 1, 37)], [RowRange(7, 37, 1)])


def test_a_fork_is_vouched_for_as_far_as_its_source_was_written(pool: Pool) -> None:
    m = model(pool)
    m.step(0, [New(1)], [RowRange(1, 0, 40)])
    m.step(1, [Fork(7, 1, 32)], [RowRange(7, 32, 2)])
    m.step(2, [Free(1)], [])
    m.peers[0].channel.close()
    pool.threads[0].join(WAIT_S)
    assert pool.workers[0].surviving_tokens() == {7: 34}


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_windowed_sequence_alone_across_stripes(pool: Pool, backend: str) -> None:
    """Its window lies under two parents of the merge tree: there is nothing to merge below the root."""
    once, split = (model(pool, w, [shape(window=40)], "token", attention=backend) for w in ([1.0], [1.0, 1.0]))
    for first in range(0, 256, 64):
        ops: list[SequenceOp] = [New(1)] if not first else []
        assert equal(once.step(first, ops, [RowRange(1, first, 64)]), split.step(first, ops, [RowRange(1, first, 64)]))
    for first in range(256, 300):
        assert equal(once.step(first, [], [RowRange(1, first, 1)]), split.step(first, [], [RowRange(1, first, 1)])), (
            first
        )


def test_a_step_can_be_sent_again(either: Pool) -> None:
    m = model(either)
    for number, (ops, rows) in enumerate(STEPS):
        once = m.step(number, ops, rows)
        assert equal(m.step(number, ops, rows), once), number
        if number and not ops:  # the one before, too
            _, earlier = STEPS[number - 1]
            m.step(100 + number, [], [r for r in earlier if r.sequence in {x.sequence for x in rows}])
            assert equal(m.step(200 + number, [], rows), once), number


BLOCK = 16 * 4 * (16 + 16) * 4  # bytes of one KV block of ``shape()`` in fp32


@pytest.mark.parametrize("messages", ["none", "q", "q and kv"])
def test_without_blocks_a_step_is_refused_and_the_next_one_works(either: Pool, messages: str) -> None:
    m = model(either, layers=[shape()], kv_bytes=35 * BLOCK, max_rows=200)
    (peer,) = m.peers
    assert peer.bound.num_blocks == [34]
    m.step(0, [New(1)], [RowRange(1, 0, 200)])
    m.step(1, [], [RowRange(1, 200, 200)])
    plan = StepPlan(step=2, ops=[New(2)], rows=[RowRange(2, 0, 145), RowRange(1, 400, 1)])
    key = MessageKey(MessageKind.Q, 2, 0, 0, 0)
    q, k, v = m.rows(plan.rows, 0)
    peer.plan(plan)
    if messages != "none":  # what had left before the refusal was known
        peer.send_tensors(key, q)
    if messages == "q and kv":
        peer.send_tensors(key._replace(kind=MessageKind.KV), k, v)
    with pytest.raises(RefusedError, match="step 2 needs 2 KV blocks of 16 tokens more than the 34"):
        peer.receive(key._replace(kind=MessageKind.O))
    rows = [RowRange(2, 0, 128), RowRange(1, 400, 1)]
    (o,) = m.step(3, [New(2)], rows)
    assert error(o, m.oracle(rows, 0)) < 1e-5
    assert either.workers[0].stats()["refused"] == 1


def test_windowed_groups_give_blocks_back(either: Pool) -> None:
    """A sequence that is much longer than what the windowed group could hold."""
    layers = [shape(), shape(window=20)]
    size = (33 + 6) * BLOCK
    m = model(either, layers=layers, kv_bytes=size, max_rows=16, block_size=16)
    assert m.peers[0].bound == BindReply(
        windows=[0, 20],
        kv_shards=[KvShards()] * 2,
        stripe_blocks=0,
        num_blocks=[32, 5],
        backend="native",
        kv_bytes=size,
    )
    m.step(0, [New(1)], [RowRange(1, 0, 16)])
    for first in range(16, 496, 16):
        m.step(first, [], [RowRange(1, first, 16)])
    rows = [RowRange(1, 496, 1)]
    for layer, o in enumerate(m.step(1000, [], rows)):
        assert error(o, m.oracle(rows, layer)) < 1e-5


def test_a_nan_of_one_sequence_disturbs_no_other(either: Pool) -> None:
    m = model(either)
    clean = model(either)
    rows = [RowRange(1, 0, 20), RowRange(2, 0, 5), RowRange(3, 0, 33)]
    drawn = m.span

    def span(sequence: int, first: int, stop: int, layer: int) -> Iterator[tuple[Tensor, ...]]:
        for part in drawn(sequence, first, stop, layer):
            yield tuple(x * torch.nan for x in part) if sequence == 2 else part

    m.span = span  # type: ignore[method-assign]
    new: list[SequenceOp] = [New(1), New(2), New(3)]
    later = [RowRange(3, 33, 1), RowRange(2, 5, 1), RowRange(1, 20, 1)]
    for step, (ops, now, mine) in enumerate([(new, rows, [*range(20), *range(25, 58)]), ([], later, [0, 2])]):
        for o, want in zip(m.step(step, ops, now), clean.step(step, ops, now), strict=True):
            assert torch.equal(o[mine], want[mine])
            assert o[[i for i in range(len(o)) if i not in mine]].isnan().all()
    # its blocks go to another sequence, which is not disturbed either
    reuse: list[SequenceOp] = [Free(2), New(4)]
    for o, want in zip(*(x.step(5, reuse, [RowRange(4, 0, 3)]) for x in (m, clean)), strict=True):
        assert torch.equal(o, want)
    for o, want in zip(*(x.step(6, [], [RowRange(4, 3, 1)]) for x in (m, clean)), strict=True):
        assert torch.equal(o, want)


def test_stats_count_steps_rows_and_bytes(either: Pool) -> None:
    m = model(either, layers=[shape()])
    before = either.workers[0].stats()
    m.step(0, [New(1)], [RowRange(1, 0, 5)])
    m.step(1, [], [RowRange(1, 5, 1)])
    m.peers[0].channel.close()
    either.threads[0].join(WAIT_S)
    after = either.workers[0].stats()
    assert (after["steps"], after["rows"]) == (2, 6)
    assert after["bytes_sent"] - before["bytes_sent"] == 6 * 8 * 16 * 4
    plans = [
        StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, 5)]),
        StepPlan(step=1, ops=[], rows=[RowRange(1, 5, 1)]),
    ]
    layer_bytes = 6 * (8 + 4 + 4) * 16 * 4
    bind_bytes = len(encode(m.peers[0].bind))
    assert after["bytes_received"] == bind_bytes + layer_bytes + sum(len(encode(p)) for p in plans)
    for name in ("attend_s", "write_s", "wait_s", "plan_s"):
        assert after[name] > 0
