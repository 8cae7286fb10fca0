"""The windows of CachedAttention: its worked example, its arithmetic, and LRU where nobody waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.windows import Windows, to_fetch, victims, windows_of

MIB = 1 << 20


def test_figure_9() -> None:
    """Job 1 runs, 2 to 9 wait. Memory has the sessions of 2 and 4 and one slot besides, a full disk has four, two of
    which the figure does not name: they are chosen here.
    """
    queue = [2, 3, 4, 5, 6, 7, 8, 9]
    memory, disk = [2, 4], [9, 3, 5, 7]
    windows = Windows(2, 6)
    assert to_fetch(queue, windows, memory, disk) == [3]
    demoted, *_ = victims(queue, windows, memory)
    assert demoted == 4, "2 is needed before it"
    dropped, *others = victims(queue, windows, disk)
    assert dropped == 9, "it is behind the window, the others of the disk are in it"
    assert others == [7, 5, 3], "from its tail on"
    disk[disk.index(dropped)] = demoted
    assert disk == [4, 3, 5, 7], "4 takes its place, and the copy of 3 keeps its own until it has arrived"


def test_arithmetic_of_section_2_4() -> None:
    token, tokens = 2.5 * MIB, 2048  # LLaMA-65B
    session = token * tokens
    assert session == 5 * 1024**3
    seed = 5.0  # GB, as the paper rounds it
    assert round(seed / 26 * 1000) == 192  # ms over 16 lanes of PCIe 4
    assert round(seed / 0.360, 1) == 13.9  # GB/s that a prefill of 360 ms makes
    assert round(190 / 13.9) == 14  # s until 190 GB are full
    assert windows_of(128e9, 10e12, session) == Windows(23, 1886)


def test_where_nobody_waits_the_least_recently_used_gives_way() -> None:
    assert victims([], Windows(4, 100), [7, 9, 8]) == [7, 9, 8]
    assert victims([1, 2], Windows(0, 0), [2, 7, 1]) == [2, 7, 1]


@given(st.lists(st.integers(0, 12), max_size=14), st.integers(0, 8), st.integers(0, 12), st.sets(st.integers(0, 12)))
def test_rules_of_both_windows(queue: list[int], fetch: int, more: int, memory: set[int]) -> None:
    windows, oldest = Windows(fetch, fetch + more), sorted(memory, key=lambda n: n * 7 % 13)
    found = to_fetch(queue, windows, memory, set(range(13)))
    assert all(item in queue[:fetch] and item not in memory for item in found)
    assert found == sorted(set(found), key=queue.index)
    ahead = queue[: windows.eviction]
    outside = [item for item in oldest if item not in ahead]
    inside = sorted(memory & set(ahead), key=ahead.index, reverse=True)
    assert victims(queue, windows, oldest) == outside + inside
