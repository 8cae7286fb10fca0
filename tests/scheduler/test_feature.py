"""The seam of features: a toy one from outside, and a scheduler without each of its own.

Covers: lamina/scheduler/feature_table.py, lamina/scheduler/prefill_placement.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from engine_api import READY, run, simulated_engine
from msgspec import structs

from lamina.config.partition import KvShards
from lamina.engine.engine import Engine
from lamina.engine.scheduler_factory import build_parts
from lamina.engine.tuning.tuner import Tuner
from lamina.protocol.offload_messages import OffloadFacts
from lamina.request import SamplingParams
from lamina.scheduler.affinity import Affinity
from lamina.scheduler.feature import Feature
from lamina.scheduler.kv_manager.allocator import KvAllocator
from lamina.scheduler.kv_manager.hybrid_prefix_cache import HybridPrefixCache
from lamina.scheduler.kv_manager.migration import KvMigration
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.session_cache import SessionCache
from lamina.scheduler.kv_manager.spill_placement import SpillAllocator
from lamina.scheduler.kv_manager.swap import SwapPolicy
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.prefill_placement import PrefillPlacement
from lamina.scheduler.recurrent_states import RecurrentStates
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sparsity.pruning import BlockPruner
from lamina.scheduler.sparsity.reference_decode import ReferenceDecoder
from lamina.scheduler.sparsity.selection import BlockSelection
from lamina.scheduler.starts import Candidates, KvStart, Verdict
from lamina.scheduler.step_timing import StepTimer

STORAGE = OffloadFacts(secret=b"s" * 32, identity=b"i" * 32, page_size=16, pages=[[]], capacities=[64])


class PromptLengths(Feature):
    """Counts admitted prompts by their length."""

    def __init__(self) -> None:
        self.counts = Counter[int]()

    def on_started(self, candidates: Candidates, start: KvStart | None) -> tuple[()]:
        self.counts[len(candidates.sequence.prompt)] += 1
        return ()


class LongOnesAlone(Feature):
    """Has long prompts step aside while something runs."""

    def find_starts(self, candidates: Candidates) -> None:
        if len(candidates.sequence.prompt) > 100 and not candidates.alone:
            candidates.verdict = Verdict.STEPS_ASIDE


# Of each feature of the scheduler's table: options, and facts of workers, with which an engine has it.
WITH: dict[type[Feature], tuple[dict[str, Any], dict[str, Any]]] = {
    Affinity: ({}, {}),
    PrefillDispatcher: ({"prefill_workers": 1}, {}),
    SwapPolicy: ({"kv_offloading_size": "1MiB", "preemption_mode": "swap"}, {"storage": STORAGE}),
    ReferenceDecoder: ({"kv_sparsity": "evict", "kv_error_budget": "default"}, {}),
    PrefixCache: ({}, {}),
    SessionCache: ({}, {}),
    OffloadIndex: ({"kv_offloading_size": "1MiB"}, {"storage": STORAGE}),
    BlockSelection: ({"kv_sparsity": "select"}, {}),
    RecurrentStates: ({}, {"state_shards": [KvShards()], "state_slots": 40}),
    BlockPruner: ({"kv_sparsity": "evict"}, {}),
    PrefillPlacement: ({"prefill_workers": 1}, {}),
    SpillAllocator: (
        {"partition": "spill", "memory_workers": 2},
        {
            "windows": [0, 0],
            "kv_shards": [KvShards((True, False)), KvShards((False, True))],
            "stripe_blocks": 2,
            "single_shard": True,
            "num_blocks": [[30], [30]],
            "holders": [[0], [1]],
        },
    ),
    KvMigration: ({"partition": "spill", "memory_workers": 2}, {}),
    StepTimer: ({}, {}),
    Tuner: ({"plan": "auto"}, {}),
}


def engine_of(
    more: Iterable[Feature] = (), without: tuple[type[Feature], ...] = (), like: type[Feature] = PrefixCache
) -> Engine:
    """An engine with the table of features that its factory builds where there is ``like``, but for some of them."""

    class OtherScheduler(Scheduler):
        def __init__(self, *args: Any, features: Iterable[Feature], allocator: KvAllocator, **options: Any) -> None:
            kept = [feature for feature in features if not isinstance(feature, without)]
            others = None if isinstance(allocator, without) else allocator
            super().__init__(*args, features=[*kept, *more], allocator=others, **options)

    options, facts = WITH[like]
    plain = {"max_num_seqs": 4, "prefill_chunk": 64}
    build = partial(build_parts, scheduler_class=OtherScheduler)
    return simulated_engine(plain | options, structs.replace(READY, **facts), build=build)


def finish(engine: Engine, lengths: Iterable[int]) -> list[int]:
    """Serve prompts of such lengths; the numbers of tokens of their answers."""
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)
    for length in lengths:
        engine.add([1] * length, params)
    return [len(output.outputs[0].token_ids) for output in run(engine).values()]


def test_a_feature_comes_from_outside() -> None:
    toy = PromptLengths()
    engine = engine_of([toy])
    assert finish(engine, [7, 30, 7, 200, 30, 7]) == [5] * 6
    assert engine.scheduler.features[PromptLengths] is toy
    assert toy.counts == {7: 3, 30: 2, 200: 1}


def test_a_feature_from_outside_decides_who_waits() -> None:
    engine = engine_of([LongOnesAlone()])
    for length in (7, 150, 30):
        engine.add([1] * length, SamplingParams(max_tokens=5, ignore_eos=True, temperature=0))
    engine.step()
    assert [len(s.prompt) for s in engine.scheduler.running] == [7, 30]
    assert finish(engine, []) == [5] * 3


@pytest.mark.parametrize("kind", WITH)
def test_all_others_go_on_without_a_feature(kind: type[Feature]) -> None:
    assert isinstance(engine_of(like=kind).scheduler.features.get(kind), kind)
    built_with = (PrefillPlacement,) if kind is PrefillDispatcher else ()  # the factory makes it for a dispatcher only
    engine = engine_of(without=(kind, *built_with), like=kind)
    assert engine.scheduler.features.get(kind) is None
    with pytest.raises(KeyError, match=kind.__name__):
        engine.scheduler.features[kind]
    assert finish(engine, [7, 130, 130, 200, 130, 7]) == [5] * 6
    assert (engine.scheduler_stats.waiting, engine.sessions.hits) == (0, {})


def test_every_feature_of_the_table_is_removed_in_turn() -> None:
    tables = [engine_of(like=kind).scheduler.features for kind in WITH]
    assert {type(feature) for table in tables for feature in table} - {HybridPrefixCache} == {*WITH}


def test_the_scheduler_has_no_feature_of_its_own() -> None:
    engine = engine_of(without=(Feature,))
    assert [*engine.scheduler.features] == []
    assert finish(engine, [7, 130, 130, 200, 130, 7]) == [5] * 6
