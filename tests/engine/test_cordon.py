"""A memory worker on which no new sequence begins: those that are there go on, all others begin elsewhere.

Covers: lamina/engine/evacuation.py, lamina/engine/scheduler_factory.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from engine_api import simulated_engine

from lamina.config.partition import KvShards
from lamina.engine.engine import Engine
from lamina.engine.evacuation import Evacuation
from lamina.engine.scheduler_factory import cordon, cordoned_workers, new_memory
from lamina.protocol.step_plan import BindReply
from lamina.request import SamplingParams
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.tools.plan.simulator.lossless import simulated_ready

BLOCK = 4
WORKERS = 3
# By request, over workers of one rank, or of two. By head, where each worker has some heads of every sequence; by
# token, where each has some stripes.
OWN = [KvShards(tuple(w == owner for w in range(WORKERS))) for owner in range(WORKERS)]
BY_REQUEST = OWN, [[w] for w in range(WORKERS)], 0
OF_RANKS = OWN, [[2 * w, 2 * w + 1] for w in range(WORKERS)], 0
BY_HEAD = [KvShards()], [[*range(WORKERS)]], 0
BY_TOKEN = OWN, [[w] for w in range(WORKERS)], 2


def open_engine(
    layout: tuple[list[KvShards], list[list[int]], int] = BY_REQUEST,
    blocks: int = 60,
    *,
    caches: bool = False,
    prefill_workers: int = 0,
) -> Engine:
    lanes, holders, stripe = layout
    ready = simulated_ready(num_layers=2, num_blocks=blocks, block_size=BLOCK, max_len=100)
    ready = msgspec.structs.replace(
        ready,
        windows=[0] * len(lanes),
        kv_shards=lanes,
        holders=holders,
        num_blocks=[[blocks]] * len(lanes),
        stripe_blocks=stripe,
    )
    store = BindReply(windows=[0], kv_shards=[KvShards()], stripe_blocks=0, num_blocks=[200])
    ready = msgspec.structs.replace(ready, prefill_stores=[store] * prefill_workers)
    options: dict[str, Any] = {"max_num_seqs": 32, "enable_prefix_caching": caches}
    options |= {"partition": "request", "memory_workers": WORKERS} if layout == BY_REQUEST else {}
    options |= {"prefill_workers": prefill_workers, "prefill_chunk": 8} if prefill_workers else {}
    return simulated_engine(options, ready, lambda load: 1.0)


def add(engine: Engine, count: int, prompt: int = 8, answer: int = 20) -> None:
    for _ in range(count):
        engine.add([1] * prompt, SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0))
    engine.step()


def lanes(engine: Engine) -> Iterator[int]:
    return (s.location.kv_shard for s in engine.scheduler.running)


def test_kin_begin_together_where_that_is_not_many_more() -> None:
    engine = open_engine()
    kin = [b"a", b"b", b"a", b"b", b"a", b"", b"a"]
    for number, name in enumerate(kin):
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
        engine.add([number] * 8, params, terms=CacheOptions(affinity_key=name))
        engine.step()
    at = dict[bytes, set[int]]()
    for sequence, name in zip(engine.scheduler.running, kin, strict=True):
        at.setdefault(name, set()).add(sequence.location.kv_shard)
    assert [len(at[name]) for name in (b"a", b"b")] == [1, 1]
    assert at[b"a"] != at[b"b"]
    for number in range(12):
        engine.add(
            [number % 8] * 5, SamplingParams(max_tokens=20, ignore_eos=True), terms=CacheOptions(affinity_key=b"a")
        )
    engine.step()
    counts = Counter(lanes(engine))
    assert {*counts} == {0, 1, 2}
    assert max(counts.values()) <= 1.5 * 19 / 3 + 2


@pytest.mark.parametrize(("layout", "worker", "alike"), [(BY_REQUEST, 1, [1]), (OF_RANKS, 2, [2, 3])])
def test_new_sequences_begin_elsewhere_until_that_is_undone(
    layout: tuple[list[KvShards], list[list[int]], int], worker: int, alike: list[int]
) -> None:
    engine = open_engine(layout)
    add(engine, 6)
    assert {*lanes(engine)} == {0, 1, 2}
    before = [s.id for s in engine.scheduler.running if s.location.kv_shard == 1]
    cordon(engine.scheduler, engine.worker_info, worker, on=True)
    assert cordoned_workers(engine.scheduler, engine.worker_info) == alike
    add(engine, 6)
    assert [s.id for s in engine.scheduler.running if s.location.kv_shard == 1] == before, "who is there goes on, alone"
    cordon(engine.scheduler, engine.worker_info, worker, on=False)
    assert cordoned_workers(engine.scheduler, engine.worker_info) == []
    add(engine, 6)
    assert len([s for s in engine.scheduler.running if s.location.kv_shard == 1]) > len(before)


def test_what_prompts_would_find_there_is_computed_again_elsewhere() -> None:
    engine = open_engine(caches=True)
    add(engine, 1, prompt=40, answer=1)
    while engine.has_work:
        engine.step()
    add(engine, 1, prompt=40)
    (found,) = engine.scheduler.running
    assert found.num_cached_tokens, "the control"
    cordon(engine.scheduler, engine.worker_info, found.location.kv_shard, on=True)
    add(engine, 1, prompt=40)
    _, fresh = engine.scheduler.running
    assert fresh.num_cached_tokens == 0
    assert fresh.location.kv_shard != found.location.kv_shard


def test_what_prefill_workers_compute_begins_elsewhere_though_its_beginning_is_there() -> None:
    engine = open_engine(caches=True, prefill_workers=1)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    engine.add([1] * 40, params)
    (first,) = [*engine.scheduler.waiting]
    while engine.has_work:
        engine.step()
    cordon(engine.scheduler, engine.worker_info, first.location.kv_shard, on=True)
    engine.add([1] * 40 + [2] * 20, params)
    (late,) = [*engine.scheduler.waiting]
    for _ in range(100):
        engine.step()
        if not engine.has_work:
            break
    assert late.finished, "it waits for ever"
    assert late.location.kv_shard != first.location.kv_shard


def test_who_finds_no_room_elsewhere_waits() -> None:
    engine = open_engine(blocks=30)
    for worker in (0, 2):
        cordon(engine.scheduler, engine.worker_info, worker, on=True)
    add(engine, 3, prompt=50)
    assert [*lanes(engine)] == [1, 1]
    assert engine.scheduler.num_waiting == 1
    cordon(engine.scheduler, engine.worker_info, 0, on=False)
    engine.step()
    assert sorted(lanes(engine)) == [0, 1, 1]


@pytest.mark.parametrize(
    ("layout", "worker", "words"),
    [
        (BY_REQUEST, 3, "memory worker 3: there are memory workers 0 to 2"),
        (BY_HEAD, 0, "each memory worker has a part of every sequence"),
        (BY_TOKEN, 0, "each memory worker has a part of every sequence"),
    ],
)
def test_what_cannot_be_is_refused(
    layout: tuple[list[KvShards], list[list[int]], int], worker: int, words: str
) -> None:
    engine = open_engine(layout)
    with pytest.raises(ValueError, match=words):
        cordon(engine.scheduler, engine.worker_info, worker, on=True)
    assert cordoned_workers(engine.scheduler, engine.worker_info) == []


def test_the_last_one_stays_open() -> None:
    engine = open_engine()
    for worker in (2, 0):
        cordon(engine.scheduler, engine.worker_info, worker, on=True)
    with pytest.raises(ValueError, match="memory worker 1 is the last one"):
        cordon(engine.scheduler, engine.worker_info, 1, on=True)
    assert cordoned_workers(engine.scheduler, engine.worker_info) == [0, 2]


def test_it_outlives_that_another_one_takes_a_place() -> None:
    """A SIGTERM to any of them leads to this: there are as many as before, and those that stay keep what they have."""
    engine = open_engine()
    add(engine, 6)
    cordon(engine.scheduler, engine.worker_info, 1, on=True)
    add(engine, 3)
    before = {s.id: s.location.kv_shard for s in engine.scheduler.running}
    keep = engine.scheduler.roll_back([], lambda each: each.length)
    engine.scheduler.adopt_memory(new_memory(engine.config, engine.worker_info, {0: 0, 1: 1, 2: 2}), keep)
    assert cordoned_workers(engine.scheduler, engine.worker_info) == [1]
    assert {s.id: s.location.kv_shard for s in engine.scheduler.running} == before
    lanes_of_two = [KvShards((True, False)), KvShards((False, True))]
    few = msgspec.structs.replace(
        engine.worker_info, kv_shards=lanes_of_two, holders=[[0], [1]], num_blocks=[[60]] * 2, windows=[0] * 2
    )
    keep = engine.scheduler.roll_back([], lambda each: each.length)
    engine.scheduler.adopt_memory(new_memory(engine.config, few, {}), keep)
    assert cordoned_workers(engine.scheduler, few) == [], "others have these numbers now"


@pytest.mark.parametrize("begun", [True, False])
def test_a_drain_that_comes_to_nothing_leaves_a_cordon_as_it_was(begun: bool) -> None:
    engine = open_engine()
    cordon(engine.scheduler, engine.worker_info, 1, on=True)
    exits = Evacuation(engine, [1, 2])
    if begun:
        exits.begin()
        assert cordoned_workers(engine.scheduler, engine.worker_info) == [1, 2]
    exits.cancel()
    assert cordoned_workers(engine.scheduler, engine.worker_info) == [1]


def test_who_takes_the_place_of_those_that_left_is_open() -> None:
    """A drain to as many other workers leads to this: sequences begin there, or wait for ever where no
    worker stayed.
    """
    engine = open_engine()
    cordon(engine.scheduler, engine.worker_info, 1, on=True)
    exits = Evacuation(engine, [0, 1, 2])
    exits.begin()
    exits.finish()
    keep = engine.scheduler.roll_back([], lambda each: each.length)
    engine.scheduler.adopt_memory(new_memory(engine.config, engine.worker_info, {}), keep)
    assert cordoned_workers(engine.scheduler, engine.worker_info) == []
    add(engine, 6)
    assert {*lanes(engine)} == {0, 1, 2}


def test_a_cordon_goes_with_its_worker_where_others_leave_for_good() -> None:
    engine = open_engine()
    cordon(engine.scheduler, engine.worker_info, 2, on=True)
    exits = Evacuation(engine, [0])
    exits.begin()
    exits.finish()
    few = msgspec.structs.replace(
        engine.worker_info,
        kv_shards=[KvShards((True, False)), KvShards((False, True))],
        holders=[[0], [1]],
        num_blocks=[[60]] * 2,
        windows=[0] * 2,
    )
    keep = engine.scheduler.roll_back([], lambda each: each.length)
    engine.scheduler.adopt_memory(new_memory(engine.config, few, {1: 0, 2: 1}), keep)
    assert cordoned_workers(engine.scheduler, few) == [1]


@pytest.mark.parametrize("prefill_workers", [0, 1])
def test_what_is_retained_elsewhere_stays_where_blocks_lack(prefill_workers: int) -> None:
    """Two that run fill the worker on which they begin, and want more of it: what lies on another one is of no use."""
    engine = open_engine(blocks=30, caches=True, prefill_workers=prefill_workers)
    add(engine, 1, prompt=40, answer=2)
    (first,) = engine.scheduler.running
    while engine.has_work:
        engine.step()
    lane = first.location.kv_shard
    for worker in {0, 1, 2} - {(lane + 1) % 3}:
        cordon(engine.scheduler, engine.worker_info, worker, on=True)
    for number in range(2, 4):
        engine.add([number] * 57, SamplingParams(max_tokens=40, ignore_eos=True, temperature=0))
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert first.id in engine.scheduler.features[PrefixCache].eviction_order
