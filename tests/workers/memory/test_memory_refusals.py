"""The plans that a memory worker refuses, and that nothing is left of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from memory_peer import LAYERS, SCHEMES, WAIT_S, Model, Peer, Pool, RefusedError, bind, error, model, pools, shape

from lamina.config.partition import HeadShare, Partition
from lamina.netstack import PeerFault
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.step_plan import (
    BindRequest,
    FetchPrefix,
    MessageKey,
    MessageKind,
    New,
    ProtocolError,
    RowRange,
    StepPlan,
    encode,
)

pool = pools(*SCHEMES)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (StepPlan(step=5, ops=[], rows=[RowRange(1, 10, 1), RowRange(2, 0, 1)]), "sequence 2 does not exist"),
        (StepPlan(step=5, ops=[], rows=[RowRange(1, 11, 1)]), "its rows start at 11"),
        (StepPlan(step=5, ops=[], rows=[RowRange(1, 10, 65)]), "65 rows, 64 were bound"),
        (StepPlan(step=5, ops=[], rows=[RowRange(1, 10, 1 << 62)]), "64 were bound"),
        (StepPlan(step=5, ops=[], rows=[RowRange(1, 510, 3)]), "at most 512 tokens"),
        (StepPlan(step=5, ops=[], rows=[RowRange(1, 10, 0)]), "0 rows"),
        (StepPlan(step=5, ops=[], rows=[RowRange(1, -1, 5)]), "position -1"),
        (StepPlan(step=5, ops=[New(1)], rows=[]), "exists already"),
        (StepPlan(step=5, ops=[], rows=[], reply_to=[0, 1, 0, 0, 0]), "as replicas of 5 layers"),
        (StepPlan(step=5, ops=[], rows=[], send_from=[0, 0]), "as replicas of 5 layers"),
        (StepPlan(step=5, ops=[New(2), FetchPrefix(2, 0, 16, 0, 1)], rows=[], epoch=2), "there are no prefill workers"),
        (StepPlan(step=5, ops=[], rows=[], version=99), "version 99"),
        (StepPlan(step=5, ops=[], rows=[], epoch=3), "step 5 is of epoch 3, this worker is in epoch 2"),
    ],
    ids=str,
)
def test_plans_that_cannot_be_are_refused_and_leave_no_trace(pool: Pool, plan: StepPlan, reason: str) -> None:
    m = model(pool, epoch=2)
    m.step(0, [New(1)], [RowRange(1, 0, 10)], epoch=2)
    plan = msgspec.structs.replace(plan, epoch=plan.epoch or 2)
    m.peers[0].plan(plan)
    with pytest.raises(RefusedError, match=reason):
        m.peers[0].receive(MessageKey(MessageKind.O, plan.step, plan.batch, plan.epoch))
    rows = [RowRange(1, 10, 1)]
    for layer, o in enumerate(m.step(6, [], rows, epoch=2)):
        assert error(o, m.oracle(rows, layer)) < 1e-5


def test_a_plan_that_is_no_plan_is_refused(pool: Pool) -> None:
    m = model(pool)
    for data in (b"", b"\xc1", b"\x93\x01\x02\x03", encode(m.peers[0].bind)):
        m.peers[0].send(MessageKey(MessageKind.PLAN, 3), data)
        with pytest.raises(RefusedError, match="not a StepPlan"):
            m.peers[0].receive(MessageKey(MessageKind.O, 3))
    m.peers[0].send(MessageKey(MessageKind.PLAN, 3), encode(StepPlan(step=4, ops=[], rows=[])))
    with pytest.raises(RefusedError, match="step 4 came as"):
        m.peers[0].receive(MessageKey(MessageKind.O, 3))
    m.step(4, [New(1)], [RowRange(1, 0, 3)])


def test_a_step_without_rows_has_no_layer_messages(pool: Pool) -> None:
    m = model(pool)
    assert m.step(0, [New(1), New(2)], []) == []
    m.step(1, [], [RowRange(2, 0, 3)])
    assert pool.workers[0].stats()["steps"] == 2


Q = MessageKey(MessageKind.Q, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("key", "nbytes"),
    [
        (Q, 3 * 8 * 16 * 4 - 1),
        (Q, 0),
        (Q, 4 * 8 * 16 * 4),
        (Q._replace(layer=1), 3 * 8 * 16 * 4),
        (Q._replace(step=1), 3 * 8 * 16 * 4),
        (Q._replace(epoch=1), 3 * 8 * 16 * 4),
        (Q._replace(batch=1), 3 * 8 * 16 * 4),
        (Q._replace(kind=MessageKind.KV), 3 * 8 * 16 * 4),
        (MessageKey(MessageKind.BIND), 100),
        (MessageKey(77), 100),
    ],
    ids=str,
)
def test_a_layer_message_out_of_place_ends_the_channel(pool: Pool, key: MessageKey, nbytes: int) -> None:
    peer = pool.connect(bind(LAYERS))
    peer.plan(StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, 3)]))
    peer.send(key, bytes(nbytes))
    with pytest.raises(PeerFault, match="in place of"):
        peer.receive(Q._replace(kind=MessageKind.O))
    pool.threads[0].join(WAIT_S)
    assert isinstance(pool.ends[0], ProtocolError)


def bad_binds() -> Iterator[tuple[BindRequest, str]]:
    good = bind([shape()])
    layer = good.layers[0]

    def with_layer(**fields: object) -> BindRequest:
        return msgspec.structs.replace(good, layers=[msgspec.structs.replace(layer, **fields)])

    def with_kv(**fields: object) -> BindRequest:
        kv = msgspec.structs.replace(good.kv)
        for name, value in fields.items():  # as a peer could send, and no struct here could be made
            msgspec.structs.force_setattr(kv, name, value)
        return msgspec.structs.replace(good, kv=kv)

    yield msgspec.structs.replace(good, version=99), "version 99"
    yield msgspec.structs.replace(good, dtype="int8"), "--dtype int8"
    yield with_kv(block_size=48), "--block-size must divide 128, not 48"
    yield with_kv(block_size=0), "`int` >= 1 - at `[$].kv.block_size`"
    yield with_kv(kv_cache_dtype="int3"), "--kv-cache-dtype must be one of auto, int8, fp8, not 'int3'"
    yield (
        msgspec.structs.replace(good, kv_bytes=1000),
        "cannot hold one sequence of 512 tokens.*--kv-cache-memory-bytes",
    )
    yield (
        msgspec.structs.replace(good, kv_bytes=1 << 60),
        "GB are free here: lower --kv-cache-memory-bytes below [0-9.]+[GM]iB",
    )
    yield msgspec.structs.replace(good, max_rows=0), "0 rows"
    yield msgspec.structs.replace(good, prefill_workers=-1), "-1 prefill workers"
    for stages in (0, 2):
        told = msgspec.structs.replace(good, prefill_workers=3, prefill_pipeline=stages)
        yield told, f"3 prefill workers in groups of {stages}"
    yield msgspec.structs.replace(good, max_model_len=-1), "-1 tokens"
    yield msgspec.structs.replace(good, worker=1), "nothing for memory worker 1"
    yield with_kv(attention="abacus"), "attention backend 'abacus'"
    yield msgspec.structs.replace(good, layers=[]), "no layers"
    yield msgspec.structs.replace(good, layers=[layer, layer]), "1 layers for 2"
    yield with_layer(q_heads=7), "7 query heads"
    yield with_layer(kv_heads=2), "4 KV heads for a layer of 2"
    yield with_layer(v_dim=0), "4 KV heads"
    yield with_layer(spec="{}"), "not an attention spec"
    yield with_layer(sinks=b"1234"), "operand of 4 bytes"
    yield with_layer(spec=AttentionSpec(scale=1.0, alibi=True).encode()), "operand of 0 bytes"
    for lanes, shares, reason in (
        (1, [HeadShare(0, 3, [0]), HeadShare(2, 4, [0])], "follow 3"),
        (1, [HeadShare(0, 2, [0])], "2 KV heads for a layer of 4"),
        (2, [HeadShare(0, 4, [0, 0, 0])], "3 owners for 2 KV shards"),
        (1, [HeadShare(0, 4, [])], "0 owners"),
        (1, [HeadShare(0, 4, [1])], "names .1."),
        (0, [HeadShare(0, 4, [0])], "0 KV shards"),
    ):
        yield msgspec.structs.replace(good, partition=Partition(1, lanes, 0, [shares], [0])), reason
    yield msgspec.structs.replace(good, partition=Partition(1, 1, 0, [], [0])), "without table 0"
    yield (
        msgspec.structs.replace(good, partition=msgspec.structs.replace(good.partition, stripe_chunks=3)),
        "stripes of 3",
    )


@pytest.mark.parametrize(("bad", "reason"), list(bad_binds()), ids=lambda x: x if isinstance(x, str) else "")
def test_binds_that_cannot_be_are_refused(pool: Pool, bad: BindRequest, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        pool.connect(bad)


def test_a_refused_peer_may_try_again(pool: Pool) -> None:
    good, channel = bind([shape()]), pool.open()
    for _ in range(3):
        with pytest.raises(RefusedError, match="--dtype"):
            Peer(channel, msgspec.structs.replace(good, dtype="int8"))
    peer = Peer(channel, good)
    Model([peer], good.partition, good.layers, good.dtype).step(0, [New(1)], [RowRange(1, 0, 3)])


def test_a_bind_comes_first(pool: Pool) -> None:
    channel = pool.open()
    channel.put_signal(channel.reserve(0), MessageKey(MessageKind.PLAN).pack())
    pool.threads[0].join(WAIT_S)
    assert "in place of a bind" in str(pool.ends[0])
