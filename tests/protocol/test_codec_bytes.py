"""The bytes of messages, counted by hand: two sides that make the same mistake agree, and these numbers do not."""

from __future__ import annotations

from lamina.config.partition import KvShards, Partition, by_head, by_request, by_token
from lamina.protocol.codec import (
    LayerGroup,
    MaxMessageSizes,
    RowCounts,
    RowLayout,
    TensorSpan,
    WorkerPiece,
    count_rows,
    max_message_sizes,
    max_nodes,
    messages,
    worker_pieces,
)
from lamina.protocol.kv_placement import KvPlacement
from lamina.protocol.step_plan import LayerShape, RowRange

NARROW = LayerShape(q_heads=6, kv_heads=3, qk_dim=8, v_dim=4, spec="")
WIDE = LayerShape(q_heads=12, kv_heads=3, qk_dim=8, v_dim=4, spec="")


def test_every_tensor_of_every_message_has_its_place() -> None:
    pieces = WorkerPiece(0, 0, 2, 3, 4, 5), WorkerPiece(1, 2, 3, 3, 4, 5)
    found = messages(pieces, (RowCounts(2, 3, 1, 7), RowCounts(1)), 2)
    assert found.q == (
        (TensorSpan(0, 48, (2, 6, 4)), TensorSpan(48, 120, (3, 6, 4))),
        (TensorSpan(120, 132, (1, 3, 4)), TensorSpan(132, 132, (0, 3, 4))),
    )
    assert found.kv == (
        (
            TensorSpan(0, 16, (2, 2, 4)),
            TensorSpan(16, 36, (2, 2, 5)),
            TensorSpan(36, 44, (1, 2, 4)),
            TensorSpan(44, 54, (1, 2, 5)),
        ),
        (
            TensorSpan(54, 58, (1, 1, 4)),
            TensorSpan(58, 63, (1, 1, 5)),
            TensorSpan(63, 63, (0, 1, 4)),
            TensorSpan(63, 63, (0, 1, 5)),
        ),
    )
    assert found.partial == (
        (TensorSpan(0, 210, (7, 6, 5)), TensorSpan(210, 252, (7, 6))),
        (TensorSpan(252, 252, (0, 3, 5)), TensorSpan(252, 252, (0, 3))),
    )
    assert found.final == (TensorSpan(0, 60, (2, 6, 5)), TensorSpan(60, 75, (1, 3, 5)))
    sizes = found.q_bytes, found.kv_bytes, found.partial_bytes, found.final_bytes, found.o_bytes
    assert sizes == (2 * 132, 2 * 63, 4 * 252, 2 * 75, 4 * 252 + 2 * 75)
    assert [part.is_present for part in found.q[1]] == [True, False]


def test_layers_of_one_window_and_the_same_lanes_share_a_group() -> None:
    partition = by_head([3, 3, 3], [2.0, 1.0])
    groups = [LayerGroup(5, KvShards())]
    assert worker_pieces([NARROW, WIDE, NARROW], [5, 0, 5], partition, 0, groups) == [
        (WorkerPiece(0, 0, 2, 2, 8, 4),), (WorkerPiece(1, 0, 2, 4, 8, 4),), (WorkerPiece(0, 0, 2, 2, 8, 4),)
    ]  # fmt: skip
    assert groups == [LayerGroup(5, KvShards()), LayerGroup(0, KvShards())]
    assert worker_pieces([NARROW], [0], partition, 1, groups) == [(WorkerPiece(1, 2, 3, 2, 8, 4),)]
    assert len(groups) == 2


def test_rows_of_a_layout_are_counted_by_their_use() -> None:
    row = RowRange(1, 0, 3)
    found = RowLayout(whole_rows=[0], q_rows=[1, 2], kv_rows=[1, 2, 3, 4], new_rows=[row, row])
    assert count_rows(found) == RowCounts(whole_sequences=1, q=2, kv=4, partial=6)


def most(partition: Partition, *layers: LayerShape, itemsize: int = 2, stripes: int = 4) -> MaxMessageSizes:
    return max_message_sizes(layers, partition, itemsize, max_rows=10, stripes=stripes)


def test_the_largest_messages_are_those_of_the_largest_layer_on_the_largest_worker() -> None:
    for weights in ([2.0, 1.0], [1.0, 2.0]):
        partition = by_head([3, 3, 3], weights)
        expected = MaxMessageSizes(q=10 * 8 * 8 * 2, kv=10 * 2 * (8 + 4) * 2, o=10 * 8 * 4 * 2)
        assert most(partition, NARROW, WIDE, NARROW) == expected
    whole = by_request([3], [1.0, 1.0])
    assert most(whole, NARROW) == MaxMessageSizes(q=10 * 6 * 8 * 2, kv=10 * 3 * 12 * 2, o=10 * 6 * 4 * 2)


def test_where_tokens_are_dealt_out_each_row_has_several_results_in_fp32() -> None:
    partition = by_token([3], [1.0, 1.0], stripe_chunks=1)
    (piece,) = partition.pieces(0, 0)
    nodes = max_nodes(piece.kv_shards, KvPlacement(2, 1), 4)
    assert nodes == 2
    results = 10 * (nodes + 1)
    expected = MaxMessageSizes(q=10 * 6 * 8 * 2, kv=10 * 3 * 12 * 2, o=results * 6 * (4 + 1) * 4)
    assert most(partition, NARROW) == expected
    assert most(partition, NARROW, stripes=2).o == 10 * 2 * 6 * 5 * 4
    assert most(by_token([3], [1.0], stripe_chunks=1), NARROW).o == 10 * 6 * 4 * 2, "one worker keeps all"
