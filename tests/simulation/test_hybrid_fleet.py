"""Fleets with a hybrid model, hit at any call of any process: each request gets its tokens, and mistakes about versions
of states are seen.

Covers: lamina/protocol/blocks/state_versions.py, lamina/scheduler/recurrent_states.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from lamina.engine.engine import Engine
from lamina.protocol.blocks.state_versions import Segment, StateVersions
from lamina.protocol.step_plan import StateRows, StepPlan, SurvivingKv
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.workers.memory.state_store import StateStore
from simulation.play import is_broken
from simulation.whole.process import DIES
from simulation.whole.run import check_fleet
from simulation.whole.scenario import (
    FleetScenario,
    Strike,
    changing_hybrid_fleet,
    hybrid_fleet,
    prefilled_hybrid_fleet,
)

PARTS, SEEDS, MANY = 2, 4, 60
Mistake = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.long(but=["0"])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_stream_of_a_hybrid_model_goes_on(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        check_fleet(hybrid_fleet(seed))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_stream_of_many_goes_on_and_states_are_shared(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hits, close = list[int](), Engine.close

    def counted(self: Engine) -> None:
        hits.append(self.scheduler.features[PrefixCache].num_hit_tokens)
        close(self)

    monkeypatch.setattr(Engine, "close", counted)
    played = [check_fleet(hybrid_fleet(seed)) for seed in range(SEEDS + part, MANY, PARTS)]
    assert sum(one.deaths for one in played)
    assert sum(one.engines for one in played)
    assert sum(hits)


@pytest.mark.long
def test_every_stream_goes_on_with_prefill_workers() -> None:
    for seed in range(SEEDS):
        check_fleet(prefilled_hybrid_fleet(seed))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stream_of_many_goes_on_with_prefill_workers() -> None:
    played = [check_fleet(prefilled_hybrid_fleet(seed)) for seed in range(SEEDS, MANY)]
    assert sum(one.deaths for one in played)


@pytest.mark.long
def test_every_stream_goes_on_while_memory_workers_come_and_go() -> None:
    played = [check_fleet(changing_hybrid_fleet(seed)) for seed in range(SEEDS)]
    assert sum(one.changes for one in played)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stream_of_many_goes_on_while_memory_workers_come_and_go() -> None:
    played = [check_fleet(changing_hybrid_fleet(seed)) for seed in range(SEEDS, MANY)]
    assert sum(one.changes for one in played)
    assert sum(one.deaths for one in played)
    assert sum(one.preemptions for one in played)


@pytest.mark.parametrize("comes", [True, False])
def test_a_state_that_does_not_come_from_a_prefill_worker_is_seen(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    of = replace(prefilled_hybrid_fleet(0), hits=(), deaths=())
    if not comes:
        monkeypatch.setattr(StateStore, "put_state", lambda self, number, rows, data: None)
    assert is_broken(check_fleet, of) != comes


def struck(*calls: int) -> FleetScenario:
    """A run of two memory workers and a compute worker, which dies again and again: no state is lost with it."""
    of = next(
        of
        for seed in range(1000)
        if (of := hybrid_fleet(seed)).options["pipeline"] == 1
        and (of.options["memory_workers"], of.options["partition"]) == (2, "head")
        and len(of.asks) > 3
    )
    options = {**of.options, "kv_memory": "1MiB"}
    return replace(of, options=options, hits=tuple(Strike(("compute", 0), call, DIES) for call in calls), deaths=())


def another_version(back: int) -> Mistake:
    """After a loss a memory worker continues the state that it has written last, or one before that, whatever the
    plan says.
    """

    def make(patch: pytest.MonkeyPatch) -> None:
        begin, reconcile = StateVersions.begin, StateVersions.reconcile
        written = dict[tuple[int, int], list[int]]()  # worker, sequence -> slots
        lost = set[tuple[int, int]]()

        def keep_all(self: StateVersions, keep: Sequence[SurvivingKv]) -> None:
            reconcile(self, keep)
            lost.update(key for key in written if key[0] == id(self))

        def begin_with_another(self: StateVersions, plan: StepPlan, **options: Any) -> list[Segment]:
            segments = list[Segment]()
            for row, segment in zip(plan.rows, begin(self, plan, **options), strict=True):
                key = id(self), row.sequence
                slots = written.setdefault(key, [])
                wrong = key in lost and row.first and len(slots) > back
                segments.append(segment._replace(read=slots[-1 - back]) if wrong else segment)
                lost.discard(key)
                slots.append(segment.write)
            return segments

        patch.setattr(StateVersions, "reconcile", keep_all)
        patch.setattr(StateVersions, "begin", begin_with_another)

    return make


def freed_early(patch: pytest.MonkeyPatch) -> None:
    """A plan ends the version that its own row reads."""
    check, begin = StateVersions.check, StateVersions.begin

    def early(plan: StepPlan) -> StepPlan:
        ends = {row.sequence: row.first + row.count for row in plan.rows}
        ops = [
            structs.replace(op, oldest=ends[op.sequence])
            if isinstance(op, StateRows) and op.sequence in ends and op.oldest
            else op
            for op in plan.ops
        ]
        return structs.replace(plan, ops=ops)

    patch.setattr(StateVersions, "check", lambda self, plan, **options: check(self, early(plan), **options))
    patch.setattr(StateVersions, "begin", lambda self, plan, **options: begin(self, early(plan), **options))


MISTAKES: dict[str, Mistake] = {
    "the newer version is read": another_version(0),
    "a version is freed early": freed_early,
    "the older version is kept after a roll-back": another_version(1),
}


@pytest.mark.parametrize("mistake", ["", *MISTAKES])
def test_a_mistake_about_versions_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = struck(86, 141, 209, 298, 323, 329)
    if mistake:
        MISTAKES[mistake](monkeypatch)
    assert is_broken(check_fleet, of) == bool(mistake)
