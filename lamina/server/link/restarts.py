"""An engine that has ended, and the one that takes its place: by a death, and then so often, or by plan; and with what
prompts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from msgspec import msgpack, structs

from lamina.config import changed, fewer, flat
from lamina.engine.conversations.terms import PLAIN, KVTerms
from lamina.facts.report import counted
from lamina.fleet.recoveries import Recoveries
from lamina.processes import lives
from lamina.protocol.options.declare import flag
from lamina.protocol.options.engine import EngineConfig
from lamina.request import SamplingParams, Told

from .engine_watch import EngineHandle
from .messages import Add, Delta, Reset, Start

log = logging.getLogger(__name__)
_encode = msgpack.Encoder().encode
GONE_S = 10.0  # for the workers of an engine to follow it
LOOK_S = 0.02


class PlanFailedError(Exception):
    """A planned restart was impossible; the text says why."""


class EngineRestarts:
    """The right to another engine, as often as --max-recoveries says, and the seeds of requests that have none."""

    def __init__(self, start: Start, launch: Callable[[Start], EngineHandle]) -> None:
        self.limit_s = start.config.deadlines.start_timeout_s  # until it is ready
        self._start, self._launch = start, launch
        self._recoveries = Recoveries(start.config.launching.max_recoveries, time.monotonic)
        self._number = 0  # of the last engine
        self._seeds = random.Random(start.config.batching.seed)
        self._before: Start | None = None  # the Start of an engine that ends by plan
        self._planned: asyncio.Future[float] | None = None  # seconds without an engine
        self._ended_at: float | None = None  # the engine that served last, or it was told to; None while one serves
        self._free = False  # whether the next engine is no recovery
        self._excused = False  # the same, as the request is known that has made the last one fail
        # To the next engine, which may find pages beside the pools: no other one has done it.
        self.owed: list[Reset] = []
        self._resets = 0

    @property
    def config(self) -> EngineConfig:
        """The configuration of the engine, or of the one that is to come."""
        return self._start.config

    @property
    def planned(self) -> bool:
        """Whether the next engine comes by plan, or because a plan has failed: as often as that may be."""
        return self._free

    def plan(self, config: EngineConfig) -> asyncio.Future[float]:
        """Start the next engine with ``config``; the caller ends the present one. Returns the seconds without an
        engine. Raises PlanFailedError where no engine can start so; then one with the former configuration runs.
        """
        self._before, self._start = self._start, structs.replace(self._start, config=config, without=[])
        self._planned, self._ended_at = asyncio.get_running_loop().create_future(), time.monotonic()
        self._free = True
        self._planned.add_done_callback(lambda done: done.cancelled() or done.exception())  # its reader may have gone
        return self._planned

    def adopt(self, config: EngineConfig) -> None:
        """The engine has ``config`` by now: so will the next one."""
        self._start = structs.replace(self._start, config=config)

    def shrink(self, left: Mapping[str, int], without: Sequence[str]) -> bool:
        """There is room for so many workers, by option: the next engine is to have no more, on hosts that are not
        ``without``, until the next plan. Whether that can be.
        """
        had = flat(self.config)
        try:
            sizes = {name: value for name, value in fewer(self.config, left).items() if value != had[name]}
        except ValueError:  # the engine has said so, too
            return False
        if not sizes:
            return False
        self.adopt(changed(self.config, sizes))
        self._start = structs.replace(self._start, without=list(without))
        words = " ".join(f"{flag(name)} {value}" for name, value in sizes.items())
        log.warning("the server goes on with %s: say `lamina-launch scale` once there are more", words)
        return True

    def give_up(self, why: str) -> bool:
        """No engine starts as planned: go back to what there was. False where there was nothing to go back to."""
        if self._planned is None or self._before is None:
            self.abandon(why)
            return False
        planned, self._planned = self._planned, None
        self._start, self._before, self._free = self._before, None, True
        if not planned.done():
            planned.set_exception(PlanFailedError(why))
        return True

    def abandon(self, why: str) -> None:
        """There will be no other engine."""
        if self._planned is not None and not self._planned.done():
            self._planned.set_exception(PlanFailedError(why))
        self._planned = self._before = None

    def seeded(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the seed that the engine would draw: so another engine can go on where this one dies."""
        return params if params.seed is not None else dataclasses.replace(params, seed=self._seeds.getrandbits(62))

    @property
    def allowed(self) -> bool:
        """Whether there may be another engine in the place of the last one. One whose workers people start has none."""
        by_hand = self._start.config.launching.by_hand
        return not by_hand and (self._excused or self._recoveries.allow([self._number]))

    def excuse(self) -> None:
        """The end of the last engine, and of one before it, are explained: they are no recoveries."""
        self._excused = True
        self._recoveries.forgive()

    def last_words(self, reason: str) -> str:
        """About a server that ends by the loss of its engine."""
        most = self._recoveries.most
        if self._start.config.launching.by_hand or not most:
            return reason
        return f"{reason}; --max-recoveries {most} allows no other one in ten minutes"

    async def begin(self, lost: EngineHandle, workers: set[int]) -> EngineHandle:
        """Another engine, which loads. ``workers``: processes of the lost one, which must have given back their memory.
        Raises OSError.
        """
        if not (self._free or self._excused):
            self._recoveries.count([self._number], [self._number])
        self._number, self._free, self._excused = self._number + 1, False, False
        self._ended_at = time.monotonic() if self._ended_at is None else self._ended_at
        await asyncio.to_thread(lost.join, 0.0)
        deadline = time.monotonic() + GONE_S
        while any(map(lives, workers)) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
        return await asyncio.to_thread(self._launch, self._start)

    def owe_reset(self) -> Reset:
        """A reset for this engine or, where that does not do it, the next one; it stands for those before."""
        self._resets += 1
        self.owed = [Reset(self._resets)]
        return self.owed[0]

    def paid(self, reset: Reset) -> None:
        """An engine has done it."""
        self.owed = [owed for owed in self.owed if owed != reset]

    def end(self, requests: int) -> None:
        """The new engine has so many requests, and goes on with them: the recovery is over."""
        self._recoveries.end()
        assert self._ended_at is not None
        pause_s, those = time.monotonic() - self._ended_at, counted(requests, "request")
        log.info("another engine goes on with %s, %.1f s after the last one ended", those, pause_s)
        if self._planned is not None and not self._planned.done():
            self._planned.set_result(pause_s)
        self._planned = self._before = self._ended_at = None


class Hearing:
    """What the server has heard of a prompt's completions."""

    def __init__(
        self, prompt: list[int], params: SamplingParams, terms: KVTerms = PLAIN, *, accepted: bool = False
    ) -> None:
        """``accepted``: by an earlier server."""
        self._prompt, self._params, self._terms, self._accepted = prompt, params, terms, accepted
        self._told: dict[int, Told] = {}

    @property
    def begun(self) -> bool:
        """Whether some completion has a token."""
        return bool(self._told)

    @property
    def completions(self) -> int:
        """The number of completions that were asked for."""
        return self._params.n

    @property
    def priority(self) -> int:
        """The request's place in the queue: lower numbers come first."""
        return self._terms.priority

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all that a tenant asks for, but for the seed: an engine computes alike what has the same digest.
        Empty where no message holds it.
        """
        params = dataclasses.replace(self._params, seed=None)
        try:
            return hashlib.sha256(_encode([self._prompt, params, self._terms.salt, self._terms.discard])).digest()
        except (OverflowError, UnicodeEncodeError):
            return b""

    def take(self, delta: Delta) -> None:
        """A delta has come, whose lists are the reader's."""
        had = self._told.get(delta.index, Told(index=delta.index, tokens=[]))
        had.tokens.extend(delta.tokens)
        ended, chars = delta.finish_reason is not None, had.chars + len(delta.text)
        self._told[delta.index] = dataclasses.replace(had, chars=chars, ended=ended)

    def ask(self, key: int) -> Add:
        """For the prompt, and what is still to come of it. Whoever is asked again need not be accepted."""
        told, accepted = list(self._told.values()), self._accepted
        self._accepted = True
        return Add(key, self._prompt, self._params, told, self._terms, accepted)
