"""Injects faults into one server while the same requests are read again and again; each stream is compared with that of
an undisturbed run.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from .client_streams import NUM_PAGES_PROMPTS, PAGES_OF, StreamRecord, bodies_of, has_one_answer, read_all, seeds_of
from .drill_report import BAD, SILENT, FaultResult
from .fault_points import SAVE, FaultPoint, FaultPoints
from .stream_verdicts import difference_text, error_of, is_numeric_tie, verdict
from .target import Target, Victim

log = logging.getLogger(__name__)

NUM_TRIES = 5  # to inject a fault before the last token
RECOVERY_TIMEOUT_S = 120.0  # after a fault, until /health reports 200
NOTICE_S = 10.0  # for a fault to be noticed, before the next one of the same streams
BETWEEN = 0.1, 0.3  # from one fault's end to the next one, in parts of an undisturbed run's time


class Injection(NamedTuple):
    """An injected fault. ``at``: on the clock of the streams."""

    fault: str
    victim: Victim
    kind: str
    at: float


class Drill:
    """One server, and the same requests again and again. ``faults``: name -> role and action."""

    def __init__(self, target: Target, args: argparse.Namespace, faults: Mapping[str, tuple[str, str]]) -> None:
        self._target, self._args, self._faults = target, args, faults
        self._rng = random.Random(args.seed)
        self.bodies = bodies_of(
            args.streams, args.tokens, self._rng, PAGES_OF if target.has_pages else NUM_PAGES_PROMPTS
        )
        self._moments = FaultPoints(self._rng, grants=target.has_prefill, pages=target.has_pages)
        self._num_salts = 0
        self._due: list[tuple[str, FaultPoint]] = []  # for the next reading
        self.wanted: list[StreamRecord] = []
        self._took = 0.0

    def run_undisturbed(self) -> Counter[str]:
        """Run twice without a fault, and compare the second run with the first. Streams that differ then prove nothing
        later.
        """
        self.read_streams(self.bodies)  # the first requests of a server are slower
        began = time.perf_counter()
        self.wanted = self.read_streams(self.bodies)
        self._took = time.perf_counter() - began
        return self.judged(self.read_streams(self.bodies), well=True)

    def inject_all(self, faults: Sequence[str], count: int, until: float = inf) -> list[FaultResult]:
        """Inject ``count`` faults from ``faults`` in turn, none after ``until`` by time.perf_counter(). There are fewer
        if the server is gone: the rest would only repeat that. Raises ValueError.
        """
        blows, well = list[FaultResult](), True
        while well and len(blows) < count and time.perf_counter() < until:
            numbers = range(len(blows), min(count, len(blows) + self._args.per_reading))
            more, well = self.inject([faults[n % len(faults)] for n in numbers])
            blows += more
        return blows

    def inject(self, faults: Sequence[str]) -> tuple[list[FaultResult], bool]:
        """Read all streams once, and inject each of ``faults`` meanwhile, one after the other. Returns the results of
        those that came in time, and whether the server is healthy after them. Raises ValueError.
        """
        due = self.due_of(faults)
        first, moment = due[0]
        bodies = self._forgotten(self.bodies) if moment.kind == SAVE else self.bodies
        for _ in range(NUM_TRIES):
            victim, strikes = self._target.victim(self._faults[first][0], self._rng), list[Injection]()
            told = [StreamRecord() for _ in self.bodies]
            after_s = 0.0 if moment.before_prompt_end else self._rng.uniform(0.1, 0.7 / len(due)) * self._took
            began = time.perf_counter()
            self.read_streams(bodies, partial(self._strike_all, due, victim, strikes, told), after_s, told)
            if _in_time(strikes, told):
                break
            self._took = time.perf_counter() - began  # the machine has become faster
        else:
            tokens = self._args.tokens
            raise ValueError(f"--tokens {tokens}: {NUM_TRIES} times all streams had ended before {first}: give more")
        self._await_notice(strikes[-1])
        well = self._target.is_healthy(RECOVERY_TIMEOUT_S)
        verdicts = self.judged(told, well=well)
        ends = [*(s.at for s in strikes[1:]), inf]
        return [self._blow(s, end, told, verdicts) for s, end in zip(_in_time(strikes, told), ends, strict=False)], well

    def _forgotten(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the same requests under a new salt, so that no KV of them exists: all is computed, and
        saved, again.
        """
        self._num_salts += 1
        return [{**body, "cache_salt": f"hit {self._num_salts}"} for body in bodies]

    def due_of(self, faults: Sequence[str]) -> list[tuple[str, FaultPoint]]:
        """Return when each fault comes. One that comes before the first request is the first of a reading."""
        for fault in faults[len(self._due) :]:
            role, how = self._faults[fault]
            self._due.append((fault, self._moments.next(role if how == "SIGKILL" else "")))
            if len(self._due) > 1 and self._due[-1][1].before_prompt_end:
                due, self._due = self._due[:-1], self._due[-1:]
                return due
        due, self._due = self._due, []
        return due

    def _strike_all(
        self,
        due: Sequence[tuple[str, FaultPoint]],
        victim: Victim,
        strikes: list[Injection],
        records: list[StreamRecord],
    ) -> None:
        """Inject each fault once the server has recovered from the one before, as long as half of the
        streams are read.
        """
        target, rng = self._target, self._rng
        for number, (fault, moment) in enumerate(due):
            role, how = self._faults[fault]
            if number:
                time.sleep(rng.uniform(*BETWEEN) * self._took)
                if sum(one.tokens > 0 for one in records) > len(records) // 2:
                    return
                victim = target.victim(role, rng)
            kind = target.inject(victim, how, moment)
            strikes.append(Injection(fault, victim, kind, target.injected_at))
            if number + 1 < len(due) and not (
                self._await_notice(strikes[-1]) and target.is_healthy(RECOVERY_TIMEOUT_S)
            ):
                return

    def _await_notice(self, strike: Injection) -> bool:
        """Return True if the server reports the loss in time; at once for faults that are never reported."""
        return strike.fault in SILENT or self._target.is_noticed(NOTICE_S)

    def _blow(
        self, strike: Injection, until: float, records: Sequence[StreamRecord], verdicts: Counter[str]
    ) -> FaultResult:
        pauses = [x for one in records if (x := one.pause_after(strike.at, until)) is not None]
        target, pause = self._target, max(pauses, default=0.0)
        noticed, idle = target.noticed_s(strike.at, until), target.idle_s(strike.at, until)
        rebuilt = target.rebuilt(strike.at, until)
        return FaultResult(strike.fault, strike.victim, strike.kind, noticed, pause, rebuilt, verdicts, idle)

    def read_streams(
        self,
        bodies: Sequence[dict[str, Any]],
        hit: Callable[[], object] | None = None,
        after_s: float = 0.0,
        records: list[StreamRecord] | None = None,
    ) -> list[StreamRecord]:
        return read_all(self._target.url, bodies, self._args.timeout_s, hit, after_s, records)

    def _read_one(self, body: dict[str, Any]) -> StreamRecord:
        return self.read_streams([body])[0]

    def judged(self, records: Sequence[StreamRecord], *, well: bool) -> Counter[str]:
        """Judge the streams. If the server is healthy, streams without a seed are requested again, with the seed that
        they were given. They use no KV of the disturbed streams, as damage in it would be in both replies.
        """
        wanted, bodies = dict(enumerate(self.wanted)), self._forgotten(self.bodies)
        known = {i for i, b in enumerate(bodies) if has_one_answer(b)}
        if well:
            seeds = seeds_of(self._target.journal)
            again = [i for i, one in enumerate(records) if i not in known and one.id in seeds]
            for i in again:
                bodies[i] = {**bodies[i], "seed": seeds[records[i].id]}
            wanted.update(zip(again, self.read_streams([bodies[i] for i in again]), strict=True))
            known.update(again)
        verdicts = [verdict(one, wanted[i], exactly=i in known) for i, one in enumerate(records)]
        error = max((error_of(one, wanted[i]) for i, one in enumerate(records) if i in known), default=0.0)
        for i in known if well else ():
            if verdicts[i] == "wrong" and is_numeric_tie(records[i], wanted[i], bodies[i], error, self._read_one):
                verdicts[i] = "edge"
        for i, word in enumerate(verdicts):
            if word in BAD:
                words = difference_text(records[i], wanted[i])
                log.warning("stream %d was %s: %s (error %.1g): %s", i, word, words, error, bodies[i])
                log.warning("stream %d received tokens %s; wanted are %s", i, records[i].ids, wanted[i].ids)
        return Counter(verdicts)


def _in_time(strikes: Sequence[Injection], records: Sequence[StreamRecord]) -> list[Injection]:
    """Return the faults after which a stream received something, or was harmed."""
    if any(one.error for one in records):
        return list(strikes)
    return [s for s in strikes if any(one.pause_after(s.at) is not None for one in records)]
