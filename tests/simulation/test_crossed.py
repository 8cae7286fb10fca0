"""Faults that meet others: each request gets its tokens, once; and mistakes about them are seen."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from lamina.executor.elastic import MemoryResizer
from lamina.executor.kv_parity import KvParity
from lamina.executor.supervisor import Supervisor
from lamina.executor.termination_notice import TerminationNotices
from lamina.executor.worker_registry import RegisteredWorker, WorkersLostError
from lamina.protocol.step_plan import SurvivingKv
from lamina.workers.memory.kv_checksums import BlockChecksums
from simulation.play import is_broken
from simulation.whole.crossed import HANG_S, crossed_fleet
from simulation.whole.process import DIES, HANGS, TOLD
from simulation.whole.run import check_fleet
from simulation.whole.scenario import FleetChange, Strike, fleet_scenario, longer

SEEDS, PARTS = 12, 3
NOTICES = 5


@pytest.mark.long(but=["0"])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_stream_goes_on(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        counts.update(check_fleet(crossed_fleet(seed))._asdict())
    assert counts["deaths"] + counts["hangs"] + counts["flips"] > 1


def kept_by_the_dead(patch: pytest.MonkeyPatch) -> None:
    """A mistake: a memory worker's report as it quiesced counts, though it has died since."""
    right, left, said = (
        Supervisor.await_quiesced,
        KvParity.surviving_after_rebuild,
        dict[RegisteredWorker, dict[int, int]](),
    )

    def rest_of(self: Supervisor, member: RegisteredWorker, deadline: float) -> dict[int, int]:
        said[member] = right(self, member, deadline)
        return said[member]

    def all_that_was_said(self: KvParity, kept: Sequence[dict[int, int]]) -> list[dict[int, int]]:
        return left(self, [said.get(m, own) for m, own in zip(self.registry.memory, kept, strict=True)])

    patch.setattr(Supervisor, "await_quiesced", rest_of)
    patch.setattr(KvParity, "surviving_after_rebuild", all_that_was_said)


def came_whole(patch: pytest.MonkeyPatch) -> None:
    """A mistake: KV counts as moved, though a worker that gave it has died meanwhile."""
    move = MemoryResizer.move_kv

    def moved(self: MemoryResizer, keep: Sequence[SurvivingKv]) -> bool:
        move(self, keep)
        return True

    patch.setattr(MemoryResizer, "move_kv", moved)


def never_late(patch: pytest.MonkeyPatch) -> None:
    """A mistake: a worker that is late is not replaced."""
    right = Supervisor.is_recoverable
    patch.setattr(Supervisor, "is_recoverable", lambda self, loss: loss.is_certain and right(self, loss))


def one_loss_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """A mistake: a loss during a recovery ends the run."""
    right = Supervisor.is_recoverable

    def alone(self: Supervisor, loss: WorkersLostError) -> bool:
        return not self.restart_budget.in_progress and right(self, loss)

    patch.setattr(Supervisor, "is_recoverable", alone)


# A mistake -> a scenario by its seed, which is right without it.
MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], int]] = {
    "KV of who died at rest": (kept_by_the_dead, 11),
    "KV that came in part": (came_whole, 38),
    "who hangs is waited for": (never_late, 8),
    "a loss within a loss": (one_loss_at_a_time, 9),
    "damage is not looked for": (
        lambda patch: patch.setattr(BlockChecksums, "verify_before_step", lambda self, steps: None),
        0,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    make, seed = MISTAKES[mistake]
    of = crossed_fleet(seed)
    with pytest.MonkeyPatch.context() as patch:
        make(patch)
        assert is_broken(check_fleet, of)
    if seed >= SEEDS:
        check_fleet(of)


@pytest.mark.long
def test_who_is_told_to_end_gives_its_kv_away_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where no worker heeds it, it would go on as if nothing were: that is seen, too."""
    told = [of for of in map(crossed_fleet, range(40)) if any(hit.how == TOLD for hit in of.hits)][:NOTICES]
    played = next(x for of in told if (x := (of, check_fleet(of)))[1].left)
    assert played[1].told
    monkeypatch.setattr(TerminationNotices, "poll", lambda self: None)
    assert not check_fleet(played[0]).left


def test_who_is_told_to_end_as_it_starts_gives_its_kv_away_once_it_has_some() -> None:
    """The notice comes before it says where it listens, and is heeded once it has a place."""
    of = fleet_scenario(0)
    options = {**of.options, "partition": "request", "memory_workers": 2, "kv_memory": "1MiB"}
    asks = tuple(longer(random.Random(0), ask) for ask in of.asks)
    more, told = FleetChange(0.0, 3), Strike(("memory", 2), 1, TOLD)
    played = check_fleet(replace(of, options=options, windows=(0,), asks=asks, hits=(told,), changes=(more,)))
    assert (played.told, played.changes) == (1, 1)
    assert played.left


@pytest.mark.parametrize(("place", "call"), [(0, 3), (1, 3), (2, 3), (0, 19), (1, 10), (2, 8)])
def test_one_that_hangs_as_kv_comes_back_by_parity_is_replaced_too(place: int, call: int) -> None:
    """The one that gives, the one that keeps the parity, or the one in the lost one's place: the others give it up, or
    have done all.
    """
    of = fleet_scenario(0)
    options = {**of.options, "partition": "head", "memory_workers": 2, "kv_parity": 1, "kv_memory": "1MiB"}
    options |= {"pipeline": 1, "prefill_workers": 0, "step_timeout_s": HANG_S, "start_timeout_s": 10 * HANG_S}
    asks = tuple(longer(random.Random(0), ask) for ask in of.asks)
    hits = Strike(("memory", 0), 60), Strike(("memory", place), call, HANGS, "RebuildKv")
    played = check_fleet(replace(of, options=options, windows=(0,), asks=asks, hits=hits))
    assert (played.deaths, played.hangs) == (1, 1)
    assert played.seconds < 5 * HANG_S


@pytest.mark.parametrize(
    ("lost", "hangs"), [((0,), ()), ((3,), ()), ((0, 3), ()), ((0, 1), (3,)), ((0, 2), ())], ids=str
)
def test_each_rank_may_lose_a_worker_whose_kv_comes_back(lost: tuple[int, ...], hangs: tuple[int, ...]) -> None:
    """Memory workers 0 and 1 are of one rank each, and 2 and 3 keep their parity."""
    of = fleet_scenario(0)
    options = {**of.options, "partition": "head", "memory_workers": 2, "kv_parity": 1, "kv_memory": "1MiB"}
    options |= {"tensor_parallel_size": 2, "collective": "mesh", "pipeline": 1, "prefill_workers": 0}
    options |= {"step_timeout_s": HANG_S, "start_timeout_s": 10 * HANG_S}
    asks = tuple(longer(random.Random(0), ask) for ask in of.asks)
    hits = [Strike(("memory", place), 60, DIES) for place in lost]
    hits += [Strike(("memory", place), 3, HANGS, "RebuildKv") for place in hangs]
    played = check_fleet(replace(of, options=options, windows=(0,), asks=asks, hits=tuple(hits)))
    assert (played.deaths, played.hangs) == (len(lost), len(hangs))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_hangs_as_kv_moves_is_replaced_within_few_times_of_a_step(place: int) -> None:
    """One that gives, or the one that takes: the others have done all, or give it up, and then it does not rest."""
    of = fleet_scenario(0)
    options = {**of.options, "partition": "head", "memory_workers": 1 + place % 2, "kv_memory": "1MiB"}
    options |= {"pipeline": 1, "prefill_workers": 0, "step_timeout_s": HANG_S, "start_timeout_s": 10 * HANG_S}
    asks = tuple(longer(random.Random(0), ask) for ask in of.asks)
    hits = (Strike(("memory", place // 2), 3, HANGS, "Reshard"),)
    change = FleetChange(0.02, 2 - place % 2)
    played = check_fleet(replace(of, options=options, windows=(0,), asks=asks, hits=hits, changes=(change,)))
    assert (played.hangs, played.changes) == (1, 1)
    assert played.seconds < 5 * HANG_S


@pytest.mark.parametrize(
    ("lost", "hangs", "call"),
    [("memory", "compute", 4), ("memory", "prefill", 4), ("memory", "memory", 2), ("compute", "memory", 2)],
)
def test_one_that_hangs_as_all_meet_behind_a_loss_is_replaced_too(lost: str, hangs: str, call: int) -> None:
    """A worker that waits for it is late, also one that has just come; the hanging one shows as all quiesce."""
    of = fleet_scenario(0)
    options = {**of.options, "partition": "head", "memory_workers": 2, "kv_memory": "1MiB", "pipeline": 1}
    options |= {"prefill_workers": 1, "step_timeout_s": HANG_S, "start_timeout_s": 3 * HANG_S}
    options.pop("prefill_kv_memory", None)
    asks = tuple(longer(random.Random(0), ask) for ask in of.asks)
    hits = Strike((lost, 0), 60), Strike((hangs, int(hangs == "memory")), call, HANGS, "Quiesce")
    played = check_fleet(replace(of, options=options, windows=(0,), asks=asks, hits=hits))
    assert (played.deaths, played.hangs) == (1, 1)
    assert 4 * HANG_S < played.seconds < 6 * HANG_S
