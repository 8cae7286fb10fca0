"""The KV store: positional writes through block tables, and the row tables that backends read by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.kv.paged_cache import LayerCache, allocate_layer, row_table, slot_mapping
from lamina.kv.stored_format import StoredRows
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import New, RowRange, StepPlan

CPU = torch.device("cpu")
SIZE, ALIGN = 4, 16


def grown(window: int, lengths: list[int], step: int) -> BlockTables:
    """Sequences that have grown side by side, ``step`` rows at a time."""
    tables = BlockTables([window], [sum(-(-n // SIZE) + 3 for n in lengths) + 20], SIZE)
    tables.apply(StepPlan(step=0, ops=[New(i) for i in range(len(lengths))], rows=[]))
    for at in range(0, max(lengths), step):
        rows = [RowRange(i, at, min(step, n - at)) for i, n in enumerate(lengths) if at < n]
        tables.apply(StepPlan(step=1 + at, ops=[], rows=rows))
    return tables


def write(tables: BlockTables, store: LayerCache, rows: list[RowRange]) -> None:
    """K holds 1000 * sequence + position, V its negative."""
    values = torch.tensor([1000.0 * r.sequence + r.first + i for r in rows for i in range(r.count)])
    k = values[:, None, None].expand(-1, store.k.shape[1], store.k.shape[3])
    v = -values[:, None, None].expand(-1, store.v.shape[1], store.v.shape[3])
    store.write(slot_mapping(tables, 0, rows, CPU), StoredRows(k.to(store.k.dtype), v.to(store.v.dtype)))


lengths = st.lists(st.integers(1, 70), min_size=1, max_size=4)


@given(lengths=lengths, window=st.sampled_from([0, 1, 6, 30]), step=st.sampled_from([1, 7]), count=st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_what_is_written_at_a_position_is_found_there(lengths: list[int], window: int, step: int, count: int) -> None:
    tables = grown(window, lengths, step)
    store = allocate_layer(tables.num_blocks[0], 2, SIZE, 3, 5, torch.float32, CPU)
    held = []
    for i, n in enumerate(lengths):  # all that a query at the end can see
        low = max(0, n - window + 1) if window else 0
        if low < n:
            held.append(RowRange(i, low, n - low))
    if held:
        write(tables, store, held)
    rows = [RowRange(i, n, count) for i, n in enumerate(lengths)]
    tables.apply(StepPlan(step=10**6, ops=[], rows=rows))
    table = row_table(tables, 0, rows, align=ALIGN)
    assert (table.origin % ALIGN == 0).all()
    assert table.table.shape[1] * SIZE % ALIGN == 0
    for i, row in enumerate(rows):
        low = max(0, row.first - window + 1) if window else 0
        for position in range(low, row.first):
            column = (position - table.origin[i]) // SIZE
            block = table.table[i, column]
            assert (store.k[block, :, position % SIZE] == 1000 * i + position).all()
            assert (store.v[block, :, position % SIZE] == -1000 * i - position).all()
        seen = range((low - table.origin[i]) // SIZE, -(-(row.first - table.origin[i]) // SIZE))
        others = [b for column, b in enumerate(table.table[i]) if low == row.first or column not in seen]
        assert set(others) <= {table.null_block}
    assert (store.k[store.null_block] == 0).all()
    assert (store.v[store.null_block] == 0).all()


def test_rows_are_numbered_in_the_order_of_the_plan() -> None:
    tables = grown(0, [20, 9, 1], 5)
    rows = [RowRange(2, 1, 3), RowRange(0, 20, 1), RowRange(1, 9, 2)]
    tables.apply(StepPlan(step=10**6, ops=[], rows=rows))
    table = row_table(tables, 0, rows, align=ALIGN)
    assert table.row.tolist() == [0, 3, 4]
    assert table.first.tolist() == [1, 20, 9]
    assert table.count.tolist() == [3, 1, 2]
    assert table.num_rows == 6
    assert table.table.shape == (3, 8)


def test_a_write_overwrites_and_touches_nothing_else() -> None:
    tables = grown(0, [30], 30)
    store = allocate_layer(tables.num_blocks[0], 2, SIZE, 3, 3, torch.bfloat16, CPU)
    write(tables, store, [RowRange(0, 0, 30)])
    before = store.k.clone()
    store.write(
        slot_mapping(tables, 0, [RowRange(0, 13, 1)], CPU),
        StoredRows(torch.full((1, 2, 3), 7.0).bfloat16(), store.v[:1, :, 0]),
    )
    changed = (store.k != before).nonzero()
    assert len(changed) == 2 * 3
    assert (store.k == 7.0)[changed[:, 0], changed[:, 1], changed[:, 2]].all()


def test_an_impossible_size_is_refused_in_words() -> None:
    with pytest.raises(MemoryError, match="lower --kv-cache-memory-bytes"):
        allocate_layer(1 << 40, 8, 16, 128, 128, torch.float32, CPU)
