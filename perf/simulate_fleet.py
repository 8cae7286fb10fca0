"""The whole fleet on a virtual clock, many seeds: the shipped driver and workers over simulated links, processes that
die at any call, a model of integers (lamina.sim.whole); with --engine the engine alone over modelled workers, many
more of them (lamina.sim.run). Prints counts of what has happened; --write appends a line to
perf/results/simulate_fleet.jsonl. Ends with status 1 at a seed that fails.

    python perf/simulate_fleet.py --seeds 5000 --write
    python perf/simulate_fleet.py --engine --seeds 100000 --write    # hours
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from common import record

from lamina.sim.run import check, check_restart
from lamina.sim.scenario import leaving, planned, scenario
from lamina.sim.whole.run import check_fleet
from lamina.sim.whole.scenario import fleet_scenario, planned_fleet

SHARE = 50


def fleet_share(first: int) -> Counter[str]:
    """Of ``SHARE`` seeds, of which every other one has what the others lack: engines that die, memory workers that come
    and go, two ranks, stripes.
    """
    counts: Counter[str] = Counter()
    for seed in range(first, first + SHARE):
        of = fleet_scenario(seed) if seed % 2 == 0 else planned_fleet(seed)
        counts.update(check_fleet(of)._asdict())
    return counts


def engine_share(first: int) -> Counter[str]:
    """Of ``SHARE`` seeds, of which two in three have memory workers that come and go; of one in three sequences leave
    those that go one by one.
    """
    counts: Counter[str] = Counter()
    for seed in range(first, first + SHARE):
        of = (scenario, planned, leaving)[seed % 3](seed)
        played = check(of)
        check_restart(of)
        counts.update(losses=played.losses, preemptions=played.preemptions, changes=played.changes)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1_000, help=f"in shares of {SHARE} (1000)")
    parser.add_argument("--first", type=int, default=0, help="seed (0)")
    parser.add_argument("--engine", action="store_true", help="the engine alone")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--write", action="store_true", help="append to the results")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    began = time.monotonic()
    firsts = range(args.first, args.first + args.seeds, SHARE)
    with ProcessPoolExecutor(args.jobs) as pool:
        for done, of in enumerate(pool.map(engine_share if args.engine else fleet_share, firsts), 1):
            counts.update(of)
            if done % 10 == 0:
                print(f"{done * SHARE} seeds in {time.monotonic() - began:.0f} s: {dict(counts)}", flush=True)
    result = {"seeds": len(firsts) * SHARE, "failed": 0, **counts}
    settings = {"seeds": args.seeds, "first": args.first, "of": "engine" if args.engine else "fleet"}
    print(record("simulate_fleet", settings, result, write=args.write))


if __name__ == "__main__":
    main()
