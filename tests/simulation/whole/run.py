"""Plays scenarios of a whole fleet, and checks what must hold: the tokens, each once, blocks and ledger,
and progress.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pprint import pformat
from typing import Any, NamedTuple

import torch

from lamina.config.flat_options import make_config
from lamina.engine.engine import Engine
from lamina.engine.evacuation import evacuation_of
from lamina.engine.scheduler_factory import check_kv_capacity
from lamina.executor.worker_executor import WorkerExecutor
from lamina.netstack import HERE
from lamina.protocol.control import ComputeReady
from lamina.protocol.executor import EpochChanged
from lamina.protocol.step_plan import SurvivingKv
from lamina.request import ResumedCompletion
from lamina.scheduler.kv_manager.migration import KvMigration
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.workers.memory.state_store import state_shards
from simulation.model import EOS, Letters, letters
from simulation.play import MOST_STEPS, Play, ScenarioError, SoFar, is_broken, least
from simulation.scenario import BLOCK, MAX_LEN, Arriving

from .baton import Baton
from .hybrid_integers import HybridIntegers
from .integers import IntegerModel
from .process import DIES, HANGS, STOPS, TOLD, EngineDied, SimHost
from .scenario import FleetScenario, fleet_scenario, planned_fleet

REST_S = 1.0  # for all that is on its way to come
MOST_S = 40.0  # of an engine, on the clock
OPTIONS: dict[str, Any] = {
    "transport": HERE,
    "block_size": BLOCK,
    "max_model_len": MAX_LEN,
    "max_recoveries": 1_000_000,
    "step_timeout_s": 2 * MOST_S,  # a wait that ends by them is a fault of some process
    "start_timeout_s": 2 * MOST_S,
}


class FleetPlayed(NamedTuple):
    """Counts of what has happened, and virtual seconds."""

    deaths: int
    stops: int
    cuts: int
    views: int
    tokens: int
    preemptions: int
    seconds: float
    engines: int  # that died
    changes: int  # of memory workers, by plan
    moved: int  # sequences and runs of stripes that went from one memory worker to another while all decoded
    hangs: int = 0
    told: int = 0  # to end, and went on
    left: int = 0  # bytes of KV of these that others have taken
    flips: int = 0


def check_fleet(of: FleetScenario) -> FleetPlayed:
    """Play ``of``. Raises ScenarioError."""
    try:
        return play_fleet(of)
    except Exception as error:
        raise ScenarioError(f"{type(error).__name__}: {error}\n{pformat(of)}") from error


def play_fleet(of: FleetScenario) -> FleetPlayed:
    """To the end. Raises AssertionError, and whatever goes wrong."""
    rng, threads = random.Random(of.seed), torch.get_num_threads()
    baton = Baton(VirtualClock(), rng)
    torch.set_num_threads(1)  # one thread runs at a time, and has little to compute
    try:
        played = FleetPlay(of, baton, rng).run()
        baton.end()
    finally:
        baton.cut()
        torch.set_num_threads(threads)
    return played


def smaller_fleet(of: FleetScenario) -> FleetScenario:
    """A part of a broken scenario that is broken too."""
    return least(of, ("hits", "asks", "changes", "deaths"), lambda less: is_broken(check_fleet, less))


class _WatchedPools(WorkerExecutor):
    """Tells when all have met anew."""

    met: Callable[[], None] | None = None

    @property
    def there(self) -> set[Any]:
        """The processes of all who have a place, or wait for one."""
        return {member.handle for member in (*self.registry, *self.workers.spare_workers)}

    @property
    def memory(self) -> list[Any]:
        """The processes of memory workers, by number."""
        return [member.handle for member in self.registry.memory]

    def resume(self, keep: Sequence[SurvivingKv]) -> ComputeReady | EpochChanged:
        answer = super().resume(keep)
        if self.met and isinstance(answer, ComputeReady):
            self.met()
        return answer


class FleetPlay(Play):
    def __init__(self, of: FleetScenario, baton: Baton, rng: random.Random) -> None:
        model = HybridIntegers(of.windows) if of.is_hybrid else IntegerModel(of.windows)
        self._of, self._baton, self._model = of, baton, model
        hits = {(hit.place, hit.behind, hit.call): hit.how for hit in of.hits}
        self._host = SimHost(baton, rng, self._model, hits, of.deaths)
        self._options = {**OPTIONS, **of.options}
        self._changes, self._changed, self._engines, self._moved = list(of.changes), 0, 0, 0
        self._ended: dict[int, list[SoFar]] = {}  # by place: completions that earlier engines have finished
        super().__init__(of.asks, self._open(), baton.clock)

    def _open(self) -> Engine:
        """An engine, with its workers. Raises EngineDied."""
        config, host = make_config(self._options), self._host
        self._pools = _WatchedPools("integers", config, clock=host.baton.clock, links=host, launch=host.launch)
        engine = Engine(self._pools, config, host.baton.clock)
        self._pools.met = self._check_rest
        host.begin()
        return engine

    def run(self) -> FleetPlayed:
        while True:
            try:
                assert self.take_steps(MOST_STEPS), "nothing comes to its end"
                break
            except EngineDied:
                self._go_on()
        engine, view, hits = self._engine, -1, self._host.hits
        self._host.end()
        while view != engine.scheduler.epoch:  # who has died unnoticed is replaced
            view = engine.scheduler.epoch
            self._baton.sleep(REST_S)
            self._take(engine.check_workers())
            engine.release_idle_blocks()
            engine.finish_in_flight()
        self._baton.sleep(REST_S)
        self._check_rest()
        self._check_all_is_free()
        self._check_view()
        if not (self._engines or self._of.changes or hits[HANGS] or hits[TOLD]):  # by which others end, too
            self.check_who_is_left()
        preemptions = engine.scheduler.num_preemptions
        engine.close()
        for request, (place, _) in self.asked.items():
            self._ended[place] = list(self._heard(request).values())
        tokens = sum(self._check_answer(self._of.asks[place], seen) for place, seen in self._ended.items())
        assert len(self._ended) == len(self._of.asks), "a request without an answer"
        moved, left = (
            self._moved + _moved_blocks(engine),
            self._pools.resizer.moved_bytes["leave"],
        )
        return FleetPlayed(hits[DIES], hits[STOPS], self._host.cuts, view, tokens, preemptions, self._clock.now,
                           self._engines, self._changed, moved, hits[HANGS], hits[TOLD], left,
                           self._host.num_damaged)  # fmt: skip

    def check_who_is_left(self) -> None:
        replaced = {*self._host.processes} - self._pools.there
        unhurt = [p.role for p in replaced if not p.was_hit]
        assert len(unhurt) <= self._host.cuts, f"workers were replaced that had not been hit: {unhurt}"
        twice = unhurt.count("memory") <= self._host.cuts // 2  # so often to whom others have lost their way
        assert twice, "a memory worker was replaced behind the cut of one channel"

    def _go_on(self) -> None:
        """The engine has died: another one goes on with what readers have, as a server's does."""
        while True:
            self._engines += 1
            self._moved += _moved_blocks(self._engine)
            parity = self._options.get("kv_parity", 0) * self._options.get("tensor_parallel_size", 1)
            self._options["memory_workers"] = len(self._pools.memory) - parity
            self._host.bury()
            with suppress(EngineDied):  # so does the next one, perhaps, as it starts
                self._engine = self._open()
                break
        heard = [(place, ask, self._heard(request)) for request, (place, ask) in self.asked.items()]
        self.asked, self._outputs, self._seen = {}, {}, {}
        for place, ask, seen in heard:
            if len(seen) == ask.params["n"] and all(one.reason for one in seen.values()):
                self._ended[place] = list(seen.values())
                continue
            told = [
                ResumedCompletion(
                    index=i, token_ids=list(one.tokens), num_chars=len(one.text), is_finished=bool(one.reason)
                )
                for i, one in seen.items()
            ]
            again = self._engine.add(
                list(ask.prompt), ask.sampling, make_detokenizer=Letters, resume_from=told, accepted=True
            )
            self.asked[again] = place, ask
            self._seen |= {(again, i): one for i, one in seen.items()}

    def _heard(self, request: int) -> dict[int, SoFar]:
        """Returns the outputs of its completions, by their numbers."""
        return {i: seen for (r, i), seen in sorted(self._seen.items()) if r == request}

    def _look_round(self) -> None:
        """Changes, one at a time; what would need KV to be computed again is refused, as the server does."""
        engine, elastic = self._engine, self._pools.resizer
        outcome = elastic.take_outcome()
        self._changed += outcome is not None and not outcome.error
        while self._changes and self._changes[0].at_s <= self._clock.now and not elastic.in_progress:
            asked = self._changes.pop(0)
            with suppress(ValueError):
                change = elastic.plan(asked.workers)
                check_kv_capacity(engine.scheduler, engine.worker_info, change.capacity)
                gone = asked.leaving or range(asked.workers, len(self._pools.memory))
                elastic.begin(change, asked.leaving, leaves_by_itself=evacuation_of(engine, gone))

    def _wait_until(self, at_s: float) -> None:
        self._baton.sleep(at_s - self._clock.now)

    def _check_view(self) -> None:
        assert self._clock.now < MOST_S * (1 + self._engines), f"it has taken {self._clock.now:.0f} s"

    def _check_rest(self) -> None:
        """Nothing is on its way."""
        stores = [process.memory.store for process in self._pools.memory]
        tables = [(w, store.tables) for w, store in enumerate(stores) if store is not None]
        assert len(tables) == len(stores), "a memory worker has no store"
        if not self._pools.resizer.in_progress:
            ready = [process.memory.preallocation.arena.nbytes for process in self._pools.memory]
            assert not any(ready), f"memory that was made ready is nobody's: {ready} bytes"
        self._check_tables(tables, self._engine.worker_info.holders)
        states = [
            (state_shards(store.bind_request), store.states.versions.report())
            for store in stores
            if store is not None and store.states is not None
        ]
        for one, _ in states:
            same = [report for other, report in states if other == one]
            assert all(report == same[0] for report in same), f"memory workers have other states: {same}"

    def _check_answer(self, ask: Arriving, answer: Sequence[SoFar]) -> int:
        """Exactly its tokens; so many there are."""
        if ask.cancel_s is not None:
            return 0
        assert len(answer) == ask.params["n"], "a completion without an answer"
        most = min(ask.params["max_tokens"], self._options["max_model_len"] - len(ask.prompt))
        for tokens, text, reason in answer:
            ended = tokens[-1:] == [EOS] and not ask.params["ignore_eos"]
            assert reason == ("stop" if ended else "length"), f"it has ended by {reason}"
            assert len(tokens) == most or ended, f"{len(tokens)} tokens in place of {most}"
            assert text == letters(tokens[:-1] if ended else tokens), "its text is none of its tokens"
            assert self._model.right(ask.prompt, tokens), f"{tokens} behind {ask.prompt} are not right"
        return sum(len(seen.tokens) for seen in answer)


def _moved_blocks(engine: Engine) -> int:
    migration = engine.scheduler.features.get(KvMigration)
    return migration.num_moved_blocks if migration else 0


def main(first: int = 0, count: int = 200) -> None:
    """Play ``count`` seeds. A broken one is made small, printed and raised."""
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        for of in (fleet_scenario(seed), planned_fleet(seed)):
            try:
                played = check_fleet(of)
            except ScenarioError:
                check_fleet(smaller_fleet(of))
                raise
            total.update(played._asdict())
    counts = ", ".join(f"{total[name]} {name}" for name in FleetPlayed._fields if name != "seconds")
    sys.stdout.write(f"{2 * count} scenarios from {first} on: {counts}, nothing wrong\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
