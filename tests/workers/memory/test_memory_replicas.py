"""Several replicas and one memory worker: each layer's messages come from one of them, its O goes to the next."""

from __future__ import annotations

import pytest
import torch
from memory_peer import LAYERS, SCHEMES, WAIT_S, Peer, Pool, RefusedError, bind, model, pools, shape
from torch import Tensor

from lamina.netstack import PeerFault
from lamina.protocol.step_plan import (
    JoinRequest,
    MessageKey,
    MessageKind,
    New,
    ProtocolError,
    RowRange,
    StepPlan,
    encode,
)
from lamina.scheduler.rotation.pipeline import route

pool = pools(*SCHEMES)


def replicas(pool: Pool, count: int) -> list[Peer]:
    first = pool.connect(bind(LAYERS, replicas=count))
    return [first, *(pool.join(first, r) for r in range(1, count))]


def tensors(data: bytes, like: Tensor, width: int) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(*like.shape[:2], width)


@pytest.mark.no_retry
@pytest.mark.parametrize("n", [3, 4])
def test_a_round_of_all_batches_gives_the_bits_of_one_replica(pool: Pool, n: int) -> None:
    alone = model(pool)
    peers = replicas(pool, n - 1)
    used = set()
    for step in range(3):
        rows = [[RowRange(b, 0 if step == 0 else 4 + step, 5 if step == 0 else 1)] for b in range(n)]
        plans = []
        for b in range(n):
            source, reply_to = route(b, step, len(LAYERS), n)
            plans.append(
                StepPlan(step=step, batch=b, ops=[New(b)] if step == 0 else [], rows=rows[b], has_more=b < n - 1,
                         send_from=source, reply_to=reply_to)
            )  # fmt: skip
        want = [alone.step(3 * b + step, p.ops, p.rows) for b, p in enumerate(plans)]
        for plan in plans:
            peers[0].plan(plan)
        for layer in range(len(LAYERS)):
            for b, plan in enumerate(plans):
                q, k, v = alone.rows(plan.rows, layer)
                key = MessageKey(MessageKind.Q, step, b, 0, layer)
                source, reader = peers[plan.send_from[layer]], peers[plan.reply_to[layer]]
                used.add((plan.send_from[layer], plan.reply_to[layer]))
                source.send_tensors(key, q)
                source.send_tensors(key._replace(kind=MessageKind.KV), k, v)
                got = tensors(reader.receive(key._replace(kind=MessageKind.O)), q, v.shape[2])
                assert torch.equal(got, want[b][layer])
    assert len(used) == n - 1, "every replica sends to the next one"


def test_plans_of_the_next_round_may_come_while_a_layer_is_awaited(pool: Pool) -> None:
    alone, (first, second) = model(pool), replicas(pool, 2)
    source, reply_to = route(0, 0, len(LAYERS), 3)
    plan = StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, 3)], send_from=source, reply_to=reply_to)
    assert source[:2] == [0, 1]
    first.plan(plan)
    first.plan(StepPlan(step=1, ops=[], rows=[]))
    for layer in range(len(LAYERS)):
        q, k, v = alone.rows(plan.rows, layer)
        key = MessageKey(MessageKind.Q, 0, 0, 0, layer)
        peers = [(first, second)[r] for r in (source[layer], reply_to[layer])]
        peers[0].send_tensors(key, q)
        peers[0].send_tensors(key._replace(kind=MessageKind.KV), k, v)
        peers[1].receive(key._replace(kind=MessageKind.O))
    first.plan(StepPlan(step=2, ops=[New(1)], rows=[]))  # refused, as the sequence exists: so both were served
    got = first.channel.wait_signal(timeout_s=WAIT_S)
    assert MessageKey.unpack(got.tag).kind == MessageKind.REFUSED
    assert pool.workers[-1].stats()["steps"] == 2


def test_too_many_plans_before_their_round_end_the_session(pool: Pool) -> None:
    first, _ = replicas(pool, 2)
    source, reply_to = route(1, 0, len(LAYERS), 3)
    first.plan(StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, 3)], send_from=[0, *source[1:]], reply_to=reply_to))
    flood = (first.plan(StepPlan(step=step, ops=[], rows=[])) for step in range(1, 100))
    with pytest.raises(PeerFault, match="plans in place of a layer message"):
        list(flood)


def test_a_replica_of_another_model_is_turned_away(pool: Pool) -> None:
    first = pool.connect(bind(LAYERS, replicas=2))
    with pytest.raises(PeerFault, match="another model"):
        pool.join(first, 1, [shape(16)])
    pool.threads[-1].join(WAIT_S)
    assert isinstance(pool.ends[0], ProtocolError)


@pytest.mark.parametrize("replica", [0, 2])
def test_a_replica_that_is_not_due_is_turned_away(pool: Pool, replica: int) -> None:
    with pytest.raises(PeerFault, match="when worker 1 was due"):
        pool.join(pool.connect(bind(LAYERS, replicas=3)), replica)


def test_nobody_sends_before_all_have_joined(pool: Pool) -> None:
    first = pool.connect(bind(LAYERS, replicas=2))
    first.plan(StepPlan(step=0, ops=[], rows=[]))
    with pytest.raises(PeerFault, match="before all have joined"):
        first.channel.wait_signal(timeout_s=WAIT_S)


def test_the_loss_of_a_replica_before_all_have_joined_is_noticed(pool: Pool) -> None:
    first = pool.connect(bind(LAYERS, replicas=2))
    first.channel.close()
    pool.threads[-1].join(WAIT_S)
    assert isinstance(pool.ends[0], PeerFault)


def test_a_join_without_a_bind_is_turned_away(pool: Pool) -> None:
    channel = pool.open()
    data = encode(JoinRequest(peer_number=1, layers=LAYERS))
    slot = channel.reserve(len(data), timeout_s=WAIT_S)
    slot.data[:] = data
    channel.put_signal(slot, MessageKey(MessageKind.JOIN).pack())
    with pytest.raises(PeerFault, match="in place of a bind"):
        channel.wait_signal(timeout_s=WAIT_S)


NAMES = ["compute-0", "compute-1"]


def test_only_the_workers_that_the_driver_names_may_join(pool: Pool) -> None:
    """Each as its own number: another one that holds the key is turned away."""
    first = pool.connect(bind(LAYERS, replicas=2), NAMES[0], NAMES)
    with pytest.raises(PeerFault, match="worker 1 is 'compute-1' by the driver, and 'compute-0' came for it"):
        pool.join(first, 1, name=NAMES[0])


def test_the_workers_that_the_driver_names_join(pool: Pool) -> None:
    first = pool.connect(bind(LAYERS, replicas=2), NAMES[0], NAMES)
    assert pool.join(first, 1, name=NAMES[1]).bound == first.bound


def test_who_binds_is_the_first_that_the_driver_names(pool: Pool) -> None:
    with pytest.raises(RefusedError, match="worker 0 is 'compute-0' by the driver, and 'compute-1' came for it"):
        pool.connect(bind(LAYERS, replicas=2), NAMES[1], NAMES)
