"""The messages of recurrent layers: heads and rows of each memory worker, and the places of tensors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lamina.config.partition import HeadShare, by_head, by_request, state_shares
from lamina.ops.recurrence.spec import RecurrenceSpec
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.mixers import MixerShape
from lamina.protocol.step_plan import ProtocolError, RowRange
from lamina.workers.mixer_messages import (
    ALIGNED,
    heads_of,
    largest_messages,
    mixer_pieces,
    spans,
    state_bytes,
)

SPEC = RecurrenceSpec(kind="mamba2", heads=6, width=4, groups=2, heads_per_group=3, key_dim=8, value_dim=16, bias=True)


def mixer(shares: list[HeadShare], dtypes: tuple[str, ...] = ("bfloat16", "float32")) -> MixerShape:
    operands = ["float32"] * len(SPEC.static_shapes)
    return MixerShape(SPEC.encode(), list(dtypes), operands, shares)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_heads_are_dealt_out_once_and_messages_have_their_channels(workers: int) -> None:
    weights = [1.0] * workers
    shape = mixer(state_shares("head", by_head([4], weights), heads_of(mixer([])), weights))
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
