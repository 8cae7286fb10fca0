"""The whole fleet, hit at any call of any process: each request gets its tokens, once; and mistakes are seen.

Covers: lamina/workers/compute/main.py, lamina/workers/prefill/main.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from msgspec import structs

from lamina.engine.engine import Engine
from lamina.executor.launchers import HostLostError
from lamina.executor.worker_executor import WorkerExecutor
from lamina.executor.worker_registry import WorkerRegistry
from lamina.netstack import ChannelUnreachable, Terms
from lamina.protocol.control import Connect, RunRound, StepDone
from lamina.protocol.executor import EpochChanged, ReducedCapacityError
from lamina.protocol.step_plan import ProtocolError, SurvivingKv
from lamina.scheduler.kv_manager.migration import KvMigration
from lamina.scheduler.sequence import Sequence
from lamina.workers.compute.compute_worker import ComputeWorker
from lamina.workers.epoch_channels import SILENT_S
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer import block_parts, parity_rebuild
from lamina.workers.memory.main import MemoryServer
from lamina.workers.prefill.prefill_worker import PrefillWorker
from simulation.play import ScenarioError, is_broken
from simulation.whole.network import SimChannel, SimFabric
from simulation.whole.process import CUT, SimHost
from simulation.whole.run import FleetPlay, check_fleet, play_fleet, smaller_fleet
from simulation.whole.scenario import (
    FleetChange,
    FleetScenario,
    Strike,
    fleet_scenario,
    leaving,
    longer,
    moving_fleet,
    planned_fleet,
)

from .test_scenarios import MISTAKES as OF_THE_ENGINE
from .test_scenarios import replacing

SEEDS, PARTS, MANY = 6, 3, 200
PLANNED = 10
MOVING = 6
EXITS = 2, 4
TURNS = 9
Mistake = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.long(but=["0"])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_stream_goes_on(part: int) -> None:
    deaths = sum(check_fleet(fleet_scenario(seed)).deaths for seed in range(part, SEEDS, PARTS))
    assert deaths


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(2 * PARTS))
def test_every_stream_of_many_goes_on(part: int) -> None:
    """Once a week, of two hundred seeds those that each run leaves out, one half with changes of what there is."""
    seeds = range(SEEDS + part // 2, MANY, PARTS)
    assert sum(check_fleet((planned_fleet if part % 2 else fleet_scenario)(seed)).deaths for seed in seeds)


def test_whoever_dies_once_it_has_told_of_its_kv_has_none() -> None:
    """Seed 200,063: a memory worker does while the others still quiesce."""
    assert check_fleet(planned_fleet(200_063)).deaths


def test_a_compute_worker_that_stops_is_noticed_while_prompts_are_computed_alone() -> None:
    """Seed 200,145: no step is under way, and memory workers wait for the grants that it passes on."""
    assert check_fleet(planned_fleet(200_145)).stops


def test_a_memory_worker_goes_behind_two_cuts_of_its_channels() -> None:
    """Seed 910,132: a prefill worker and then another one lose their way to it."""
    assert check_fleet(planned_fleet(910_132)).cuts == 2


class LastingCut:
    """From the first cut on, no worker reaches the host of that memory worker, also none that is started later; the
    driver does. ``elsewhere``: whether another host has room.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, elsewhere: bool = True) -> None:
        self.place, self.left, self.asked = "", False, 0  # the place, and whether it is on another host by now
        self._there = set[str]()  # names of workers on that host
        cut, connect, start = SimChannel.cut, SimFabric.connect, SimHost.start

        def cut_off(channel: SimChannel) -> None:
            self.place = "-".join(channel.peer_name.split("-")[:2])
            cut(channel)

        def reach(fabric: SimFabric, url: str, terms: Terms, *, timeout_s: float) -> Any:
            if self.place and f"{terms.peer}-".startswith(f"{self.place}-"):
                if not self.left:
                    self._there.add(terms.peer)
                if terms.peer in self._there:
                    assert fabric.process is not None
                    fabric.process.sim_host.baton.sleep(timeout_s)
                    self.asked += 1
                    raise ChannelUnreachable(f"{url}: connect: the listener did not accept in time")
            return connect(fabric, url, terms, timeout_s=timeout_s)

        def leave(host: SimHost, role: str, index: int) -> None:
            assert f"{role}-{index}" == self.place, "one that is reached"
            self.left = True

        def begin(host: SimHost, role: str, index: int, threads: int = 0) -> Any:
            if self.left and not elsewhere:
                raise HostLostError("no host has room")
            return start(host, role, index, threads)

        monkeypatch.setattr(SimChannel, "cut", cut_off)
        monkeypatch.setattr(SimFabric, "connect", reach)
        monkeypatch.setattr(SimHost, "avoid_host", leave)
        monkeypatch.setattr(SimHost, "start", begin)


def cut_once(call: int) -> FleetScenario:
    """A run of one compute worker and two memory workers."""
    of = next(
        of
        for seed in range(1000)
        if (of := fleet_scenario(seed)).options["pipeline"] == 1
        and (of.options["memory_workers"], of.options["prefill_workers"]) == (2, 0)
        and len(of.asks) > 2
    )
    return replace(of, hits=(Strike(("compute", 0), call, CUT),))


@pytest.mark.parametrize("call", [12, 30, 70])
def test_a_cut_that_lasts_sends_a_memory_worker_to_another_host(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the compute worker goes, which is stateless, and then the worker that it does not reach: no start is waited
    for.
    """
    lasting = LastingCut(monkeypatch)
    monkeypatch.setattr(FleetPlay, "check_who_is_left", lambda play: None)  # who is blamed was not hit itself
    played = check_fleet(cut_once(call))
    assert (played.cuts, played.tokens > 0) == (1, True)
    assert lasting.left
    assert SILENT_S <= lasting.asked <= SILENT_S + 2
    assert SILENT_S < played.seconds < 2 * SILENT_S


def test_where_no_other_host_has_room_it_says_how_many_could_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    LastingCut(monkeypatch, elsewhere=False)
    with pytest.raises(ReducedCapacityError, match="no host has room") as told:
        play_fleet(cut_once(30))
    assert told.value.workers_that_fit == {"memory_workers": 1}


@pytest.mark.long
def test_engines_die_and_memory_workers_come_and_go() -> None:
    """Some of them in the midst of that; with ranks, and in stripes."""
    played = [check_fleet(planned_fleet(seed)) for seed in range(PLANNED)]
    assert sum(one.engines for one in played)
    assert sum(one.changes for one in played)


@pytest.mark.long(but=["the last one that leaves is not waited for"])
@pytest.mark.parametrize("mistake", ["", "the last one that leaves is not waited for"])
def test_sequences_that_leave_keep_their_kv(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ranks, too: none is computed again, whose numbers would be right, and their last bits others."""
    begun_anew, restart = list[int](), Sequence.reset_computed

    def counted(self: Sequence) -> None:
        if self.num_output_tokens and self.id >= 0:
            begun_anew.append(self.request_id)
        restart(self)

    def over_too_early(self: KvMigration, running: Iterable[Sequence]) -> bool:
        there = any(self._is_leaving(s) for s in running if not s.finished)
        return self._copy is None and (self._fails or self._stuck or not there)

    monkeypatch.setattr(Sequence, "reset_computed", counted)
    if mistake:
        monkeypatch.setattr(KvMigration, "is_drained", over_too_early)
    played = [check_fleet(unhurt(seed)) for seed in (EXITS[:1] if mistake else EXITS)]
    assert sum(one.moved for one in played)
    assert all(one.changes for one in played)
    assert bool(begun_anew) == bool(mistake)


def unhurt(seed: int) -> FleetScenario:
    """A run of two ranks, whose sequences leave some of their memory workers, with room for all of them."""
    of, rng = fleet_scenario(seed), random.Random(seed)
    more, changes = next(x for x in (leaving(rng) for _ in range(100)) if "tensor_parallel_size" in x[0])
    options = {**of.options, **more, "kv_memory": "1MiB", "pipeline": 1 + seed % 2}
    options.pop("prefill_kv_memory", None)
    asks = tuple(longer(rng, ask) for ask in of.asks)
    return replace(of, options=options, windows=(0,), asks=asks, hits=(), changes=changes[:1])


@pytest.mark.long(but=["0"])
@pytest.mark.parametrize("part", range(PARTS))
def test_what_moves_while_all_decode_and_who_waits_to_take_a_place(part: int) -> None:
    """The parts are sequences and stripes on loan, prompts in stages, and spares."""
    played = [check_fleet(moving_fleet(seed)) for seed in range(part, MOVING, PARTS)]
    assert sum(one.deaths + one.stops + one.cuts for one in played)


def test_a_loss_that_counters_show_as_memory_workers_come_or_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread asks for counters after the halt and before KV moves: it moves from where it lay all the same."""
    wait, struck = WorkerExecutor.wait, list[WorkerExecutor]()

    def struck_behind(self: WorkerExecutor) -> Any:
        done = wait(self)
        if isinstance(done, EpochChanged) and done.capacity is not None:
            self.registry.compute[0].handle.join(0.0)
            self.stats()
            struck.append(self)
        return done

    monkeypatch.setattr(WorkerExecutor, "wait", struck_behind)
    monkeypatch.setattr(FleetPlay, "check_who_is_left", lambda play: None)  # who was struck was not hit by the host
    of = fleet_scenario(3)
    options = {**of.options, "partition": "request", "memory_workers": 3, "kv_memory": "1MiB"}
    asks = tuple(longer(random.Random(3), ask) for ask in of.asks)
    change = FleetChange(0.02, 2, leaving=(0,))
    assert check_fleet(replace(of, options=options, windows=(0,), asks=asks, hits=(), changes=(change,))).changes
    assert struck


def blocks_of_each(store: KvStore, group: int, keep: Iterable[SurvivingKv]) -> list[int]:
    return [block for each in keep for block in store.tables.block_table(group, each.sequence)[1]]


@pytest.mark.parametrize("mistake", ["", "what sequences share comes for each of them"])
def test_kv_comes_back_by_parity_in_however_many_messages(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message has one block, and long prompts take as many: these are short."""
    monkeypatch.setattr(block_parts, "PART_BYTES", 1)
    if mistake:
        monkeypatch.setattr(parity_rebuild, "distinct_blocks", blocks_of_each)
    assert is_broken(check_fleet, planned_fleet(191)) == bool(mistake)


def test_a_fork_that_is_further_than_its_source_behind_a_loss() -> None:
    """Steps were done that had not been reported: the source would write into blocks that they share."""
    check_fleet(fleet_scenario(1108))


def test_a_scenario_is_played_again_as_it_was() -> None:
    """To the last digit of its clock."""
    of = fleet_scenario(1)
    assert play_fleet(of) == play_fleet(of)


def inbox_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake: what workers sent before a loss is still in the inbox after it."""

    def enter(self: WorkerRegistry, view: int, still: tuple[type[Any], ...] = ()) -> None:
        self.epoch, self._kinds_of_old_epochs = view, still

    def said(self: WorkerRegistry, kind: type[Any]) -> list[Any]:
        return [message for member in self for message in member.inbox if isinstance(message, kind)]

    monkeypatch.setattr(WorkerRegistry, "begin_epoch", enter)
    monkeypatch.setattr(WorkerRegistry, "read_messages", said)


def turns_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compute worker goes on with the steps of an older epoch."""
    right = ComputeWorker.connect

    def wrong(self: ComputeWorker, *args: Any) -> None:
        turns = self._tasks
        right(self, *args)
        self._tasks = turns

    monkeypatch.setattr(ComputeWorker, "connect", wrong)


def chunks_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill worker goes on with what was granted under an older epoch."""
    right = PrefillWorker.connect

    def wrong(self: PrefillWorker, *args: Any) -> None:
        computed = list(self.computed)
        right(self, *args)
        self.computed.extend(computed)

    monkeypatch.setattr(PrefillWorker, "connect", wrong)


def steps_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake: after a loss the rounds in flight are sent once more under the new epoch, and nothing is
    taken back.
    """
    right, sent = WorkerExecutor.submit, list[RunRound]()

    def submit(self: WorkerExecutor, new: RunRound) -> None:
        sent.append(new)
        right(self, new)

    def change(self: Engine, change: Any) -> None:
        for done in change.done:
            self.on_step_done(done)
        there = {s: min(kept.get(s, 0) for kept in change.surviving) for s in self.accounting.sequences}
        ready: Any = self.executor.resume([SurvivingKv(s, n) for s, n in there.items() if n])
        self.scheduler.epoch = ready.epoch
        for new in sent:
            left = [s for s in new.steps if (s.plan.batch, s.plan.step) in self.in_flight]
            steps = [structs.replace(s, plan=structs.replace(s.plan, epoch=ready.epoch)) for s in left]
            if steps:
                right(self.executor, RunRound(round=new.round, steps=steps))  # type: ignore[arg-type]

    monkeypatch.setattr(WorkerExecutor, "submit", submit)
    monkeypatch.setattr(Engine, "on_epoch_changed", change)


def deaf_to_halts(self: MemoryServer, message: object) -> None:
    """It hears of a Connect alone."""
    if isinstance(message, Connect):
        self.next_epoch = message.epoch
        if self.worker is not None:
            self.worker.leave_epochs_before(message.epoch)


# A mistake -> a scenario by its seed, which is right without it.
MISTAKES: dict[str, tuple[Mistake, int]] = {
    "plans are of an older epoch": (OF_THE_ENGINE["the epoch"], 0),
    "no epoch is looked at": (replacing(WorkerRegistry, "_is_old", lambda self, message: False), 11),
    "the inbox is not drained": (inbox_kept, 16),
    "turns are kept": (turns_kept, 3),
    "grants are kept": (chunks_kept, 2),
    "prompts are kept": (OF_THE_ENGINE["prompts"], 0),
    "the last tokens are kept": (OF_THE_ENGINE["num_output_placeholders"], 1),
    "no truncation": (replacing(KvStore, "reconcile", lambda self, keep: None), 0),
    "a block is used twice": (OF_THE_ENGINE["shared blocks"], 13),
    "a delta twice": (OF_THE_ENGINE["a delta twice"], 47),
    "a Halt is ignored": (replacing(MemoryServer, "on_message", deaf_to_halts), 0),
    "steps are sent again": (steps_sent_again, 0),
}


@pytest.mark.long(but=["plans are of an older epoch", "turns are kept", "grants are kept", "prompts are kept"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    """In a scenario that is right without it, as those of the first seeds are."""
    make, seed = MISTAKES[mistake]
    of = fleet_scenario(seed)
    with pytest.MonkeyPatch.context() as patch:
        make(patch)
        assert is_broken(check_fleet, of)
    if seed >= SEEDS:
        check_fleet(of)


@pytest.mark.long
def test_one_that_fails_and_says_why_is_seen_though_another_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It also holds where memory workers come and go, and it is open which are to be left."""
    right, turns = ComputeWorker.run_next, count(1)

    def run(self: ComputeWorker) -> StepDone | None:
        if self.has_work and next(turns) == TURNS:
            raise ProtocolError("a mistake")
        return right(self)

    monkeypatch.setattr(ComputeWorker, "run_next", run)
    with pytest.raises(ScenarioError, match=r"it fails: \w+ worker: a mistake"):
        check_fleet(planned_fleet(1))


@pytest.mark.long
def test_a_broken_scenario_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    make, seed = MISTAKES["no truncation"]
    make(monkeypatch)
    broken = fleet_scenario(seed)
    small = smaller_fleet(broken)
    assert len(small.hits) == 1
    assert len(small.asks) <= len(broken.asks)
    assert is_broken(check_fleet, small)
