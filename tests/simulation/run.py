"""Plays scenarios, and checks rules that must hold after any death. Each token comes once, blocks are as in the ledger,
and there is progress.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from pprint import pformat
from typing import Any, NamedTuple

from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import make_config
from lamina.engine.engine import Engine
from lamina.engine.evacuation import Evacuation
from lamina.engine.scheduler_factory import check_kv_capacity
from lamina.netstack import HERE
from lamina.request import CompletionOutput, RequestOutput, ResumedCompletion
from lamina.tools.plan.simulator.clock import VirtualClock

from .elastic import capacity_of
from .model import Letters
from .play import MOST_STEPS, Play, ScenarioError, SoFar, in_order, is_broken, least
from .scenario import Scenario, leaving, planned, scenario
from .wire import SimExecutor

Completion = tuple[Any, ...]


class Played(NamedTuple):
    """``requests``: of each its completions, and the log-probabilities of its prompt."""

    requests: list[tuple[Completion, ...]]
    losses: int
    preemptions: int
    changes: int
    counts: Counter[str]  # of what memory workers have done


class BegunRequest(NamedTuple):
    """A request that is not over, as its reader has it. It has the part of its completions that the next engine gets,
    the part that was seen, and the log-probabilities of its prompt and of that part.
    """

    place: int
    told: list[ResumedCompletion]
    seen: dict[int, SoFar]
    scores: Any
    logprobs: list[Any]


class HeardByReaders(NamedTuple):
    """The outputs that readers have of an engine in the midst of its work. ``ended``: of requests that are over, by
    place. ``asked``: the others, in the order of their numbers. ``left``: places of those that have not come.
    """

    ended: dict[int, RequestOutput]
    asked: list[BegunRequest]
    left: list[int]

    @property
    def some(self) -> bool:
        """Returns whether the next engine goes on with a token of any request."""
        return any(one.token_ids for request in self.asked for one in request.told)


def check(of: Scenario) -> Played:
    """Plays ``of``, and the same without losses and changes: no reader may see a difference. Raises ScenarioError."""
    with _told_by(of):
        played, wanted = play(of), play(_calm(of))
        _compare(of, played, wanted)
    return played


def check_restart(of: Scenario) -> bool:
    """Play a part of ``of``; then another engine goes on with what readers have by then. Whether some request had begun
    by then. Raises ScenarioError.
    """
    with _told_by(of):
        calm = EnginePlay(_calm(of))
        wanted, before = calm.run(), EnginePlay(of)
        before.take_steps(_last_step(of, calm))
        return _check_next(of, before.heard(), wanted)


def check_all(of: Scenario) -> Played:
    """Both of these, in three plays in place of five. Raises ScenarioError."""
    with _told_by(of):
        calm, all_of_it = EnginePlay(_calm(of)), EnginePlay(of)
        wanted = calm.run()
        all_of_it.take_steps(_last_step(of, calm))
        heard, played = all_of_it.heard(), all_of_it.run()
        _compare(of, played, wanted)
        _check_next(of, heard, wanted)
    return played


@contextmanager
def _told_by(of: Scenario) -> Iterator[None]:
    """Whatever goes wrong is a ScenarioError that has the scenario."""
    try:
        yield
    except Exception as error:
        raise ScenarioError(f"{type(error).__name__}: {error}\n{pformat(of)}") from error


def _calm(of: Scenario) -> Scenario:
    return replace(of, faults=(), changes=())


def _last_step(of: Scenario, calm: EnginePlay) -> int:
    """Before an engine dies."""
    return random.Random(of.seed).randint(1, calm.steps)


def _check_next(of: Scenario, heard: HeardByReaders, wanted: Played) -> bool:
    """The next engine goes on with what was ``heard``, and has the seeds that the one before has drawn."""
    after = EnginePlay(replace(with_seeds(of), faults=()))
    after.go_on_from(heard)
    _compare(of, after.run(), wanted)
    return heard.some


def _compare(of: Scenario, played: Played, wanted: Played) -> None:
    for ask, answer, same in zip(of.asks, played.requests, wanted.requests, strict=True):
        if ask.cancel_s is None:
            assert answer == same, f"{answer} in place of {same}"


def with_seeds(of: Scenario) -> Scenario:
    """The same, with the seeds that an engine would draw, in the order of arrival."""
    rng, asks = random.Random(of.options["seed"]), list(of.asks)
    for place, ask in in_order(of.asks):
        if ask.params.get("seed") is None:
            asks[place] = replace(ask, params={**ask.params, "seed": rng.getrandbits(62)})
    return replace(of, asks=tuple(asks))


def config_of(of: Scenario) -> EngineConfig:
    """Returns the configuration of the engine. Its partition counts where stripes, or sequences, may move."""
    partition = of.partition if of.partition in ("request", "spill") else "head"
    return make_config({**of.options, "transport": HERE, "partition": partition})


def play(of: Scenario) -> Played:
    """To the end. Raises AssertionError, and whatever goes wrong."""
    return EnginePlay(of).run()


def smaller(of: Scenario) -> Scenario:
    """A part of a broken scenario that is broken too, in the same way."""
    broken_by = check if is_broken(check, of) else check_restart
    return least(of, ("faults", "changes", "asks"), lambda less: is_broken(broken_by, less))


class EnginePlay(Play):
    """One engine over modelled workers."""

    def __init__(self, of: Scenario) -> None:
        clock = VirtualClock()
        self._of, self._wire = of, SimExecutor(of, clock)
        super().__init__(of.asks, Engine(self._wire, config_of(of), clock), clock)
        self._changes = list(of.changes)
        self._views = self._wire.view
        self._ended: dict[int, RequestOutput] = {}  # by place: of an engine before this one
        self._scores: dict[int, Any] = {}  # by request: of its prompt, reported by an engine before this one
        self._logprobs: dict[int, list[Any]] = {}  # by request: of the tokens of each completion, likewise

    @property
    def executor(self) -> SimExecutor:
        return self._wire

    def run(self) -> Played:
        assert self.take_steps(MOST_STEPS), "nothing comes to its end"
        engine = self._engine
        engine.release_idle_blocks()
        engine.finish_in_flight()
        self._check_rest()
        self._check_all_is_free()
        answers: list[tuple[Completion, ...]] = [()] * len(self._of.asks)
        for request, (place, _) in self.asked.items():
            output = self._outputs.get(request)
            if output and request in self._scores:
                output.prompt_logprobs = self._scores[request]
            for one, had in zip(output.outputs if output else (), self._logprobs.get(request, ()), strict=False):
                if one.logprobs is not None:
                    one.logprobs[: len(had)] = had
            answers[place] = _told(output)
        for place, output in self._ended.items():
            answers[place] = _told(output)
        wire, preemptions = self._wire, engine.scheduler.num_preemptions
        return Played(answers, wire.losses, preemptions, wire.elastic.changes, wire.counts)

    def heard(self) -> HeardByReaders:
        """Returns the outputs that readers have by now."""
        ended, asked = dict[int, RequestOutput](), list[BegunRequest]()
        for request, (place, _) in self.asked.items():
            output = self._outputs.get(request)
            if output is not None and output.finished:
                ended[place] = output
                continue
            told = [_as_told(one) for one in output.outputs] if output else []
            logprobs = [copy(one.logprobs) for one in output.outputs] if output else []
            seen = {i: seen for (r, i), seen in self._seen.items() if r == request}
            scores = output.prompt_logprobs if output and output.outputs[0].token_ids else None
            asked.append(BegunRequest(place, told, seen, copy(scores), logprobs))
        return HeardByReaders(ended, asked, [place for place, _ in self.left])

    def go_on_from(self, heard: HeardByReaders) -> None:
        """With the requests of an engine that has died, as far as readers have them."""
        asks = self._of.asks
        self.left, self._ended = [(place, asks[place]) for place in heard.left], dict(heard.ended)
        for place, told, seen, scores, logprobs in heard.asked:
            ask = asks[place]
            again = self._engine.add(list(ask.prompt), ask.sampling, make_detokenizer=Letters, resume_from=told)
            self.asked[again], self._logprobs[again] = (place, ask), logprobs
            if any(one.token_ids for one in told[:1]):
                self._scores[again] = scores
            self._seen |= {(again, i): one for i, one in seen.items()}

    def _look_round(self) -> None:
        """Changes, one at a time; what would need KV to be computed again is refused, as the server does."""
        elastic = self._wire.elastic
        while self._changes and self._changes[0].at_s <= self._clock.now and not elastic.under_way:
            asked = self._changes.pop(0)
            shape = self._of.layout_of(asked.workers, asked.num_blocks)
            with suppress(ValueError):
                check_kv_capacity(self._engine.scheduler, self._engine.worker_info, capacity_of(shape))
                gone = range(asked.workers, len(self._wire.memory))
                leave = self._engine.config.migrates_sequences and gone
                elastic.begin(asked, shape, Evacuation(self._engine, gone) if leave else None)

    def _check_view(self) -> None:
        if self._wire.view != self._views:
            self._views = self._wire.view
            self._check_rest()

    def _check_rest(self) -> None:
        self._check_tables([(w.number, w.tables) for w in self._wire.memory], self._wire.layout.holders)


def _told(output: RequestOutput | None) -> tuple[Completion, ...]:
    if output is None:
        return ()
    each = tuple((tuple(o.token_ids), o.text, o.finish_reason, o.stop_reason, str(o.logprobs)) for o in output.outputs)
    return (*each, (str(output.prompt_logprobs),))


def _as_told(of: CompletionOutput) -> ResumedCompletion:
    return ResumedCompletion(index=of.index, token_ids=list(of.token_ids))


def main(first: int = 0, count: int = 1000) -> None:
    """Play ``count`` seeds. A broken one is made small, printed and raised."""
    losses = preemptions = changes = 0
    for seed in range(first, first + count):
        for of in (scenario(seed), planned(seed), leaving(seed)):
            try:
                outcome = check_all(of)
            except ScenarioError:
                check_all(smaller(of))
                raise
            losses, preemptions = losses + outcome.losses, preemptions + outcome.preemptions
            changes += outcome.changes
    counts = f"{losses} losses, {preemptions} preemptions, {changes} changes of memory workers"
    sys.stdout.write(f"{3 * count} scenarios from {first} on: {counts}, nothing wrong\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
