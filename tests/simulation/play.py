"""Requests that come to an engine, and what their readers see, to the end; and what must hold of its ledger then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from lamina.engine.engine import Engine
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.request import RequestOutput
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.tools.plan.simulator.clock import VirtualClock

from .model import Letters
from .scenario import Arriving

MOST_STEPS = 2_000
WAIT_S = 0.01  # of an engine whose requests wait for room, as of the loop that steps it
Of = TypeVar("Of")  # a kind of scenario


class SoFar(NamedTuple):
    """A completion, as far as its reader has it."""

    tokens: list[int]
    text: str
    reason: str | None  # of its end


class ScenarioError(AssertionError):
    """A scenario that does not hold; the text has it."""


def is_broken(check: Callable[[Of], object], of: Of) -> bool:
    """Returns whether ``check`` finds that it does not hold."""
    try:
        check(of)
    except ScenarioError:
        return True
    return False


def least(of: Of, parts: Sequence[str], breaks: Callable[[Of], bool]) -> Of:
    """A part of a scenario that breaks too: without what is not needed for it, in the fields ``parts``."""
    for name in parts:
        for one in getattr(of, name):
            left: dict[str, Any] = {name: tuple(x for x in getattr(of, name) if x is not one)}
            less: Of = replace(of, **left)  # type: ignore[type-var]
            if breaks(less):
                return least(less, parts, breaks)
    return of


def in_order(asks: Sequence[Arriving]) -> list[tuple[int, Arriving]]:
    """Requests with their places, as they arrive."""
    return sorted(enumerate(asks), key=lambda x: (x[1].at_s, x[0]))


class Play:
    """One engine and its clients. A subclass adds the events that disturb them."""

    def __init__(self, asks: Sequence[Arriving], engine: Engine, clock: VirtualClock) -> None:
        self._engine, self._clock = engine, clock
        self.left = in_order(asks)
        self.asked: dict[int, tuple[int, Arriving]] = {}  # by request: its place, and its arrival
        self._outputs: dict[int, RequestOutput] = {}
        self._seen: dict[tuple[int, int], SoFar] = {}  # by request and completion
        self.steps = 0

    def take_steps(self, most: int) -> bool:
        """So many at most; whether all has come to its end."""
        for _ in range(most):
            self._let_requests_come()
            self._look_round()
            if not self._engine.has_work and not self.left:
                return True
            self._take(self._engine.step())
            if self._engine.idle and self._engine.has_work:
                self._wait_until(self._clock.now + WAIT_S)
            self.steps += 1
            self._check_view()
            self._cancel()
        return False

    def _look_round(self) -> None:
        """Between two steps."""

    def _check_view(self) -> None:
        """Checks after any call that may have changed it."""

    def _wait_until(self, at_s: float) -> None:
        """Waits on an engine without work."""
        self._clock.now = max(self._clock.now, at_s)

    def _let_requests_come(self) -> None:
        engine, clock = self._engine, self._clock
        if not engine.has_work and self.left:
            self._wait_until(self.left[0][1].at_s)
            self._take(engine.check_workers())
            self._check_view()
        while self.left and self.left[0][1].at_s <= clock.now:
            place, ask = self.left.pop(0)
            if ask.forgets == "all":
                engine.reset_prefix_cache()
            elif ask.forgets and ask.terms.session:
                engine.sessions.drop(ask.terms.session)
            prompt = [*self._said_before(ask), *ask.prompt]
            request = engine.add(prompt, ask.sampling, make_detokenizer=Letters, terms=ask.terms)
            self.asked[request] = place, ask

    def _said_before(self, ask: Arriving) -> list[int]:
        """The conversation that a turn of a session continues, less its end where that would be too long."""
        turns = [number for number, (_, other) in self.asked.items() if other.terms.session == ask.terms.session]
        if ask.terms.session is None or not turns or turns[-1] not in self._outputs:
            return []
        last = self._outputs[turns[-1]]
        said, config = [*last.prompt_token_ids, *last.outputs[0].token_ids], self._engine.config
        limit = self._engine.worker_info.max_model_len - len(ask.prompt) - 2
        return said if config.overflow.truncates_context else said[:limit]

    def _cancel(self) -> None:
        for request, (_, ask) in self.asked.items():
            if ask.cancel_s is not None and self._clock.now >= ask.at_s + ask.cancel_s:
                output = self._engine.cancel(request)
                if output is not None:
                    self._take([output])

    def _take(self, outputs: list[RequestOutput]) -> None:
        """A token that a reader has seen changes no more."""
        for output in outputs:
            self._outputs[output.request_id] = output
            for one in output.outputs:
                key = output.request_id, one.index
                tokens, text, _ = self._seen.get(key, SoFar([], "", None))
                assert one.token_ids[: len(tokens)] == tokens, "tokens that were told are others now"
                assert one.text.startswith(text), "text that was told is another one now"
                self._seen[key] = SoFar(list(one.token_ids), one.text, one.finish_reason)

    def _check_tables(self, memory: Iterable[tuple[int, BlockTables]], holders: Sequence[Sequence[int]]) -> None:
        """At rest memory workers, by their numbers, hold what the ledger says. ``holders``: of each group of layers."""
        ledger = self._engine.accounting
        ledger.check_integrity()
        for number, tables in memory:
            tables.check_integrity()
            assert sorted(tables.sequences) == sorted(ledger.sequences), f"memory worker {number} has other sequences"
            for sequence in ledger.sequences:
                assert tables.length(sequence) == ledger.length(sequence)
            groups = [g for g, of in enumerate(holders) if number in of]
            for here, group in enumerate(groups):
                for sequence in ledger.sequences:
                    (start, ids), (first, same) = (
                        t.block_table(g, sequence) for t, g in ((tables, here), (ledger, group))
                    )
                    assert (start, len(ids)) == (first, len(same)), "the ledger has other blocks than a worker"

    def _check_all_is_free(self) -> None:
        """Checks an engine that has settled."""
        engine = self._engine
        assert not engine.has_work
        assert len(engine.accounting.sequences) == engine.scheduler.features[PrefixCache].num_retained, (
            "sequences are left"
        )
        assert engine.free_blocks == engine.accounting.num_blocks
