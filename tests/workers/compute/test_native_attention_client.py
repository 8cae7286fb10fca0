"""Slices and their messages without Python, against the same in Python: bytes for bytes, error for error.

Covers: lamina/workers/compute/attention_client.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from memory_peer import LAYERS, SPREAD, WAIT_S, placed
from torch import Tensor

from lamina import netstack
from lamina.config.partition import PARTITIONS, Partition
from lamina.converter import SlicedProgram
from lamina.models.convert import convert_model, layer_shapes
from lamina.models.load import load
from lamina.netstack import Channel, ChannelAborted, ChannelTimeout, Geometry, NoResource, PeerFault, Terms
from lamina.netstack.contract.fabric import TAG_BYTES
from lamina.ops import gemm, rows
from lamina.ops.attention import get
from lamina.ops.rows.program import ChainedSlice
from lamina.protocol.step_plan import LayerShape, MessageKey, MessageKind, New, ProtocolError, RowRange, StepPlan
from lamina.workers.compute.attention_client import AttentionClient, MemoryWorkerClient, RefusedError
from lamina.workers.compute.native_attention_client import NativeAttentionClient, open_attention_client
from lamina.workers.staging import open_staging

CPU = torch.device("cpu")
SLOTS = Geometry(slots=16, slot_bytes=1 << 20)


class Model(NamedTuple):
    """In slices: units and sends, and each as one call."""

    program: SlicedProgram
    layers: list[LayerShape]
    chained: Sequence[Callable[..., tuple[Tensor, ...]]]


@pytest.fixture(scope="module")
def model() -> Model:
    loaded = load(str(Path(__file__).parents[3] / "examples" / "tiny_lm" / "model"), dtype="bfloat16")
    program = rows.bind_rows(convert_model(loaded.model, max_model_len=512), gemm.get("native", 2))
    chained = rows.chain_slices(program).slices
    assert all(isinstance(part, ChainedSlice) for part in chained)
    return Model(program, layer_shapes(program), chained)


class Ends(NamedTuple):
    """Both ends of one channel: the pool's and a memory worker's."""

    near: Channel
    far: Channel


Connect = Callable[..., Ends]


@pytest.fixture(params=["shm", "tcp"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    fabric = netstack.open(request.param, key=b"k" * 32)

    def ends(slots: Geometry = SLOTS) -> Ends:
        listener, far = fabric.listen(), list[Channel]()
        thread = threading.Thread(target=lambda: far.append(listener.accept(timeout_s=WAIT_S)))
        thread.start()
        near = fabric.connect(listener.url, Terms(outbound=slots, inbound=slots))
        thread.join(WAIT_S)
        return Ends(near, far[0])

    yield ends
    fabric.close()


def pools(
    connect: Connect,
    partition: Partition,
    layers: list[LayerShape],
    dtype: torch.dtype,
    timeout_s: float = WAIT_S,
    *,
    guarded: bool = False,
) -> tuple[list[AttentionClient], list[list[Ends]]]:
    """A native pool and one in Python, with the ends of their channels. ``guarded``: the last one is that of who keeps
    the parity of the others.
    """
    made, ends, merging = list[AttentionClient](), list[list[Ends]](), get("native", CPU, dtype)
    for native in (True, False):
        here = [connect() for _ in range(partition.num_workers + guarded)]
        links = [MemoryWorkerClient(x.near, w, timeout_s) for w, x in enumerate(here)]
        parity = [links.pop()] if guarded else []
        made.append(
            open_attention_client(links, partition, layers, merging, dtype, open_staging(CPU), parity)
            if native
            else AttentionClient(links, partition, layers, merging, parity=parity)
        )
        ends.append(here)
    assert isinstance(made[0], NativeAttentionClient)
    return made, ends


END = b"end".ljust(TAG_BYTES, b"\0")  # a tag of no message


def come(ends: list[Ends]) -> list[tuple[bytes, bytes]]:
    """Returns the messages that every worker has been sent."""
    found = []
    for each in ends:
        each.near.put_signal(each.near.reserve(0, timeout_s=WAIT_S), END)
        while (arrival := each.far.wait_signal(timeout_s=WAIT_S)).tag != END:
            found.append((arrival.tag, bytes(arrival.data)))
            each.far.release(arrival)
        each.far.release(arrival)
    return found


PLANS = [
    [RowRange(1, 0, 3)],
    [RowRange(2, 140, 1), RowRange(1, 3, 1), RowRange(3, 260, 1)],
    [RowRange(1, 4, 2), RowRange(2, 300, 5)],
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("partition", "weights", "guarded"),
    [*((name, weights, False) for name, weights in SPREAD), ("head", [1.0, 1.0], True), ("head", [1.0] * 4, True)],
    ids=str,
)
def test_a_chain_sends_what_its_slice_sends(
    connect: Connect, model: Model, partition: str, weights: list[float], guarded: bool
) -> None:
    program, layers, chained = model
    cut = PARTITIONS[partition]([x.kv_heads for x in layers], weights)
    (native, plain), (native_ends, plain_ends) = pools(connect, cut, layers, torch.bfloat16, guarded=guarded)
    for step, ops in enumerate(PLANS):
        here = [placed(r, cut) for r in ops]
        plan = StepPlan(step=step, ops=[], rows=here)
        count = plan.num_rows
        native.begin_step(plan)
        plain.begin_step(plan)
        inputs = (torch.arange(count).view(-1, 1) + 7, torch.arange(count).view(-1, 1))
        for index in range(len(layers) + 1):
            send = ((native,), (plain,)) if index < len(layers) else ((), ())
            found, wanted = chained[index](*inputs, *send[0]), program.slices[index](*inputs, *send[1])
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            assert come(native_ends) == come(plain_ends)
            x = program.calls[min(index, len(layers) - 1)].out
            o = torch.randn((count, *x.shape), generator=torch.Generator().manual_seed(index)).to(torch.bfloat16)
            inputs = (*wanted, o)
    assert native.send_s > 0


def answers(native: AttentionClient, plan: StepPlan, layer: int, dtype: torch.dtype) -> list[bytes]:
    """An O of every worker, of random numbers."""
    native.begin_step(plan)
    shares = native.step.shares(native.layers[layer], dtype)
    made = []
    for number, share in enumerate(shares):
        draw = torch.Generator().manual_seed(number)
        x = share.messages
        partial = torch.randn(x.partial_bytes // 4, generator=draw)
        final = torch.randn(x.final_bytes // dtype.itemsize, generator=draw).to(dtype)
        made.append(b"".join(t.view(torch.uint8).numpy().tobytes() for t in (partial, final) if t.numel()))
    return made


def put(channel: Channel, key: MessageKey, data: bytes) -> None:
    slot = channel.reserve(len(data), timeout_s=WAIT_S)
    slot.data[:] = data
    channel.put_signal(slot, key.pack())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("partition", "weights"), SPREAD, ids=str)
def test_an_answer_is_what_it_is_in_python(
    connect: Connect, partition: str, weights: list[float], dtype: torch.dtype
) -> None:
    cut = PARTITIONS[partition]([x.kv_heads for x in LAYERS], weights)
    both, ends = pools(connect, cut, LAYERS, dtype)
    for step, ops in enumerate(PLANS):
        plan = StepPlan(step=step, ops=[], rows=[placed(r, cut) for r in ops])
        for layer in range(len(LAYERS)):
            found = []
            for pool, here in zip(both, ends, strict=True):
                for end, data in zip(here, answers(both[0], plan, layer, dtype), strict=True):
                    if data:
                        put(end.far, MessageKey.for_step(MessageKind.O, plan, layer), data)
                pool.begin_step(plan)
                found.append(pool.o(layer, plan.num_rows, dtype))
            assert torch.equal(*found), (step, layer)
    assert both[0].wait_s > 0


PLAN = StepPlan(step=4, ops=[New(1)], rows=[RowRange(1, 0, 3)])
IDS = torch.arange(3).view(-1, 1)


def one(
    connect: Connect, layers: list[LayerShape] = LAYERS, timeout_s: float = WAIT_S, slots: Geometry = SLOTS
) -> tuple[NativeAttentionClient, Ends]:
    """A pool of one worker, in the step of PLAN."""
    ends, dtype = connect(slots), torch.float32 if layers is LAYERS else torch.bfloat16
    whole = PARTITIONS["head"]([x.kv_heads for x in layers], [1.0])
    link = MemoryWorkerClient(ends.near, 0, timeout_s)
    pool = open_attention_client([link], whole, layers, get("native", CPU, dtype), dtype, open_staging(CPU))
    assert isinstance(pool, NativeAttentionClient)
    pool.begin_step(PLAN)
    return pool, ends


def test_a_refusal_is_its_text_and_what_follows_goes_on(connect: Connect) -> None:
    pool, ends = one(connect)
    (data,) = answers(pool, PLAN, 0, torch.float32)
    put(ends.far, MessageKey.for_step(MessageKind.REFUSED, PLAN), b"no blocks")
    put(ends.far, MessageKey.for_step(MessageKind.O, PLAN, 0), data)
    with pytest.raises(RefusedError, match="^no blocks$"):
        pool.o(0, 3, torch.float32)
    assert pool.o(0, 3, torch.float32).shape == (3, 1, 8, 16)


@pytest.mark.parametrize(
    ("key", "nbytes"),
    [
        (MessageKey.for_step(MessageKind.O, PLAN, 1), 1536),
        (MessageKey.for_step(MessageKind.KV, PLAN, 0), 1536),
        (MessageKey.for_step(MessageKind.O, PLAN, 0), 1535),
        (MessageKey(MessageKind.O, 5, 0, 0, 0), 1536),
        (MessageKey(MessageKind.O, 4, 1, 0, 0), 1536),
    ],
    ids=str,
)
def test_another_message_than_the_one_that_is_due_is_named(connect: Connect, key: MessageKey, nbytes: int) -> None:
    pool, ends = one(connect)
    put(ends.far, key, bytes(nbytes))
    with pytest.raises(ProtocolError, match=f"^memory worker 0: .* of {nbytes} B in place of "):
        pool.o(0, 3, torch.float32)


def test_waits_have_an_end(connect: Connect, model: Model) -> None:
    pool, _ = one(connect, model.layers, 0.05, Geometry(slots=1, slot_bytes=1 << 20))
    with pytest.raises(ChannelTimeout, match=r"no message within 0\.05 s$"):
        pool.o(0, 3, torch.bfloat16)
    with pytest.raises(NoResource, match=r"none of 1 slots became free within 0\.05 s$"):
        model.chained[0](IDS, IDS, pool)


def test_a_step_has_the_rows_of_its_plan(connect: Connect, model: Model) -> None:
    pool, _ = one(connect, model.layers)
    with pytest.raises(ValueError, match="^2 rows for layer 0 of a step of 3 rows: they are to be as many$"):
        model.chained[0](IDS[:2], IDS[:2], pool)


def test_a_worker_that_leaves_while_it_is_waited_for(connect: Connect) -> None:
    pool, ends = one(connect)
    threading.Timer(0.05, ends.far.close).start()
    with pytest.raises(PeerFault):
        pool.o(0, 3, torch.float32)


def test_this_side_may_stop_while_it_waits(connect: Connect) -> None:
    pool, ends = one(connect)
    threading.Timer(0.05, ends.near.abort, ["enough"]).start()
    with pytest.raises(ChannelAborted):
        pool.o(0, 3, torch.float32)
    ends.near.close()
    with pytest.raises(ChannelAborted):
        pool.o(0, 3, torch.float32)


def test_an_answer_has_the_rows_and_the_dtype_of_its_step(connect: Connect) -> None:
    pool, ends = one(connect)
    (data,) = answers(pool, PLAN, 0, torch.float32)
    put(ends.far, MessageKey.for_step(MessageKind.O, PLAN, 0), data)
    for count, dtype in ((1, torch.float32), (4, torch.float32), (3, torch.float64)):
        with pytest.raises(ValueError, match=f"^{count} rows of {dtype} of a step of 3 rows of torch.float32$"):
            pool.o(0, count, dtype)
    assert pool.o(0, 3, torch.float32).shape == (3, 1, 8, 16)


def test_tensors_of_other_rows_are_no_chain(model: Model) -> None:
    shapes = [(t.shape, t.dtype) for t in model.program.cuts[-1].tensors]
    x = [torch.zeros((4, *shape), dtype=dtype) for shape, dtype in shapes]
    o = torch.zeros((1, *model.program.calls[-1].out.shape), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="^rows of "):
        model.chained[-1](*x, o)


def test_a_long_wait_is_no_short_one(connect: Connect) -> None:
    pool, ends = one(connect, timeout_s=1e12)
    (data,) = answers(pool, PLAN, 0, torch.float32)
    threading.Timer(0.05, put, [ends.far, MessageKey.for_step(MessageKind.O, PLAN, 0), data]).start()
    assert pool.o(0, 3, torch.float32).shape == (3, 1, 8, 16)


def test_a_step_is_of_one_pool(connect: Connect) -> None:
    one_pool, _ = one(connect)
    other, _ = one(connect)
    with pytest.raises(ValueError, match="^a step of another pool$"):
        other.pool.select(one_pool.step.native)


def test_a_step_of_no_rows_sends_and_awaits_nothing(connect: Connect) -> None:
    pool, ends = one(connect)
    pool.begin_step(StepPlan(step=5, ops=[], rows=[]))
    assert pool.o(0, 0, torch.float32).shape == (0, 1, 8, 16)
    assert come([ends]) == []
