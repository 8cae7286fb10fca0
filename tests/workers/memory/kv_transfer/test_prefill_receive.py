"""K and V of prefill workers on a memory worker: the same bits as its own steps, taken in gaps, never starved."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from memory_peer import LAYERS, SCHEMES, WAIT_S, Model, Peer, Pool, RefusedError, bind, model, placed, pools
from msgspec import structs

from lamina.netstack import Arrival, ChannelTimeout, Slot
from lamina.netstack.checksum import checksum
from lamina.protocol.prefill_stages import max_grants_in_flight, stage_layers
from lamina.protocol.step_plan import (
    Fork,
    Free,
    MessageKey,
    MessageKind,
    New,
    PrefillGrant,
    ProtocolError,
    RowRange,
    StepPlan,
    Truncate,
)
from lamina.workers.compute.attention_client import AttentionClient
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer.prefill_receive import DECODE_GAP_S, IDLE_S, MAX_WAIT_S, PrefillReceiver
from lamina.workers.memory.kv_transfer.transfer_link import MessageType, pack_header
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.prefill.kv_sender import KvSender

CPU = torch.device("cpu")
pool = pools(*SCHEMES)


class Prefiller:
    """A prefill worker's side, without a model: sends the K and V that a Model's steps would."""

    def __init__(self, peers: list[Peer], like: Model, batch: int = 7) -> None:
        self.peers, self.like, self.batch = peers, like, batch
        partition = peers[0].bind.partition
        self.links = [KvSender(p.channel, w, WAIT_S) for w, p in enumerate(peers)]
        self.pool = AttentionClient(self.links, partition, like.layers, like.pool.backend)

    def send(self, step: int, rows: RowRange, layers: Sequence[int] | None = None) -> None:
        rows = placed(rows, self.peers[0].bind.partition)
        self.pool.begin_step(StepPlan(batch=self.batch, step=step, ops=[], rows=[rows]))
        for layer in range(len(self.like.layers)) if layers is None else layers:
            _, k, v = self.like.rows([rows], layer)
            self.pool.kv(layer, k.unsqueeze(2), v.unsqueeze(2))

    def await_stored(self, step: int) -> None:
        for link in self.links:
            assert link.wait_until_stored(step, WAIT_S)


def with_prefill(
    pool: Pool, workers: int = 1, partition: str = "head", count: int = 1
) -> tuple[Model, list[Prefiller]]:
    """Memory workers that are bound, and ``count`` prefill workers that have joined them."""
    binds = [bind(LAYERS, [1.0] * workers, w, partition, prefill_workers=count) for w in range(workers)]
    peers, joined = list[Peer](), list[list[Peer]]()
    for b in binds:
        peers.append(pool.connect(b))
        joined.append([pool.join(peers[-1], 1 + i) for i in range(count)])
    decoding = Model(peers, binds[0].partition, LAYERS, "float32")
    return decoding, [Prefiller([j[i] for j in joined], decoding) for i in range(count)]


@pytest.mark.no_retry
@pytest.mark.parametrize(("workers", "partition"), [(1, "head"), (2, "head"), (3, "token"), (2, "request")])
def test_decoding_behind_granted_tokens_has_the_bits_of_the_plain_way(pool: Pool, workers: int, partition: str) -> None:
    """Chunks of prompts longer than the windows, of three sequences that lie in different KV shards."""
    plain = model(pool, [1.0] * workers, partition=partition)
    decoding, (prefiller,) = with_prefill(pool, workers, partition)
    step = 0
    for sequence in range(3):
        for first, count in ((0, 60), (60, 60), (120, 10 + sequence)):
            ops = [New(sequence)] if not first else []
            rows = RowRange(sequence, first, count)
            plain.step(step, [*ops], [rows])
            decoding.step(step, [*ops, PrefillGrant(sequence, first, count, 0, step)], [])
            prefiller.send(step, rows)
            prefiller.await_stored(step)
            step += 1
    for more in range(3):
        rows = [RowRange(s, 130 + s + more, 1) for s in range(3)]
        want, got = (m.step(step + more, [], rows) for m in (plain, decoding))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_steps_go_on_while_a_prompt_arrives_layer_by_layer(pool: Pool) -> None:
    plain = model(pool)
    decoding, prefillers = with_prefill(pool, count=2)
    for m in (plain, decoding):
        m.step(0, [New(1)], [RowRange(1, 0, 5)])
    plain.step(1, [New(2), New(3)], [RowRange(2, 0, 34), RowRange(3, 0, 30)])
    decoding.step(1, [New(2), New(3), PrefillGrant(2, 0, 34, 0, 0), PrefillGrant(3, 0, 30, 1, 0)], [])
    for layer in range(len(LAYERS)):
        rows = [RowRange(1, 5 + layer, 1)]
        for prefiller, sent in zip(prefillers, (RowRange(2, 0, 34), RowRange(3, 0, 30)), strict=True):
            prefiller.send(0, sent, [layer])
        want, got = (m.step(2 + layer, [], rows) for m in (plain, decoding))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for prefiller in prefillers:
        prefiller.await_stored(0)
    rows = [RowRange(1, 5 + len(LAYERS), 1), RowRange(2, 34, 1), RowRange(3, 30, 1)]
    want, got = (m.step(20, [], rows) for m in (plain, decoding))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("ops", "rows", "words"),
    [
        ([], [RowRange(1, 9, 1)], "sequence 1 has rows"),
        ([Free(1)], [], "sequence 1 is freed"),
        ([Truncate(1, 0)], [], "sequence 1 is freed, truncated or shifted"),
        ([Fork(2, 1, 16)], [], "sequence 1 is forked"),
        ([New(2), PrefillGrant(2, 0, 4, 0, 1)], [RowRange(2, 4, 1)], "sequence 2 has rows"),
        ([New(2), PrefillGrant(2, 0, 4, 0, 1), Free(2)], [], "sequence 2 is freed"),
        ([New(2), PrefillGrant(2, 0, 4, 0, 1), Truncate(2, 0)], [], "sequence 2 is freed, truncated or shifted"),
        ([New(2), PrefillGrant(2, 0, 4, 1, 1)], [], "prefill worker 1 of 1"),
        ([New(2), PrefillGrant(2, 1, 4, 0, 1)], [], "sequence 2 has 0 tokens"),
        ([New(2), PrefillGrant(2, 0, 65, 0, 1)], [], "more than 64 rows"),
        ([PrefillGrant(1, 9, 4, 0, 1), PrefillGrant(1, 13, 4, 0, 2)], [], "more than 2 grants"),
        ([New(2), PrefillGrant(2, 500, 20, 0, 1)], [], "at most 512 tokens"),
    ],
    ids=str,
)
def test_plans_that_contradict_grants_are_refused_whole(
    pool: Pool, ops: list[PrefillGrant], rows: list[RowRange], words: str
) -> None:
    decoding, (prefiller,) = with_prefill(pool)
    (peer,) = decoding.peers
    decoding.step(0, [New(1), PrefillGrant(1, 0, 9, 0, 0)], [])
    peer.plan(StepPlan(step=1, ops=[*ops], rows=rows))
    with pytest.raises(RefusedError, match=words):
        peer.receive(MessageKey(MessageKind.O, 1, layer=-1))
    prefiller.send(0, RowRange(1, 0, 9))
    prefiller.await_stored(0)
    assert len(decoding.step(2, [], [RowRange(1, 9, 1)])) == len(LAYERS), "all is well once they have come"


def test_a_plan_that_is_sent_again_grants_nothing_more(pool: Pool) -> None:
    decoding, (prefiller,) = with_prefill(pool)
    for _ in range(2):
        decoding.step(0, [New(1), PrefillGrant(1, 0, 9, 0, 0)], [])
    prefiller.send(0, RowRange(1, 0, 9))
    prefiller.await_stored(0)
    assert len(decoding.step(1, [], [RowRange(1, 9, 1)])) == len(LAYERS)


LAYER_BYTES = 9 * 4 * 32 * 4  # K and V of 9 tokens in the first layer


@pytest.mark.parametrize(
    ("header", "nbytes", "error"),
    [
        ((MessageType.PART, 0, 1), LAYER_BYTES, "part 0 of transfer 1 came, and is not expected"),
        ((MessageType.PART, 1, 0), LAYER_BYTES, f"part 1 of transfer 0 with {LAYER_BYTES} bytes, not part 0"),
        ((MessageType.PART, 0, 0), 8, f"part 0 of transfer 0 with 8 bytes, not part 0 of {LAYER_BYTES}"),
        ((MessageType.REQUEST, 0, 0), LAYER_BYTES, "part 0 of transfer 0 is a message of type 2"),
        ((MessageType.REFUSED, 0, 0), 8, "what was granted is refused: "),
    ],
    ids=str,
)
@pytest.mark.parametrize("damaged", [False, True], ids=["", "damaged"])
def test_other_messages_than_those_granted_end_the_epoch(
    pool: Pool, header: tuple[int, int, int], nbytes: int, error: str, *, damaged: bool
) -> None:
    decoding, (prefiller,) = with_prefill(pool)
    decoding.step(0, [New(1), PrefillGrant(1, 0, 9, 0, 0)], [])
    channel = prefiller.peers[0].channel
    slot = channel.reserve(nbytes, timeout_s=WAIT_S)
    slot.data[:] = bytes(nbytes)
    channel.put_signal(slot, pack_header(*header, bytes(16) if damaged else checksum(bytes(nbytes))))
    pool.threads[-1].join(WAIT_S)
    (end,) = pool.ends
    assert isinstance(end, ProtocolError)
    assert ("is damaged" if damaged else error) in str(end)


class FakeChannel:
    """Has messages to take, and keeps what it is sent."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        self.arrivals = arrivals
        self.looks = 0
        self.told: list[bytes] = []

    def wait_signal(self, *, timeout_s: float) -> Arrival:
        assert timeout_s == 0.0, "decoding must not wait for prompts"
        self.looks += 1
        if not self.arrivals:
            raise ChannelTimeout("nothing")
        return self.arrivals.pop(0)

    def release(self, arrival: Arrival) -> None: ...

    def reserve(self, nbytes: int, *, timeout_s: float) -> Slot:
        return Slot(memoryview(bytearray(nbytes)), 0)

    def put_signal(self, slot: Slot, tag: bytes) -> None:
        self.told.append(tag)


def part(step: int, index: int, data: bytes) -> bytes:
    """The header of one part of a step's K and V."""
    return pack_header(MessageType.PART, index, step, checksum(data))


def granted(counts: Sequence[int], stages: int = 1) -> tuple[PrefillReceiver, list[FakeChannel], list[float]]:
    """One grant of ``counts[i]`` tokens for prefill worker i, or for that group of so many, whose messages are all
    there; and the clock's time.
    """
    told = structs.replace(bind(LAYERS), prefill_workers=len(counts) * stages, prefill_pipeline=stages)
    store, now = KvStore(told, CPU), [100.0]
    grants = PrefillReceiver(store, Counters(), clock=lambda: now[0])
    channels = []
    ops = [New(i) for i in range(len(counts))] + [PrefillGrant(i, 0, n, i, 3) for i, n in enumerate(counts)]
    for n in counts:
        sizes = [4 * n * x.kv_heads * (x.qk_dim + x.v_dim) for x in LAYERS]
        for stage in range(stages):
            own = stage_layers(len(LAYERS), stages, stage)
            data = [bytes(sizes[layer]) for layer in own]
            channels.append(FakeChannel([Arrival(0, part(3, i, x), memoryview(x)) for i, x in enumerate(data)]))
            grants.add_sender(channels[-1])  # type: ignore[arg-type]
    plan = StepPlan(step=0, ops=[*ops], rows=[])
    grants.check_plan(plan)
    store.apply_plan(plan)
    grants.expect(plan)
    return grants, channels, now


def test_who_is_idle_takes_what_is_there_and_who_is_busy_a_message_now_and_then() -> None:
    grants, (channel,), now = granted([5])
    assert grants.poll_timeout_s == DECODE_GAP_S
    grants.receive_one()
    assert grants.poll_timeout_s == 0.0, "there may be more"
    for _ in range(10):
        grants.receive_overdue()
    assert channel.looks == 1, "decoding has just let one pass"
    now[0] += 2 * MAX_WAIT_S
    grants.receive_overdue()
    grants.receive_overdue()
    assert (channel.looks, len(channel.arrivals)) == (2, len(LAYERS) - 2)
    while channel.arrivals:
        assert grants.is_open
        grants.receive_one()
    assert not grants.is_open
    assert grants.poll_timeout_s == IDLE_S
    assert channel.told == [part(3, 0, b"")]


def test_of_several_stages_the_last_one_hears_when_all_have_sent_their_layers() -> None:
    grants, channels, _ = granted([5], stages=2)
    first, last = channels
    held, first.arrivals = first.arrivals, []
    while last.arrivals:
        grants.receive_one()
    assert (first.told, last.told, grants.is_open) == ([], [], True), "the first one has sent nothing yet"
    first.arrivals = held
    while first.arrivals:
        grants.receive_one()
    assert not grants.is_open
    assert (first.told, last.told) == ([], [part(3, 0, b"")])


def test_stages_share_all_layers_and_more_chunks_are_under_way() -> None:
    for layers, stages in ((8, 3), (4, 4), (5, 2), (1, 1)):
        each = [stage_layers(layers, stages, s) for s in range(stages)]
        assert [layer for own in each for layer in own] == list(range(layers))
        assert max(map(len, each)) - min(map(len, each)) <= 1
    with pytest.raises(ValueError, match="--prefill-pipeline 5: the model has 4 layers of attention"):
        stage_layers(4, 5, 0)
    assert [max_grants_in_flight(stages, [0]) for stages in (1, 2, 4)] == [2, 3, 5]
    assert max_grants_in_flight(4, [0, 16]) == 2, (
        "behind a window, a third chunk may give blocks back that the first fills"
    )


def test_an_empty_look_waits_for_decoding_again() -> None:
    grants, (channel,), _ = granted([5])
    channel.arrivals.clear()
    grants.receive_one()
    assert grants.is_open
    assert grants.poll_timeout_s == DECODE_GAP_S


def test_prefill_workers_take_turns() -> None:
    grants, channels, _ = granted([5, 7, 3])
    seen = []
    for _ in range(6):
        before = [len(c.arrivals) for c in channels]
        grants.receive_one()
        seen += [i for i, c in enumerate(channels) if len(c.arrivals) < before[i]]
    assert seen == [0, 1, 2, 0, 1, 2]


class FakePrefixes:
    """Keeps what is to be sent: the step, the tokens before it, the prefill worker, and the layers."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, int, range]] = []

    def send(self, grant: PrefillGrant, worker: int, layers: range) -> None:
        self.sent.append((grant.step, grant.num_fetched, worker, layers))


def with_stored(groups: int, stages: int = 1) -> tuple[KvStore, PrefillReceiver, FakePrefixes]:
    """A store with a sequence of 32 tokens for each group, and what may be sent of them."""
    told = structs.replace(bind(LAYERS), prefill_workers=groups * stages, prefill_pipeline=stages)
    store, prefixes = KvStore(told, CPU), FakePrefixes()
    grants = PrefillReceiver(store, Counters(), prefixes=prefixes)  # type: ignore[arg-type]
    for _ in range(groups * stages):
        grants.add_sender(FakeChannel([]))  # type: ignore[arg-type]
    rows = [RowRange(sequence, 0, 32) for sequence in range(groups)]
    store.apply_plan(StepPlan(step=0, ops=[New(sequence) for sequence in range(groups)], rows=rows))
    return store, grants, prefixes


def test_a_plan_that_is_sent_again_sends_no_stored_tokens_again() -> None:
    store, grants, prefixes = with_stored(1)
    first = StepPlan(step=1, ops=[PrefillGrant(0, 32, 4, 0, 7, num_fetched=32)], rows=[])
    more = StepPlan(step=2, ops=[PrefillGrant(0, 36, 4, 0, 8)], rows=[])
    for plan, is_again in ((first, False), (first, True), (more, False), (first, True)):
        grants.check_plan(plan)
        if not is_again:
            store.apply_plan(plan)
        grants.expect(plan)
    assert prefixes.sent == [(7, 32, 0, range(len(LAYERS)))], "with its first chunk, and once"


def test_each_stage_of_the_granted_group_is_sent_its_own_layers() -> None:
    """The number of each transfer is the step in which these stages fetch."""
    store, grants, prefixes = with_stored(2, stages=2)
    plan = StepPlan(
        step=1,
        ops=[PrefillGrant(0, 32, 4, 0, 3, num_fetched=16), PrefillGrant(1, 32, 4, 1, 5, num_fetched=32)],
        rows=[],
    )
    grants.check_plan(plan)
    store.apply_plan(plan)
    grants.expect(plan)
    own = [stage_layers(len(LAYERS), 2, stage) for stage in range(2)]
    assert own[0] != own[1]
    assert prefixes.sent == [(3, 16, 0, own[0]), (3, 16, 1, own[1]), (5, 32, 2, own[0]), (5, 32, 3, own[1])]
