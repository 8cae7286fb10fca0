"""The sequences that are given up first: orders by hand, a model of LRU, and hit rates of public traces."""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.config.offload import EVICTION_POLICIES
from lamina.kv.eviction_policy import EvictionQueue, eviction_rank

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def order(tier: EvictionQueue) -> list[int]:
    """All that a tier has, the worst first."""
    return [int.from_bytes(each, "big") for each in tier.evict(room=1 << 40)]


@pytest.mark.parametrize(
    ("policy", "worst_first"),
    [
        ("lru", [3, 2, 4, 1]),
        ("fifo", [1, 2, 3, 4]),
        ("lfu", [3, 4, 1, 2]),
        ("length", [4, 3, 2, 1]),
    ],
)
def test_the_order_of_each_policy(policy: str, worst_first: list[int]) -> None:
    tier = EvictionQueue(policy, 100)
    for number in (1, 2, 3, 2, 2, 4, 1):
        tier.record_use(key(number), number, 10)
    assert order(tier) == worst_first
    assert (len(tier), tier.nbytes) == (0, 0)


def test_sizes() -> None:
    tier = EvictionQueue("lru", 30)
    tier.record_use(key(1), 0, 10)
    tier.record_use(key(2), 0, 20)
    assert tier.evict() == []
    assert tier.evict(room=1) == [key(1)]
    tier.record_use(key(2), 0, 31)
    assert tier.nbytes == 31
    assert tier.evict() == [key(2)]
    tier.forget(key(2))
    assert tier.nbytes == 0


def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match="--kv-offload eviction= must be one of lru, fifo, lfu, length"):
        eviction_rank("mru")


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=200))
def test_lru_beside_an_ordered_dict(uses: list[tuple[int, bool]]) -> None:
    tier, model = EvictionQueue("lru", 5), OrderedDict[bytes, None]()
    for number, dropped in uses:
        if dropped:
            tier.forget(key(number))
            model.pop(key(number), None)
            continue
        tier.record_use(key(number), number, 1)
        model[key(number)] = None
        model.move_to_end(key(number))
        gone = [model.popitem(last=False)[0] for _ in range(len(model) - 5)]
        assert tier.evict() == gone
    assert [n in tier for n in map(key, range(13))] == [n in model for n in map(key, range(13))]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=300))
def test_a_tier_keeps_to_its_size(policy: str, uses: list[int]) -> None:
    tier = EvictionQueue(policy, 70)
    for number in uses:
        tier.record_use(key(number), number, 1 + number)
        evicted = tier.evict()
        assert tier.nbytes == sum(1 + n for n in range(31) if key(n) in tier) <= 70
        assert len(evicted) == len(set(evicted))
        assert not any(each in tier for each in evicted)


@cache
def trace(name: str) -> list[list[bytes]]:
    """Keys of the pages of each request. Another id is another page, or one with another beginning."""
    path = TRACES / f"mooncake_fast25_{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    with gzip.open(path, "rt") as lines:
        return [[key(block) for block in json.loads(line)["hash_ids"]] for line in lines]


def hit_rate(requests: list[list[bytes]], policy: str, pages: int) -> float:
    """Returns the hit rate of pages, partial ones counted whole: match, then touch or insert from the last page to the
    first, then evict.
    """
    tier, hits = EvictionQueue(policy, pages), 0
    for keys in requests:
        hits += next((n for n, key in enumerate(keys) if key not in tier), len(keys))
        for number in reversed(range(len(keys))):
            tier.record_use(keys[number], number, 1)
        tier.evict()
    return hits / sum(map(len, requests))


@pytest.mark.long(but=["synthetic-1000-0.084"])
@pytest.mark.parametrize(
    ("name", "pages", "rate"),
    [
        ("conversation", 1_000, 0.045),
        ("conversation", 10_000, 0.212),
        pytest.param("conversation", 30_000, 0.326, marks=pytest.mark.slow),
        pytest.param("conversation", 50_000, 0.355, marks=pytest.mark.slow),
        pytest.param("conversation", 100_000, 0.364, marks=pytest.mark.slow),
        pytest.param("conversation", 1 << 40, 0.366, marks=pytest.mark.slow),
        ("synthetic", 1_000, 0.084),
        pytest.param("synthetic", 10_000, 0.424, marks=pytest.mark.slow),
        pytest.param("synthetic", 30_000, 0.624, marks=pytest.mark.slow),
        pytest.param("synthetic", 50_000, 0.640, marks=pytest.mark.slow),
        pytest.param("synthetic", 100_000, 0.640, marks=pytest.mark.slow),
        pytest.param("synthetic", 1 << 40, 0.640, marks=pytest.mark.slow),
    ],
)
def test_lru_hit_rates_of_public_traces(name: str, pages: int, rate: float) -> None:
    assert round(hit_rate(trace(name), "lru", pages), 3) == rate
