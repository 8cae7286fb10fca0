"""Layouts: all workers together attend every token that is seen exactly once, and each keeps what is its own."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.config.partition import by_token
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.codec import RowLayout, merge_plan, owned_runs, row_layout
from lamina.protocol.kv_placement import KvLocation, KvPlacement
from lamina.protocol.step_plan import New, RowRange, StepPlan

STRIPE = 8  # tokens


@st.composite
def steps(draw: st.DrawFn) -> list[RowRange]:
    sequences = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4, unique=True))
    counts, lanes = st.sampled_from([1, 1, 2, 7, 20]), st.integers(0, 1)
    return [RowRange(s, draw(st.integers(0, 70)), draw(counts), KvLocation(draw(lanes))) for s in sequences]


def seen_by(rows: list[RowRange], window: int) -> Counter[tuple[int, int]]:
    """(sequence, stored token) that some row of the step sees."""
    return Counter((r.sequence, p) for r in rows for p in range(max(0, r.first - window + 1) if window else 0, r.first))


@settings(max_examples=200, deadline=None)
@given(
    rows=steps(), weights=st.lists(st.floats(0.5, 3.0), min_size=2, max_size=4), window=st.sampled_from([0, 1, 5, 20])
)
def test_together_they_attend_everything_once(rows: list[RowRange], weights: list[float], window: int) -> None:
    partition = by_token([4], weights, 1)
    lanes = [p.kv_shards for w in range(len(weights)) for p in partition.pieces(0, w)]
    placement = KvPlacement(partition.num_kv_shards, STRIPE)
    found = [row_layout(rows, x, window, placement) for x in lanes]
    starts = dict(
        zip([r.sequence for r in rows], [sum(r.count for r in rows[:i]) for i in range(len(rows))], strict=True)
    )
    attended, new, keeps = Counter[tuple[int, int]](), Counter[int](), Counter[tuple[int, int]]()
    for each, mine in zip(found, lanes, strict=True):
        for row in each.whole_sequences:
            new[row.sequence] += 1
            attended += seen_by([row], window)
        for node in each.merge_nodes:
            low = max(node.low, node.rows.first - window + 1) if window else node.low
            attended.update((node.rows.sequence, p) for p in range(low, node.high))
            assert node.rows in each.q
            span = range(node.number << node.level, (node.number + 1) << node.level)
            assert all(p // STRIPE in span for p in (node.low, node.high - 1))
        for row in each.new_rows:
            new[row.sequence] += 1
            assert row in each.q
            assert row in each.kv  # all of its rows
        for here, numbers in ((each.whole_sequences, each.whole_rows), (each.q, each.q_rows), (each.kv, each.kv_rows)):
            positions = [(r.sequence, r.first + i) for r in here for i in range(r.count)]
            step = [(r.sequence, r.first + i) for r in rows for i in range(r.count)]
            assert [step[n] for n in numbers] == positions
        for row in each.whole_sequences + each.kv:
            keeps.update(
                (part.sequence, part.first + i) for part in owned_runs(row, mine, placement) for i in range(part.count)
            )
    assert attended == seen_by(rows, window)
    assert new == Counter(r.sequence for r in rows)
    assert keeps == Counter((r.sequence, r.first + i) for r in rows for i in range(r.count))
    check_merges(rows, found, starts)


def check_merges(rows: list[RowRange], found: list[RowLayout], starts: dict[int, int]) -> None:
    """Every partial result goes into the root, or is new, of the row that it belongs to."""
    holds, new = list[set[tuple[int, int, int]]](), list[tuple[int, int]]()
    for each in found:
        holds += [
            {(n.rows.sequence, i, at) for at in range(n.low // STRIPE, -(-n.high // STRIPE))}
            for n in each.merge_nodes
            for i in range(n.rows.count)
        ]
        new += [(-1, -1)] * sum(n.rows.count for n in each.merge_nodes)
        holds += [set() for r in each.new_rows for _ in range(r.count)]
        new += [(r.sequence, i) for r in each.new_rows for i in range(r.count)]
    plan = merge_plan(found)
    for left, right in plan.levels:
        for a, b in zip(left, right, strict=True):
            assert max(holds[a])[2] < min(holds[b])[2], "in the order of tokens"
            holds[a], holds[b] = holds[a] | holds[b], set()
    split = {n.rows for each in found for n in each.merge_nodes}
    expected = {starts[r.sequence] + i: (r.sequence, i) for r in split for i in range(r.count)}
    assert sorted(plan.rows) == sorted(expected)
    for row, at, fresh in zip(plan.rows, plan.roots, plan.new, strict=True):
        sequence, i = expected[row]
        nodes = [n for each in found for n in each.merge_nodes if n.rows.sequence == sequence]
        numbers = {at for n in nodes for at in range(n.low // STRIPE, -(-n.high // STRIPE))}
        assert holds[at] == {(sequence, i, number) for number in numbers}
        assert new[fresh] == (sequence, i)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_stripes_spread_a_ragged_batch_evenly(workers: int) -> None:
    """16 sequences of 200 to 4,000 tokens: no worker reads, or keeps, 5 % more than the mean."""
    partition, stripe, rows = (
        by_token([4], [1.0] * workers, 1),
        128,
        [RowRange(i, 200 + i * 253, 1, KvLocation(i % workers)) for i in range(16)],
    )
    lanes = [p.kv_shards for w in range(workers) for p in partition.pieces(0, w)]
    tables = BlockTables([0] * workers, [9999] * workers, 16, lanes, stripe // 16)
    prompts = [RowRange(r.sequence, 0, r.first, r.location) for r in rows]
    tables.apply(StepPlan(step=0, ops=[New(r.sequence) for r in rows], rows=prompts))
    kept = [9999 - n for n in tables.free_blocks]
    found = [row_layout(rows, x, 0, KvPlacement(workers, stripe)) for x in lanes]
    read = [sum(n.high - n.low for n in x.merge_nodes) + sum(r.first for r in x.whole_sequences) for x in found]
    assert sum(read) == sum(r.first for r in rows)
    for each in (kept, read):
        assert max(each) < 1.05 * sum(each) / workers
