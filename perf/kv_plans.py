"""Random plans for a driver's ledger and for memory workers, compared with dicts of tokens: the property of the file
tests/scheduler/sparsity/test_plans_without_tokens.py for very many seeds. Sequences begin, fork at any token, grow,
shrink and end, pages are saved and loaded meanwhile, K and V are granted, and plans come twice. Prints counts of what
happened; --write appends a line to perf/results/kv_plans.jsonl. Ends with an error at a seed that fails, and names it.

    python perf/kv_plans.py --seeds 100000 --write    # 16 minutes of one core
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

from common import BrokenError, parser_of, record

sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("", "scheduler/sparsity")]
from test_plans_without_tokens import play  # type: ignore[import-not-found]

SHARE = 500


def share(first: int, seeds: int) -> Counter[str]:
    """Checks so many seeds. Raises BrokenError."""
    counts = Counter[str]()
    for seed in range(first, first + seeds):
        try:
            world = play(seed)
        except Exception as e:
            raise BrokenError(f"seed {seed}: {type(e).__name__}: {e}") from e
        counts.update(plans=world.applied, loads=world.loaded, forks=world.forked, begun_blocks=world.copied)
    return counts


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed (0)")
    parser.add_argument("--seeds", type=int, default=10_000, help=f"in shares of {SHARE} (10000)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (a core each)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds, after which no share begins")
    args = parser.parse_args()
    counts, began = Counter[str](), time.monotonic()
    firsts, tried = list(range(args.first, args.first + args.seeds, SHARE)), 0
    with ProcessPoolExecutor(args.jobs) as pool:
        while firsts and time.monotonic() - began < args.limit_s:
            some, firsts = firsts[: args.jobs], firsts[args.jobs :]
            for each in pool.map(share, some, repeat(SHARE)):
                counts.update(each)
                tried += SHARE
            print(f"{tried} seeds, {time.monotonic() - began:.0f} s", file=sys.stderr)
    settings = {"first": args.first, "seeds": tried}
    print(record("kv_plans", settings, {"failed": 0, **counts}, write=args.write))


if __name__ == "__main__":
    main()
