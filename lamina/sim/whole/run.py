"""Plays scenarios of a whole fleet, and checks what must hold: the tokens, each once; blocks and ledger; progress."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pprint import pformat
from typing import Any, NamedTuple

from lamina.config import make_config
from lamina.engine.engine import Engine
from lamina.engine.wire import ViewChanged
from lamina.fleet.pools import Pools
from lamina.protocol.control import ComputeReady
from lamina.protocol.plan import Keep
from lamina.request import RequestOutput
from lamina.sim.clock import VirtualClock
from lamina.sim.model import EOS
from lamina.sim.play import MOST_STEPS, Play, ScenarioError, is_broken, least
from lamina.sim.scenario import BLOCK, MAX_LEN, Arriving

from .baton import Baton
from .integers import IntegerModel
from .process import DIES, STOPS, SimHost
from .scenario import FleetScenario, fleet_scenario

REST_S = 1.0  # for all that is on its way to come
MOST_S = 40.0  # of a scenario, on its clock
OPTIONS: dict[str, Any] = {
    "transport": "shm",
    "block_size": BLOCK,
    "max_model_len": MAX_LEN,
    "max_recoveries": 1_000_000,
    "step_timeout_s": 2 * MOST_S,  # a wait that ends by them is a fault of somebody
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


def check_fleet(of: FleetScenario) -> FleetPlayed:
    """Play ``of``. Raises ScenarioError."""
    try:
        return play_fleet(of)
    except Exception as error:
        raise ScenarioError(f"{type(error).__name__}: {error}\n{pformat(of)}") from error


def play_fleet(of: FleetScenario) -> FleetPlayed:
    """To the end. Raises AssertionError, and whatever goes wrong."""
    rng = random.Random(of.seed)
    baton = Baton(VirtualClock(), rng)
    try:
        played = _FleetPlay(of, baton, rng).run()
        baton.end()
    finally:
        baton.cut()
    return played


def smaller_fleet(of: FleetScenario) -> FleetScenario:
    """A part of a broken scenario that is broken too."""
    return least(of, ("hits", "asks"), lambda less: is_broken(check_fleet, less))


class _WatchedPools(Pools):
    """Tells when all have met anew."""

    met: Callable[[], None] | None = None

    def resume(self, keep: Sequence[Keep]) -> ComputeReady | ViewChanged:
        answer = super().resume(keep)
        if self.met and isinstance(answer, ComputeReady):
            self.met()
        return answer


class _FleetPlay(Play):
    def __init__(self, of: FleetScenario, baton: Baton, rng: random.Random) -> None:
        self._of, self._baton, self._model = of, baton, IntegerModel(of.windows)
        self._host = SimHost(baton, rng, self._model, {(hit.place, hit.call): hit.how for hit in of.hits})
        config, host = make_config({**OPTIONS, **of.options}), self._host
        self._pools = _WatchedPools("integers", config, clock=baton.clock, links=host, launch=host.launch)
        super().__init__(of.asks, Engine(self._pools, config, baton.clock), baton.clock)
        self._pools.met = self._check_rest
        host.begin()

    def run(self) -> FleetPlayed:
        assert self.take_steps(MOST_STEPS), "nothing comes to its end"
        engine, view = self._engine, -1
        self._host.end()
        while view != engine.scheduler.view:  # who has died unnoticed is replaced
            view = engine.scheduler.view
            self._baton.sleep(REST_S)
            self._take(engine.look())
            engine.settle()
            engine.rest()
        self._baton.sleep(REST_S)
        self._check_rest()
        self._check_all_is_free()
        self._check_view()
        replaced = {*self._host.processes} - {*self._host.at_work}
        unhurt = [p.role for p in replaced if not p.was_hit]
        assert len(unhurt) <= self._host.cuts, f"workers were replaced that had not been hit: {unhurt}"
        assert "memory" not in unhurt, "a memory worker was replaced behind the cut of a channel"
        preemptions = engine.scheduler.num_preemptions
        engine.close()
        tokens = sum(self._check_answer(ask, self._outputs.get(r)) for r, (_, ask) in self._asked.items())
        hits = self._host.hits
        return FleetPlayed(hits[DIES], hits[STOPS], self._host.cuts, view, tokens, preemptions, self._clock.now)

    def _wait_until(self, at_s: float) -> None:
        self._baton.sleep(at_s - self._clock.now)

    def _check_view(self) -> None:
        assert self._clock.now < MOST_S, f"it has taken {self._clock.now:.0f} s"

    def _check_rest(self) -> None:
        """Nothing is on its way."""
        processes = [self._host.now("memory", w) for w in range(self._of.options["memory_workers"])]
        stores = [process.memory._store for process in processes]
        tables = [(w, store.tables) for w, store in enumerate(stores) if store is not None]
        assert len(tables) == len(stores), "a memory worker has no store"
        self._check_tables(tables, self._engine.info.holders)

    def _check_answer(self, ask: Arriving, output: RequestOutput | None) -> int:
        """Exactly its tokens; so many there are."""
        if ask.cancel_s is not None:
            return 0
        assert output is not None, "a request without an answer"
        assert output.finished, "a request that has not ended"
        most = min(ask.params["max_tokens"], MAX_LEN - len(ask.prompt))
        for one in output.outputs:
            ended = one.token_ids[-1:] == [EOS] and not ask.params["ignore_eos"]
            assert one.finish_reason == ("stop" if ended else "length")
            assert len(one.token_ids) == most or ended, f"{len(one.token_ids)} tokens in place of {most}"
            assert self._model.right(ask.prompt, one.token_ids), f"{one.token_ids} behind {ask.prompt} are not right"
        return sum(len(one.token_ids) for one in output.outputs)


def main(first: int = 0, count: int = 200) -> None:
    """Play ``count`` seeds. A broken one is made small, printed and raised."""
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        of = fleet_scenario(seed)
        try:
            played = check_fleet(of)
        except ScenarioError:
            check_fleet(smaller_fleet(of))
            raise
        total.update(played._asdict())
    counts = ", ".join(
        f"{total[name]} {name}" for name in ("deaths", "stops", "cuts", "views", "tokens", "preemptions")
    )
    sys.stdout.write(f"{count} scenarios from {first} on: {counts}, nothing wrong\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
