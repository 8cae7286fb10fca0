"""The messages of recurrent layers: heads and rows of each memory worker, and the places of tensors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lamina.config.engine_config import KVOptions
from lamina.config.partition import HeadShare, by_head, by_request, state_shares
from lamina.ops.recurrence.parts import Part
from lamina.ops.recurrence.spec import RecurrenceSpec
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.mixers import MixerShape
from lamina.protocol.reshard import state_transfers
from lamina.protocol.step_plan import BindRequest, LayerShape, ProtocolError, RowRange, SurvivingKv
from lamina.workers.memory.state_store import bytes_of_version, num_slots
from lamina.workers.mixer_messages import (
    ALIGNED,
    largest_messages,
    mixer_pieces,
    spans,
    state_bytes,
)
from lamina.workers.mixer_shares import with_shares

SPEC = RecurrenceSpec(kind="mamba2", heads=6, width=4, groups=2, heads_per_group=3, key_dim=8, value_dim=16, bias=True)


def mixer(shares: list[HeadShare], dtypes: tuple[str, ...] = ("bfloat16", "float32")) -> MixerShape:
    operands = ["float32"] * len(SPEC.static_shapes)
    return MixerShape(SPEC.encode(), list(dtypes), operands, shares)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_heads_are_dealt_out_once_and_messages_have_their_channels(workers: int) -> None:
    weights = [1.0] * workers
    shape = with_shares(mixer([]), "head", by_head([4], weights), weights)
    pieces = [piece for w in range(workers) if (piece := mixer_pieces([shape], w)[0]) is not None]
    heads = [(piece.part.first, piece.part.first + piece.spec.heads) for piece in pieces]
    assert [head for run in heads for head in range(*run)] == list(range(SPEC.heads))
    for piece in pieces:
        x, dt = piece.inputs(7)
        assert (x.shape, dt.shape) == ((7, piece.spec.channels), (7, piece.spec.heads))
        assert (x.dtype, dt.dtype) == (torch.bfloat16, torch.float32)
        assert piece.output(7).shape == (7, piece.spec.heads * SPEC.value_dim)
        assert piece.has(RowRange(1, 0, 1))
    most = largest_messages([shape], workers, 7)
    assert most.sent == max(max(p.inputs(7)[-1].stop, p.operands[-1].stop) for p in pieces)
    assert state_bytes(mixer_pieces([shape], 0)) == pieces[0].spec.state_bytes


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 32, 33])
def test_a_convolution_is_cut_between_runs_of_channels_while_each_worker_gets_one(workers: int) -> None:
    spec, weights = RecurrenceSpec(kind="convolution", heads=2000, width=3), [1.0] * workers
    shape = with_shares(MixerShape(spec.encode(), ["float32"], ["float32"]), "head", by_head([4], weights), weights)
    starts = [share.head_start for share in shape.shares]
    assert [share.owners for share in shape.shares] == [[worker] for worker in range(workers)]
    assert (shape.shares[-1].head_stop, any(start % spec.run for start in starts)) == (2000, workers > 32)


def test_whole_sequences_go_to_the_owner_of_their_shard() -> None:
    weights = [1.0, 1.0]
    partition = by_request([4], weights)
    shape = mixer(state_shares("request", partition, SPEC.heads, weights))
    (one,), (other,) = (mixer_pieces([shape], worker) for worker in range(2))
    assert one is not None
    assert other is not None
    assert one.spec == other.spec == SPEC
    for shard in range(partition.num_kv_shards):
        row = RowRange(1, 0, 1, KvLocation(shard))
        assert one.has(row) != other.has(row)


def test_tensors_of_a_message_are_aligned_and_do_not_overlap() -> None:
    places = spans([(torch.bfloat16, (3, 5)), (torch.float32, (3, 2)), (torch.float16, (1, 1))])
    assert all(place.start % ALIGNED == 0 for place in places)
    assert all(left.stop <= right.start for left, right in pairwise(places))
    data = memoryview(bytearray(places[-1].stop))
    places[1].of(data).fill_(2.0)
    assert not places[0].of(data).any()
    assert places[1].of(data).tolist() == [[2.0, 2.0]] * 3


def test_partitions_by_tokens_and_shapes_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="--partition token divides sequences by tokens"):
        state_shares("token", by_head([4], [1.0, 1.0]), 6, [1.0, 1.0])
    for bad in (
        mixer([HeadShare(0, 9, [0])]),
        mixer([HeadShare(0, 6, [0])], ("float32",)),
        mixer([], ("int8", "int8")),
    ):
        with pytest.raises(ProtocolError, match="not a recurrent layer"):
            mixer_pieces([bad], 0)
    with pytest.raises(ProtocolError, match="not a recurrent layer"):
        mixer_pieces([MixerShape("{}", [], [], [])], 0)


def bind(kv_bytes: int, **options: int) -> BindRequest:
    """A Bind of one worker, for 4 sequences of 64 tokens: 65,536 bytes of KV and 20 versions at most."""
    shape = mixer([HeadShare(0, SPEC.heads, [0])])
    chosen = {"state_slots": 20, "state_versions": 3, "num_sequences": 4, "max_rows": 8, "max_model_len": 48, **options}
    return BindRequest(
        worker=0, partition=by_head([4], [1.0]), layers=[LayerShape(4, 4, 16, 16, "")], dtype="float32",
        kv=KVOptions(block_size=16), kv_bytes=kv_bytes, mixers=[shape], **chosen,
    )  # fmt: skip


def test_a_later_epoch_has_room_for_as_many_states_as_the_first_one() -> None:
    """The compute worker names KV and states apart at first, and then the bytes that each worker has."""
    each, kv = bytes_of_version(bind(0)), 4 * 2 * 16 * 4 * 64 * 4
    for slots in (3, 11, 20):
        nbytes = kv + slots * each
        found = {num_slots(bind(nbytes, max_kv_bytes=most), nbytes) for most in (0, kv, 2 * kv)}
        assert found == {max(slots, min(20, nbytes // 2 // each))}
    with pytest.raises(ValueError, match="memory worker 0: the states of one sequence take"):
        num_slots(bind(0), 5 * each)


@pytest.mark.parametrize("kind", ["head", "request"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4), (5, 1)])
def test_moves_of_states_bring_each_head_to_its_new_owner_once(kind: str, before: int, after: int) -> None:
    """States are the numbers of their places: what all workers of the other partition get must be whole again."""
    rules, keep = {"head": by_head, "request": by_request}, list[SurvivingKv]()
    shares = list[list[HeadShare]]()
    for count in (before, after):
        partition = rules[kind]([4], [1.0] * count)
        shares.append(state_shares(kind, partition, SPEC.heads, [1.0] * count))
    for sequence in range(4):
        places = [KvLocation(sequence % len(share[0].owners)) for share in shares]
        keep.append(SurvivingKv(sequence, 9, places[1], places[0], snapshots=[3]))
    whole = {(k.sequence, n): torch.randn(SPEC.state_size) for k in keep for n in (3, 9)}
    got = dict[tuple[int, int, int], torch.Tensor]()  # worker, sequence, tokens
    for source, target, start, stop, versions in state_transfers(*shares, keep):
        had, wanted = (_part_of(share, worker) for share, worker in zip(shares, (source, target), strict=True))
        out, into = (Part.of(p.spec, start - p.first, stop - start) for p in (had, wanted))
        for sequence, lengths in versions.items():
            assert lengths == [3, 9]
            for n in lengths:
                state = got.setdefault((target, sequence, n), torch.full((wanted.spec.state_size,), torch.nan))
                into.put_state(out.take_state(had.take_state(whole[sequence, n])), state)
    for each in keep:
        owners = {share.owners[each.location.kv_shard % len(share.owners)] for share in shares[1]}
        for owner, n in ((owner, n) for owner in owners for n in (3, 9)):
            expected = _part_of(shares[1], owner).take_state(whole[each.sequence, n])
            there = torch.isfinite(got[owner, each.sequence, n])
            assert int(there.sum()) == numbers_of(_part_of(shares[1], owner).spec), "all but what aligns"
            assert torch.equal(got[owner, each.sequence, n][there], expected[there])
    assert len(got) == sum(len({s.owners[k.location.kv_shard % len(s.owners)] for s in shares[1]}) * 2 for k in keep)


def numbers_of(spec: RecurrenceSpec) -> int:
    return (spec.width - 1) * spec.channels + spec.heads * spec.key_dim * spec.value_dim


def _part_of(shares: list[HeadShare], worker: int) -> Part:
    (share,) = [share for share in shares if worker in share.owners]
    return Part.of(SPEC, share.head_start, share.head_stop - share.head_start)
