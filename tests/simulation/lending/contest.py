"""Deployments that lend to each other, and all of which need more than they have: each is served in the end.

Each has requests, one after another, that need memory of others. A request holds it for some time and is done. The
total suffices for any single one. The network loses and doubles messages at first; the clocks of instances differ by
hours, so the order of claims is any fixed one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pprint import pformat

from .instance import SimInstance
from .scenario import LendingScenario
from .world import BrokenLendingError, LendingWorld

WILD_S, LIMIT_S = 15.0, 40.0  # for the bad network, which then is good; and for each request
LOOK_S = 0.1


@dataclass(frozen=True)
class ContestScenario:
    """``jobs``: of each instance, the blocks and the seconds of its requests. ``of``: the network and the terms."""

    of: LendingScenario
    jobs: tuple[tuple[tuple[int, float], ...], ...]


def contest(seed: int, instances: int = 0) -> ContestScenario:
    """``instances``: how many; 0 = 2 to 5, by the seed."""
    rng = random.Random(f"contest {seed}")
    count = instances or rng.choice((2, 2, 3, 4, 5))
    blocks = rng.choice((4, 16, 40))
    of = LendingScenario(
        seed, count, blocks, cap=blocks, debtor_cap=blocks, one_way=True,
        loss=rng.choice((0.0, 0.0, 0.05, 0.2)), twice=rng.choice((0.0, 0.2)), late_s=rng.choice((0.05, 1.5)),
    )  # fmt: skip
    total = blocks * count

    def size() -> int:
        return rng.choice((rng.randint(1, total), rng.randint(blocks, total), total))

    jobs = tuple(tuple((size(), rng.uniform(0.2, 4.0)) for _ in range(rng.choice((1, 1, 2, 3)))) for _ in range(count))
    return ContestScenario(of, jobs)


def check_contest(of: ContestScenario) -> int:
    """Returns the number of requests that were served. Raises BrokenLendingError if one waits for too long."""
    try:
        return ContestWorld(of).play_out()
    except Exception as error:
        raise BrokenLendingError(f"{type(error).__name__}: {error}\n{pformat(of)}") from error


class ContestWorld(LendingWorld):
    """The world, in which each instance's demand is its present request."""

    def __init__(self, of: ContestScenario) -> None:
        super().__init__(replace(of.of, wild_s=1e9))
        self._jobs = [list(jobs) for jobs in of.jobs]
        self._done_at: dict[str, float] = {}
        self.served = 0

    def play_out(self) -> int:
        """Play until all requests are done."""
        due = sum(map(len, self._jobs))
        self.begin()
        for number, one in enumerate(list(self.instances.values())):
            self._each(one, LOOK_S, lambda one, number=number: self._look(one, number))  # type: ignore[misc]
        self._run(WILD_S)
        self._wild = False
        end = WILD_S + LIMIT_S * due
        while self.served < due and self.clock.advance(end):
            pass
        waits = {one.name: (one.data, one.swapped, one.creditor.leases) for one in self.instances.values()}
        assert self.served == due, f"{self.served} of {due} requests were served in {end:g} s: {waits}"
        return self.served

    def _change(self, one: SimInstance) -> None:
        """Its demand changes with its requests alone."""

    def _look(self, one: SimInstance, number: int) -> None:
        jobs = self._jobs[number]
        if not jobs:
            return
        if not one.data:
            self._act(one, lambda: one.want(jobs[0][0]))
        elif one.swapped:
            self._done_at.pop(one.name, None)  # what it had was taken back: it begins anew
        elif self._done_at.setdefault(one.name, self.clock.now + jobs[0][1]) <= self.clock.now:
            del self._done_at[one.name]
            jobs.pop(0)
            self.served += 1
            self._act(one, lambda: one.want(0))
