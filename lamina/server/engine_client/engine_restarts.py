"""Decides whether an engine that has ended gets a successor: after a death, a limited number of times, or as planned.
Also keeps what a successor needs to continue each prompt.
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
EXIT_TIMEOUT_S = 10.0  # time for an engine's workers to end after it
LOOK_S = 0.02


class PlanFailedError(Exception):
    """A planned restart was impossible; the text says why."""


class EngineRestarts:
    """Starts engines, at most as often as --max-recoveries allows, and chooses seeds for requests without one."""

    def __init__(self, start: StartEngine, launch: Callable[[StartEngine], EngineHandle]) -> None:
        self.limit_s = start.config.deadlines.start_timeout_s  # until the engine is ready
        self._start, self._launch = start, launch
        self._recoveries = RestartBudget(start.config.launch.max_recoveries, time.monotonic)
        self._number = 0  # number of the last engine
        self._seeds = random.Random(start.config.batching.seed)
        self._before: StartEngine | None = None  # the StartEngine of an engine that ends as planned
        self._planned: asyncio.Future[float] | None = None  # result: seconds without an engine
        self._ended_at: float | None = None  # the last engine's end, or a planned restart's begin; None while serving
        self._free = False  # whether the next start does not count as a recovery
        self._excused = False  # the same, as the request that made the last engine fail is known
        # Resets that an engine has not confirmed. The next engine gets them, as it may find pages in storage.
        self.pending_reset: list[ResetPrefixCache] = []
        self._resets = 0

    @property
    def config(self) -> EngineConfig:
        """The configuration of the engine, or of the next one."""
        return self._start.config

    @property
    def is_planned(self) -> bool:
        """True if the next engine starts as planned, or because a plan has failed; such starts have no limit."""
        return self._free

    def plan(self, config: EngineConfig) -> asyncio.Future[float]:
        """Start the next engine with ``config``; the caller ends the present one. The result is the seconds without an
        engine, or PlanFailedError if no engine starts with ``config``; then one with the old configuration runs.
        """
        self._before, self._start = self._start, structs.replace(self._start, config=config, lost_hosts=[])
        self._planned, self._ended_at = asyncio.get_running_loop().create_future(), time.monotonic()
        self._free = True
        self._planned.add_done_callback(lambda done: done.cancelled() or done.exception())  # its reader may be gone
        return self._planned

    def set_config(self, config: EngineConfig) -> None:
        """Note that the engine has ``config`` now, so the next one starts with it."""
        self._start = structs.replace(self._start, config=config)

    def shrink(self, left: Mapping[str, int], without: Sequence[str]) -> bool:
        """Let the next engine start with fewer workers. ``left``: option -> the number of workers that fit.
        ``without``: hosts to avoid until the next plan. Returns False if that is impossible.
        """
        had = flat_options(self.config)
        try:
            sizes = {name: value for name, value in with_fewer_workers(self.config, left).items() if value != had[name]}
        except ValueError:  # the engine has reported it, too
            return False
        if not sizes:
            return False
        self.set_config(replace_options(self.config, sizes))
        self._start = structs.replace(self._start, lost_hosts=list(without))
        words = " ".join(f"{flag_name(name)} {value}" for name, value in sizes.items())
        log.warning("the server continues with %s: run `lamina-launch scale` once more of them fit", words)
        return True

    def give_up(self, why: str) -> bool:
        """Return to the old configuration as no engine starts as planned. Returns False if there is no old
        configuration.
        """
        if self._planned is None or self._before is None:
            self.forbid(why)
            return False
        planned, self._planned = self._planned, None
        self._start, self._before, self._free = self._before, None, True
        if not planned.done():
            planned.set_exception(PlanFailedError(why))
        return True

    def forbid(self, why: str) -> None:
        """Fail the planned restart, if there is one: no other engine starts."""
        if self._planned is not None and not self._planned.done():
            self._planned.set_exception(PlanFailedError(why))
        self._planned = self._before = None

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        """Return ``params`` with a seed, drawn here if it has none. So another engine can continue the request."""
        return params if params.seed is not None else dataclasses.replace(params, seed=self._seeds.getrandbits(62))

    @property
    def is_allowed(self) -> bool:
        """True if another engine may replace the last one. With workers that the operator starts there is none."""
        by_hand = self._start.config.launch.is_static
        return not by_hand and (self._excused or self._recoveries.allows([self._number]))

    def excuse(self) -> None:
        """Explain the end of the last engine and of the one before: they do not count as recoveries."""
        self._excused = True
        self._recoveries.forgive()

    def exit_message(self, reason: str) -> str:
        """Return the log's text for a server that ends because it lost its engine."""
        most = self._recoveries.max_recoveries
        if self._start.config.launch.is_static or not most:
            return reason
        return f"{reason}; --max-recoveries {most} allows no other one in ten minutes"

    async def begin(self, lost: EngineHandle, workers: set[int]) -> EngineHandle:
        """Start another engine, which then loads. ``workers``: process ids of the lost engine's workers, which must
        have ended and freed their memory. Raises OSError.
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
        """Return a reset for this engine or, if it does not confirm it, for the next one. It replaces
        earlier resets.
        """
        self._resets += 1
        self.pending_reset = [ResetPrefixCache(self._resets)]
        return self.pending_reset[0]

    def on_reset_done(self, reset: ResetPrefixCache) -> None:
        """Note that an engine has done a reset."""
        self.pending_reset = [owed for owed in self.pending_reset if owed != reset]

    def end(self, requests: int) -> None:
        """Note that the new engine continues ``requests`` requests: the recovery is over."""
        self._recoveries.end()
        assert self._ended_at is not None
        pause_s, those = time.monotonic() - self._ended_at, count_text(requests, "request")
        log.info("another engine continues %s, %.1f s after the last one ended", those, pause_s)
        if self._planned is not None and not self._planned.done():
            self._planned.set_result(pause_s)
        self._planned = self._before = self._ended_at = None


class PromptProgress:
    """The part of a prompt's completions that the server has received."""

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        cache_options: CacheOptions = DEFAULT_CACHE_OPTIONS,
        *,
        accepted: bool = False,
    ) -> None:
        """``accepted``: an earlier server accepted the prompt."""
        self._prompt, self._params, self._cache_options, self._accepted = prompt, params, cache_options, accepted
        self._received: dict[int, ResumedCompletion] = {}

    @property
    def begun(self) -> bool:
        """True if a completion has a token."""
        return bool(self._received)

    @property
    def completions(self) -> int:
        """The number of completions of the request."""
        return self._params.n

    @property
    def priority(self) -> int:
        """The request's place in the queue: lower numbers come first."""
        return self._cache_options.priority

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all that determines a request but its seed: engines compute requests with equal digests alike.
        Empty if the request cannot be encoded.
        """
        params = dataclasses.replace(self._params, seed=None)
        try:
            return hashlib.sha256(
                _encode([self._prompt, params, self._cache_options.salt, self._cache_options.discard_ranges])
            ).digest()
        except (OverflowError, UnicodeEncodeError):
            return b""

    def take(self, delta: Delta) -> None:
        """Add a delta. Its lists belong to the reader, so they are copied."""
        had = self._received.get(delta.index, ResumedCompletion(index=delta.index, token_ids=[]))
        had.token_ids.extend(delta.token_ids)
        ended, chars = delta.finish_reason is not None, had.num_chars + len(delta.text)
        self._received[delta.index] = dataclasses.replace(had, num_chars=chars, is_finished=ended)

    def request_message(self, key: int) -> AddPrompt:
        """Return the message that asks an engine for the rest of the prompt. After the first one the prompt counts as
        accepted.
        """
        received, accepted = list(self._received.values()), self._accepted
        self._accepted = True
        return AddPrompt(key, self._prompt, self._params, received, self._cache_options, accepted)
