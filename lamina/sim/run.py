"""Plays scenarios, and checks what must hold whatever dies: the tokens, each once; blocks and ledger; progress."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from dataclasses import replace
from pprint import pformat
from typing import Any, NamedTuple

from lamina.config import make_config
from lamina.engine.configured import check_room
from lamina.engine.engine import Engine
from lamina.request import CompletionOutput, RequestOutput, Told, scored

from .clock import VirtualClock
from .elastic import capacity_of
from .model import Letters
from .scenario import Arriving, Scenario, params_of, planned, scenario
from .wire import SimWire

MOST_STEPS = 2_000
Completion = tuple[Any, ...]


class Played(NamedTuple):
    """``requests``: of each its completions, and the log-probabilities of its prompt."""

    requests: list[tuple[Completion, ...]]
    losses: int
    preemptions: int
    changes: int


class ScenarioError(AssertionError):
    """A scenario that does not hold; the text has it."""


def check(of: Scenario) -> Played:
    """Play ``of``, and the same without losses and changes: nobody may see a difference. Raises ScenarioError."""
    try:
        played, wanted = play(of), play(replace(of, faults=(), changes=()))
        for ask, answer, same in zip(of.asks, played.requests, wanted.requests, strict=True):
            if ask.cancel_s is None:
                assert answer == same, f"{answer} in place of {same}"
    except Exception as error:
        raise ScenarioError(f"{type(error).__name__}: {error}\n{pformat(of)}") from error
    return played


def check_restart(of: Scenario) -> bool:
    """Play a part of ``of``; then another engine goes on with what readers have by then. Whether some request had begun
    by then. Raises ScenarioError.
    """
    seeded, calm = with_seeds(of), _Play(replace(of, faults=(), changes=()))
    wanted = calm.run()
    try:
        before = _Play(seeded)
        before.take_steps(random.Random(of.seed).randint(1, calm.steps))
        after = _Play(replace(seeded, faults=()))
        begun = after.go_on_from(before)
        for ask, answer, same in zip(of.asks, after.run().requests, wanted.requests, strict=True):
            if ask.cancel_s is None:
                assert answer == same, f"{answer} in place of {same}"
    except Exception as error:
        raise ScenarioError(f"{type(error).__name__}: {error}\n{pformat(of)}") from error
    return begun


def with_seeds(of: Scenario) -> Scenario:
    """The same, with the seeds that an engine would draw, in the order of arrival."""
    rng, asks = random.Random(of.options["seed"]), list(of.asks)
    for place, ask in in_order(of):
        if ask.params.get("seed") is None:
            asks[place] = replace(ask, params={**ask.params, "seed": rng.getrandbits(62)})
    return replace(of, asks=tuple(asks))


def in_order(of: Scenario) -> list[tuple[int, Arriving]]:
    """Requests with their places, as they arrive."""
    return sorted(enumerate(of.asks), key=lambda x: (x[1].at_s, x[0]))


def play(of: Scenario) -> Played:
    """To the end. Raises AssertionError, and whatever goes wrong."""
    return _Play(of).run()


def smaller(of: Scenario) -> Scenario:
    """A part of a broken scenario that is broken too: without what is not needed for it."""
    for name in ("faults", "changes", "asks"):
        for one in getattr(of, name):
            left: dict[str, Any] = {name: tuple(x for x in getattr(of, name) if x is not one)}
            less = replace(of, **left)
            try:
                check(less)
            except ScenarioError:
                return smaller(less)
    return of


class _Play:
    def __init__(self, of: Scenario) -> None:
        self._of, self._clock = of, VirtualClock()
        self._wire = SimWire(of, self._clock)
        self._engine = Engine(self._wire, make_config({**of.options, "transport": "shm"}), self._clock)
        self._left, self._changes = in_order(of), list(of.changes)
        self._asked: dict[int, tuple[int, Arriving]] = {}  # by request: its place, and what it is
        self._outputs: dict[int, RequestOutput] = {}
        self._seen: dict[tuple[int, int], tuple[list[int], str]] = {}
        self._views = self._wire.view
        self.steps = 0
        self._ended: dict[int, RequestOutput] = {}  # by place: of an engine before this one
        self._scores: dict[int, Any] = {}  # by request: of its prompt, told by an engine before this one

    def run(self) -> Played:
        assert self.take_steps(MOST_STEPS), "nothing comes to its end"
        engine = self._engine
        engine.settle()
        engine.rest()
        self._check_end()
        answers: list[tuple[Completion, ...]] = [()] * len(self._of.asks)
        for request, (place, _) in self._asked.items():
            output = self._outputs.get(request)
            if output and request in self._scores:
                output.prompt_logprobs = self._scores[request]
            answers[place] = _told(output)
        for place, output in self._ended.items():
            answers[place] = _told(output)
        wire, preemptions = self._wire, engine.scheduler.num_preemptions
        return Played(answers, wire.losses, preemptions, wire.elastic.changes)

    def take_steps(self, most: int) -> bool:
        """So many at most; whether all has come to its end."""
        for _ in range(most):
            self._let_requests_come()
            self._let_changes_come()
            if not self._engine.has_work and not self._left:
                return True
            self._take(self._engine.step())
            self.steps += 1
            self._check_view()
            self._cancel()
        return False

    def go_on_from(self, before: _Play) -> bool:
        """With the requests of an engine that has died, as far as readers have them. Whether some had begun."""
        self._left, begun = before._left, False
        for request, (place, ask) in before._asked.items():
            output = before._outputs.get(request)
            if output is not None and output.finished:
                self._ended[place] = output
                continue
            told = [_as_told(one) for one in output.outputs] if output else []
            again = self._engine.add(list(ask.prompt), params_of(ask), make_pieces=Letters, told=told)
            self._asked[again] = place, ask
            if output and output.outputs[0].token_ids:
                self._scores[again] = output.prompt_logprobs
            self._seen |= {(again, i): seen for (r, i), seen in before._seen.items() if r == request}
            begun = begun or any(one.tokens for one in told)
        return begun

    def _let_requests_come(self) -> None:
        engine, clock = self._engine, self._clock
        if not engine.has_work and self._left:
            clock.now = max(clock.now, self._left[0][1].at_s)
            self._take(engine.look())
            self._check_view()
        while self._left and self._left[0][1].at_s <= clock.now:
            place, ask = self._left.pop(0)
            request = engine.add(list(ask.prompt), params_of(ask), make_pieces=Letters)
            self._asked[request] = place, ask

    def _let_changes_come(self) -> None:
        """One at a time; what would need KV to be computed again is refused, as the server does."""
        elastic = self._wire.elastic
        while self._changes and self._changes[0].at_s <= self._clock.now and not elastic.under_way:
            asked = self._changes.pop(0)
            shape = self._of.layout_of(asked.workers, asked.num_blocks)
            with suppress(ValueError):
                check_room(self._engine.scheduler, self._engine.info, capacity_of(shape))
                elastic.begin(asked, shape)

    def _cancel(self) -> None:
        for request, (_, ask) in self._asked.items():
            if ask.cancel_s is not None and self._clock.now >= ask.at_s + ask.cancel_s:
                output = self._engine.cancel(request)
                if output is not None:
                    self._take([output])

    def _take(self, outputs: list[RequestOutput]) -> None:
        """What a reader has seen changes no more."""
        for output in outputs:
            self._outputs[output.request_id] = output
            for one in output.outputs:
                key = output.request_id, one.index
                tokens, text = self._seen.get(key, ([], ""))
                assert one.token_ids[: len(tokens)] == tokens, "tokens that were told are others now"
                assert one.text.startswith(text), "text that was told is another one now"
                self._seen[key] = list(one.token_ids), one.text

    def _check_view(self) -> None:
        if self._wire.view != self._views:
            self._views = self._wire.view
            self._check_rest()

    def _check_rest(self) -> None:
        """Behind a change of the view: everybody holds what the ledger says."""
        ledger, holders = self._engine._ledger, self._wire.layout.holders
        ledger.check_integrity()
        for worker in self._wire.memory:
            worker.tables.check_integrity()
            assert sorted(worker.tables.sequences) == sorted(ledger.sequences)
            for sequence in ledger.sequences:
                assert worker.tables.length(sequence) == ledger.length(sequence)
            groups = [g for g, of in enumerate(holders) if worker.number in of]
            for here, group in enumerate(groups):
                for sequence in ledger.sequences:
                    (start, ids), (first, same) = (
                        t.table(g, sequence) for t, g in ((worker.tables, here), (ledger, group))
                    )
                    assert (start, len(ids)) == (first, len(same)), "the ledger has other blocks than a worker"

    def _check_end(self) -> None:
        assert not self._engine.has_work
        self._check_rest()
        engine = self._engine
        assert len(engine._ledger.sequences) == engine.scheduler.prefixes.num_retained, "sequences are left"
        assert engine.free_blocks == engine._ledger.num_blocks


def _told(output: RequestOutput | None) -> tuple[Completion, ...]:
    if output is None:
        return ()
    each = tuple((tuple(o.token_ids), o.text, o.finish_reason, o.stop_reason, str(o.logprobs)) for o in output.outputs)
    return (*each, (str(output.prompt_logprobs),))


def _as_told(of: CompletionOutput) -> Told:
    scores = None if of.logprobs is None else [scored(each, 0) for each in of.logprobs]
    return Told(index=of.index, tokens=list(of.token_ids), logprobs=scores)


def main(first: int = 0, count: int = 1000) -> None:
    """Play ``count`` seeds. A broken one is made small, printed and raised."""
    losses = preemptions = changes = 0
    for seed in range(first, first + count):
        for of in (scenario(seed), planned(seed)):
            try:
                outcome = check(of)
                check_restart(of)
            except ScenarioError:
                check(smaller(of))
                raise
            losses, preemptions = losses + outcome.losses, preemptions + outcome.preemptions
            changes += outcome.changes
    counts = f"{losses} losses, {preemptions} preemptions, {changes} changes of memory workers"
    sys.stdout.write(f"{2 * count} scenarios from {first} on: {counts}, nothing wrong\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
