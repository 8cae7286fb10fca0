"""The windows of CachedAttention: its worked example, its arithmetic, and LRU where no request waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lamina.kv.eviction_policy import PageUsage
from lamina.kv.fetch_window import FetchWindow, eviction_order, fetch_window_size, items_to_fetch

MIB = 1 << 20


def test_figure_9() -> None:
    """Job 1 runs, 2 to 9 wait. Memory has the sessions of 2 and 4 and one slot besides, a full disk has four, two of
    which the figure does not name: they are chosen here. tests/kv/storage/test_layered.py has it with real media.
    """
    queue = [2, 3, 4, 5, 6, 7, 8, 9]
    memory, disk = [2, 4], [9, 3, 5, 7]
    assert items_to_fetch(queue, 2, memory) == [3]
    demoted, *_ = eviction_order(queue, 6, memory)
    assert demoted == 4, "2 is needed before it"
    dropped, *others = eviction_order(queue, 6, disk)
    assert dropped == 9, "it is behind the window, the others of the disk are in it"
    assert others == [7, 5, 3], "from its tail on"


def test_arithmetic_of_section_2_4() -> None:
    token, tokens = 2.5 * MIB, 2048  # LLaMA-65B
    session = token * tokens
    assert session == 5 * 1024**3
    seed = 5.0  # GB, as the paper rounds it
    assert round(seed / 26 * 1000) == 192  # ms over 16 lanes of PCIe 4
    assert round(seed / 0.360, 1) == 13.9  # GB/s that a prefill of 360 ms makes
    assert round(190 / 13.9) == 14  # s until 190 GB are full
    assert (fetch_window_size(128e9, session), fetch_window_size(128e9 + 10e12, session)) == (23, 1886)


def test_where_nobody_waits_the_least_recently_used_gives_way() -> None:
    assert eviction_order([], 100, [7, 9, 8]) == [7, 9, 8]
    assert eviction_order([1, 2], 0, [2, 7, 1]) == [2, 7, 1]


@given(st.lists(st.integers(0, 12), max_size=14), st.integers(0, 8), st.integers(0, 12), st.sets(st.integers(0, 12)))
def test_rules_of_both_windows(queue: list[int], fetch: int, more: int, memory: set[int]) -> None:
    oldest = sorted(memory, key=lambda n: n * 7 % 13)
    wanted = items_to_fetch(queue, fetch, memory)
    assert all(item in queue[:fetch] and item not in memory for item in wanted)
    assert wanted == sorted(set(wanted), key=queue.index)
    ahead = queue[: fetch + more]
    outside = [item for item in oldest if item not in ahead]
    inside = sorted(memory & set(ahead), key=ahead.index, reverse=True)
    assert eviction_order(queue, fetch + more, oldest) == outside + inside


TURNS = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=4)), max_size=12)


@given(TURNS)
def test_expected_pages_beside_a_list_of_turns(told: list[tuple[int, list[int]]]) -> None:
    expected, turns = FetchWindow(), dict[int, list[bytes]]()
    for turn, numbers in told:
        keys = [bytes([n]) for n in numbers]
        before = {bytes([n]): expected.next_turn_of(bytes([n])) for n in range(10)}
        changed = expected.hint(turn, keys)
        turns |= {turn: turns.get(turn, []) + keys}
        if not keys:
            del turns[turn]
        needed = {bytes([n]): min((t for t in turns if bytes([n]) in turns[t]), default=None) for n in range(10)}
        assert {key: expected.next_turn_of(key) for key in needed} == needed
        assert changed == {key for key in needed if needed[key] != before[key]}
    queue = list(dict.fromkeys(key for turn in sorted(turns) for key in turns[turn]))
    assert [expected.first_pages(count) for count in range(5)] == [queue[:count] for count in range(5)]
    assert len(expected) == len(turns)
    uses = [PageUsage(bytes([n]), number=n % 3, nbytes=1, first_used=n, last_used=9 - n) for n in range(10)]
    order = [use.key for use in sorted(uses, key=lambda use: expected.rank(use, lambda use: (use.last_used,)))]
    nobody = [key for key in order if expected.next_turn_of(key) is None]
    assert order[: len(nobody)] == nobody == sorted(nobody, reverse=True), "the least recently used first"
    waited = [expected.next_turn_of(key) for key in order[len(nobody) :]]
    assert waited == sorted(waited, key=lambda turn: -(turn or 0))
