"""Loans between deployments on a virtual clock, many seeds: whether what must hold does (simulation.lending). The
network delays, loses and doubles messages, and instances and the ledger crash. Prints counts of what has happened;
--write appends a line to perf/results/simulate_lending.jsonl. Ends with status 1 at a seed that fails.

    python perf/simulate_lending.py --seeds 100000 --write    # half an hour of two cores
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from common import parser_of, record

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulation.lending.contest import check_contest, contest
from simulation.lending.scenario import lending_scenario, rough
from simulation.lending.world import check_lending

SHARE = 250


def share(first: int, instances: int) -> Counter[str]:
    """Plays ``SHARE`` seeds, of which every fourth has a network that is as bad as it gets."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + SHARE):
        of = lending_scenario(seed, instances)
        counts.update(check_lending(rough(of) if seed % 4 == 3 else of)._asdict())
    return counts


def contested(first: int, instances: int) -> Counter[str]:
    """Plays ``SHARE`` seeds in which all need more than they have."""
    served = sum(check_contest(contest(seed, instances)) for seed in range(first, first + SHARE))
    return Counter({"served": served})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help=f"in shares of {SHARE} (10000)")
    parser.add_argument("--first", type=int, default=0, help="seed, so that many can be tried in pieces (0)")
    parser.add_argument("--instances", type=int, default=0, help="of each world; 0 = 2 to 8, by the seed")
    parser.add_argument(
        "--contest", action="store_true", help="all need more than they have: each is served in the end"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    began = time.monotonic()
    firsts = range(args.first, args.first + args.seeds, SHARE)
    with ProcessPoolExecutor(args.jobs) as pool:
        for done, of in enumerate(
            pool.map(contested if args.contest else share, firsts, [args.instances] * len(firsts)), 1
        ):
            counts.update(of)
            if done % 20 == 0:
                print(f"{done * SHARE} seeds in {time.monotonic() - began:.0f} s: {dict(counts)}", flush=True)
    result = {"seeds": len(firsts) * SHARE, "failed": 0, "instances": args.instances or "2 to 8", **counts}
    settings = {"first": args.first, "seeds": args.seeds, "instances": args.instances, "contest": args.contest}
    print(record("simulate_lending", settings, result, write=args.write))


if __name__ == "__main__":
    main()
