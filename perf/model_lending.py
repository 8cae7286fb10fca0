"""The loss by debtors that lend nothing, so that no debts form circles: modelled, not measured.

Instances of 40 blocks each lend and borrow by the shipped policy, on a virtual clock over a network that loses nothing
(simulation.lending). Requests come by chance, most of few blocks, some of more than an instance has. A request goes on
as fast as its instance does. That is slower by the part of its data that is on loan, times how much slower a creditor's
link is. Data of requests that end is freed where it lies. Prints requests a second and the part on loan, where
all lend, and where no debtor lends. --write appends a line for each to perf/results/model_lending.jsonl.

    python perf/model_lending.py --write        # half a minute of CPU
"""

from __future__ import annotations

import random
import sys
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from common import parser_of, record

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulation.lending.instance import SimInstance
from simulation.lending.scenario import LendingScenario
from simulation.lending.world import LendingWorld

STEP_S = 0.25
MOST = 3  # times its own blocks that an instance takes on at once


@dataclass
class LentTask:
    """A request: ``left`` seconds of work at home."""

    blocks: int
    left: float


class LendingTraffic(LendingWorld):
    """``slower``: a step on borrowed blocks, in steps at home."""

    def __init__(self, of: LendingScenario, arrivals: int, *, slower: float) -> None:
        super().__init__(of)
        self._wild, self._slower = False, slower
        self._chance = random.Random(of.seed)
        self._lines: dict[str, deque[LentTask]] = {}
        self._running: dict[str, list[LentTask]] = {}
        self.left, self.done, self._on_loan, self._data = arrivals, 0, 0.0, 0.0

    def run(self) -> tuple[float, float]:
        """Requests a second, and the part of all data that is on loan."""
        arrivals = self.left
        self._start_ledger()
        for index in range(self.of.instances):
            self._start(index)
        for one in list(self.instances.values()):
            self._lines[one.name], self._running[one.name] = deque(), []
            self._each(one, STEP_S, self._serve)
        self._arrive()
        while self.done < arrivals:
            assert self.clock.advance(self.clock.now + 60.0)
        return self.done / self.clock.now, self._on_loan / self._data

    def _arrive(self) -> None:
        if self.left:
            self.left -= 1
            rng = self._chance
            task = LentTask(rng.randint(30, 70) if rng.random() < 0.1 else rng.randint(1, 8), rng.uniform(1.0, 5.0))
            self._lines[rng.choice(sorted(self._lines))].append(task)
            self.clock.later(rng.expovariate(1.6 * self.of.instances), self._arrive)

    def _serve(self, one: SimInstance) -> None:
        running, line = self._running[one.name], self._lines[one.name]
        on_loan = one.debtor.num_borrowed / one.data if one.data else 0.0
        here = 1.0 - one.swapped / one.data if one.data else 1.0
        self._on_loan += one.debtor.num_borrowed
        self._data += one.data
        for task in running:
            task.left -= STEP_S * here / (1.0 + (self._slower - 1.0) * on_loan)
        self.done += sum(task.left <= 0.0 for task in running)
        running[:] = [task for task in running if task.left > 0.0]
        used = sum(task.blocks for task in running)
        while line and (not running or (not one.swapped and used + line[0].blocks <= MOST * self.of.blocks)):
            running.append(line.popleft())
            used += running[-1].blocks
        self._act(one, lambda: one.want(used))

    def _change(self, one: SimInstance) -> None:
        """Its data is that of its requests."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--arrivals", type=int, default=10_000, help="requests (10000)")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    of = LendingScenario(args.seed, args.instances, cap=40, debtor_cap=40, drift=0.0, delay_s=0.005, beat_s=0.5)
    for slower in (1.0, 3.0):
        for one_way in (False, True):
            rate, share = LendingTraffic(replace(of, one_way=one_way), args.arrivals, slower=slower).run()
            settings = {
                "arrivals": args.arrivals, "instances": args.instances, "seed": args.seed, "slower": slower,
                "one_way": one_way,
            }  # fmt: skip
            result = {"requests_per_s": round(rate, 4), "on_loan": round(share, 4)}
            print(record("model_lending", settings, result, write=args.write), flush=True)


if __name__ == "__main__":
    main()
