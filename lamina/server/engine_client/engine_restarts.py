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

from lamina.config.engine_config import EngineConfig
from lamina.config.flag_groups import flag_name
from lamina.config.flat_options import flat_options, replace_options, with_fewer_workers
from lamina.executor.restart_budget import RestartBudget
from lamina.facts.report import count_text
from lamina.request import ResumedCompletion, SamplingParams
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.utils.proc import is_alive

from .engine_watchdog import EngineHandle
from .messages import AddPrompt, Delta, ResetPrefixCache, StartEngine

log = logging.getLogger(__name__)
_encode = msgpack.Encoder().encode
EXIT_TIMEOUT_S = 10.0  # for the workers of an engine to follow it
LOOK_S = 0.02


class PlanFailedError(Exception):
    """A planned restart was impossible; the text says why."""


class EngineRestarts:
    """The right to another engine, as often as --max-recoveries says, and the seeds of requests that have none."""

    def __init__(self, start: StartEngine, launch: Callable[[StartEngine], EngineHandle]) -> None:
        self.limit_s = start.config.deadlines.start_timeout_s  # until it is ready
        self._start, self._launch = start, launch
        self._recoveries = RestartBudget(start.config.launch.max_recoveries, time.monotonic)
        self._number = 0  # of the last engine
        self._seeds = random.Random(start.config.batching.seed)
        self._before: StartEngine | None = None  # the Start of an engine that ends by plan
        self._planned: asyncio.Future[float] | None = None  # seconds without an engine
        self._ended_at: float | None = None  # the engine that served last, or it was told to; None while one serves
        self._free = False  # whether the next engine is no recovery
        self._excused = False  # the same, as the request is known that has made the last one fail
        # To the next engine, which may find pages beside the pools: no other one has done it.
        self.pending_reset: list[ResetPrefixCache] = []
        self._resets = 0

    @property
    def config(self) -> EngineConfig:
        """The configuration of the engine, or of the one that is to come."""
        return self._start.config

    @property
    def is_planned(self) -> bool:
        """Whether the next engine comes by plan, or because a plan has failed: as often as that may be."""
        return self._free

    def plan(self, config: EngineConfig) -> asyncio.Future[float]:
        """Start the next engine with ``config``; the caller ends the present one. Returns the seconds without an
        engine. Raises PlanFailedError where no engine can start so; then one with the former configuration runs.
        """
        self._before, self._start = self._start, structs.replace(self._start, config=config, lost_hosts=[])
        self._planned, self._ended_at = asyncio.get_running_loop().create_future(), time.monotonic()
        self._free = True
        self._planned.add_done_callback(lambda done: done.cancelled() or done.exception())  # its reader may have gone
        return self._planned

    def set_config(self, config: EngineConfig) -> None:
        """The engine has ``config`` by now: so will the next one."""
        self._start = structs.replace(self._start, config=config)

    def shrink(self, left: Mapping[str, int], without: Sequence[str]) -> bool:
        """There is room for so many workers, by option: the next engine is to have no more, on hosts that are not
        ``lost_hosts``, until the next plan. Whether that can be.
        """
        had = flat_options(self.config)
        try:
            sizes = {name: value for name, value in with_fewer_workers(self.config, left).items() if value != had[name]}
        except ValueError:  # the engine has said so, too
            return False
        if not sizes:
            return False
        self.set_config(replace_options(self.config, sizes))
        self._start = structs.replace(self._start, lost_hosts=list(without))
        words = " ".join(f"{flag_name(name)} {value}" for name, value in sizes.items())
        log.warning("the server goes on with %s: say `lamina-launch scale` once there are more", words)
        return True

    def give_up(self, why: str) -> bool:
        """No engine starts as planned: go back to what there was. False where there was nothing to go back to."""
        if self._planned is None or self._before is None:
            self.forbid(why)
            return False
        planned, self._planned = self._planned, None
        self._start, self._before, self._free = self._before, None, True
        if not planned.done():
            planned.set_exception(PlanFailedError(why))
        return True

    def forbid(self, why: str) -> None:
        """There will be no other engine."""
        if self._planned is not None and not self._planned.done():
            self._planned.set_exception(PlanFailedError(why))
        self._planned = self._before = None

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the seed that the engine would draw: so another engine can go on where this one dies."""
        return params if params.seed is not None else dataclasses.replace(params, seed=self._seeds.getrandbits(62))

    @property
    def is_allowed(self) -> bool:
        """Whether there may be another engine in the place of the last one. One whose workers people start has none."""
        by_hand = self._start.config.launch.is_static
        return not by_hand and (self._excused or self._recoveries.allows([self._number]))

    def excuse(self) -> None:
        """The end of the last engine, and of one before it, are explained: they are no recoveries."""
        self._excused = True
        self._recoveries.forgive()

    def exit_message(self, reason: str) -> str:
        """About a server that ends by the loss of its engine."""
        most = self._recoveries.max_recoveries
        if self._start.config.launch.is_static or not most:
            return reason
        return f"{reason}; --max-recoveries {most} allows no other one in ten minutes"

    async def begin(self, lost: EngineHandle, workers: set[int]) -> EngineHandle:
        """Another engine, which loads. ``workers``: processes of the lost one, which must have given back their memory.
        Raises OSError.
        """
        if not (self._free or self._excused):
            self._recoveries.begin([self._number], [self._number])
        self._number, self._free, self._excused = self._number + 1, False, False
        self._ended_at = time.monotonic() if self._ended_at is None else self._ended_at
        await asyncio.to_thread(lost.join, 0.0)
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while any(map(is_alive, workers)) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
        return await asyncio.to_thread(self._launch, self._start)

    def request_reset(self) -> ResetPrefixCache:
        """A reset for this engine or, where that does not do it, the next one; it stands for those before."""
        self._resets += 1
        self.pending_reset = [ResetPrefixCache(self._resets)]
        return self.pending_reset[0]

    def on_reset_done(self, reset: ResetPrefixCache) -> None:
        """An engine has done it."""
        self.pending_reset = [owed for owed in self.pending_reset if owed != reset]

    def end(self, requests: int) -> None:
        """The new engine has so many requests, and goes on with them: the recovery is over."""
        self._recoveries.end()
        assert self._ended_at is not None
        pause_s, those = time.monotonic() - self._ended_at, count_text(requests, "request")
        log.info("another engine goes on with %s, %.1f s after the last one ended", those, pause_s)
        if self._planned is not None and not self._planned.done():
            self._planned.set_result(pause_s)
        self._planned = self._before = self._ended_at = None


class PromptProgress:
    """What the server has heard of a prompt's completions."""

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        terms: CacheOptions = DEFAULT_CACHE_OPTIONS,
        *,
        accepted: bool = False,
    ) -> None:
        """``accepted``: by an earlier server."""
        self._prompt, self._params, self._terms, self._accepted = prompt, params, terms, accepted
        self._received: dict[int, ResumedCompletion] = {}

    @property
    def begun(self) -> bool:
        """Whether some completion has a token."""
        return bool(self._received)

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
            return hashlib.sha256(
                _encode([self._prompt, params, self._terms.salt, self._terms.discard_ranges])
            ).digest()
        except (OverflowError, UnicodeEncodeError):
            return b""

    def take(self, delta: Delta) -> None:
        """A delta has come, whose lists are the reader's."""
        had = self._received.get(delta.index, ResumedCompletion(index=delta.index, token_ids=[]))
        had.token_ids.extend(delta.token_ids)
        ended, chars = delta.finish_reason is not None, had.num_chars + len(delta.text)
        self._received[delta.index] = dataclasses.replace(had, num_chars=chars, is_finished=ended)

    def request_message(self, key: int) -> AddPrompt:
        """For the prompt, and what is still to come of it. Whoever is asked again need not be accepted."""
        received, accepted = list(self._received.values()), self._accepted
        self._accepted = True
        return AddPrompt(key, self._prompt, self._params, received, self._terms, accepted)
