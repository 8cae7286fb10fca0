"""The whole fleet on a virtual clock, many seeds: the shipped driver and workers over simulated links, processes that
die at any call, a model of integers (simulation.whole). With --crossed faults meet others (simulation.whole.crossed).
With --engine it is the engine alone over modelled workers, many more of them (simulation.run). Prints counts of what
has happened, and each scenario that fails; --write appends a line to perf/results/simulate_fleet.jsonl, with the seeds
that have failed. Ends with status 1 where one has.

    python perf/simulate_fleet.py --seeds 5000 --write
    python perf/simulate_fleet.py --engine --seeds 100000 --write    # hours
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import parser_of, record

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulation.play import ScenarioError
from simulation.run import check_all
from simulation.scenario import leaving, planned, scenario
from simulation.whole.crossed import crossed_fleet
from simulation.whole.run import check_fleet
from simulation.whole.scenario import fleet_scenario, moving_fleet, planned_fleet

SHARE = 50
COLLECTED = 10  # seeds, between two looks for garbage


class SeedShare(NamedTuple):
    """The result of some seeds: counts of what has happened, and what is wrong with those that have failed."""

    counts: Counter[str]
    failed: dict[int, str]


def fleet_share(first: int) -> SeedShare:
    """Plays ``SHARE`` seeds. One in three has engines that die, memory workers that come and go, two ranks, stripes or
    parity. One in three has sequences and stripes that move, prompts in stages, or spares.
    """
    return _share(first, (fleet_scenario, planned_fleet, moving_fleet), check_fleet)


def crossed_share(first: int) -> SeedShare:
    """Plays ``SHARE`` seeds."""
    return _share(first, (crossed_fleet,), check_fleet)


def engine_share(first: int) -> SeedShare:
    """Plays ``SHARE`` seeds, of which two in three have memory workers that come and go; of one in three sequences
    leave those that go one by one.
    """
    return _share(first, (scenario, planned, leaving), check_all)


SHARES = {"fleet": fleet_share, "crossed": crossed_share, "engine": engine_share}


def _share(first: int, kinds: tuple[Callable[[int], Any], ...], check: Callable[[Any], Any]) -> SeedShare:
    share = SeedShare(Counter(), {})
    for seed in range(first, first + SHARE):
        try:
            played = check(kinds[seed % len(kinds)](seed))._asdict()
        except ScenarioError as error:
            share.failed[seed] = str(error)
        else:
            share.counts.update({name: value for name, value in played.items() if isinstance(value, int)})
        if seed % COLLECTED == 0:
            gc.collect()
    return share


def _begin() -> None:
    """In a process that plays: workers that are lost are no news, what was imported is no garbage, and what a seed
    leaves is looked for between seeds alone.
    """
    logging.disable(logging.WARNING)
    gc.freeze()
    gc.disable()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help=f"in shares of {SHARE} (1000)")
    parser.add_argument("--first", type=int, default=0, help="seed (0)")
    of = parser.add_mutually_exclusive_group()
    of.add_argument("--engine", action="store_true", help="the engine alone")
    of.add_argument("--crossed", action="store_true", help="faults that meet others")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    args = parser.parse_args()
    counts, failed, began = Counter[str](), list[int](), time.monotonic()
    kind = "engine" if args.engine else "crossed" if args.crossed else "fleet"
    share_of = SHARES[kind]
    firsts = range(args.first, args.first + args.seeds, SHARE)
    with ProcessPoolExecutor(args.jobs, initializer=_begin) as pool:
        for done, share in enumerate(pool.map(share_of, firsts), 1):
            counts.update(share.counts)
            failed += share.failed
            for seed, text in share.failed.items():
                print(f"seed {seed}: {text}", flush=True)
            if done % 10 == 0:
                print(f"{done * SHARE} seeds in {time.monotonic() - began:.0f} s: {dict(counts)}", flush=True)
    result = {"seeds": len(firsts) * SHARE, "failed": len(failed), "failed_seeds": failed, **counts}
    result["seconds"] = round(time.monotonic() - began)
    settings = {"seeds": args.seeds, "first": args.first, "of": kind}
    print(record("simulate_fleet", settings, result, write=args.write))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
