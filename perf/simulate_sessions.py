"""The KV of idle sessions that is there when their next turn comes, and where. This is CachedAttention's figures 13 and
21 (arXiv 2403.19708) with this product's policy, in a modelled world (simulation.conversations), next to the paper's
numbers.

Sizes are the paper's: 9,000 sessions of 5.75 turns, the first 10,000 of 52,000 turns not counted. Memory has 128 GB, a
disk 2 or 10 TB, and a token .78, 2.5, .31 or .12 MB. The depth of the line is swept by how many turns are served in a
second. The paper gives no times between turns and no rate of its disk. Here a user thinks for a minute on average, and
10 GB are read in a second. That is more than the longest conversations need where two turns are served in a second.
Prints a table; --write appends a line for each run to perf/results/simulate_sessions.jsonl.

    python perf/simulate_sessions.py --write           # an hour of one core
    python perf/simulate_sessions.py --part 0.1        # a tenth of everything: two minutes
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

from common import parser_of, record

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulation.conversations import AHEAD, FIFO, LRU, Conversations, ConversationWorld


class PaperModel(NamedTuple):
    """Megabytes of a token, the context, and the paper's hit rates of its own policy with 10 TB (figure 13)."""

    kv_of_token: float
    window: int
    hit: float


MODELS = {
    "LLaMA-13B": PaperModel(0.78, 4096, 0.86),
    "LLaMA-65B": PaperModel(2.5, 2048, 0.71),
    "LLaMA-70B": PaperModel(0.31, 4096, 0.89),
    "Falcon-40B": PaperModel(0.12, 2048, 0.90),
}
PAPER = {(2, AHEAD): 0.40, (2, LRU): 0.129, (2, FIFO): 0.095, (10, AHEAD): 0.86, (10, LRU): 0.58, (10, FIFO): 0.48}
MEMORY = 128_000  # MB
SERVED = 8.0, 4.0, 3.0, 2.0, 1.0  # turns in a second; 5.75 come
PAPERS = 2.0  # about what the paper's took: 42,000 turns of LLaMA-13B in 6.25 hours


def cases(only: str, rates: list[float]) -> list[tuple[str, int, float]]:
    """Model, terabytes of the disk, and turns served in a second."""
    swept = [("LLaMA-13B", disk, served) for disk in (2, 10) for served in SERVED]
    others = [(name, disk, PAPERS) for name in list(MODELS)[1:] for disk in (2, 10)]
    return [case for case in (*swept, *others) if only in case[0] and (not rates or case[2] in rates)]


def paper_hit(name: str, disk: int, served: float, policy: str) -> float | None:
    """Returns the paper's hit rate, where it has one."""
    if served != PAPERS:
        return None
    if name == "LLaMA-13B":
        return PAPER[disk, policy]
    return MODELS[name].hit if policy == AHEAD and disk == 10 else None


def main() -> None:
    """Run all cases under each policy."""
    parser = parser_of(__doc__)
    parser.add_argument("--part", type=float, default=1.0, help="of everything (1)")
    parser.add_argument("--only", default="", help="models whose names have this")
    parser.add_argument(
        "--served", type=float, nargs="*", default=[], help="turns in a second, of those that there are"
    )
    args = parser.parse_args()
    print(f"{'':11}{'disk':>6}{'served/s':>9}{'line':>7}{'':6}{'hit':>6}{'paper':>7}{'in memory':>11}{'line long':>11}")
    for name, disk, served in cases(args.only, args.served):
        model = MODELS[name]
        world = ConversationWorld(model.kv_of_token, MEMORY, disk * 1_000_000, served, window=model.window)
        for policy in (AHEAD, LRU, FIFO):
            begun = time.process_time()
            hits = Conversations(world.scaled(args.part), policy).run()
            paper = paper_hit(name, disk, served, policy)
            print(
                f"{name:11}{disk:4}TB{served:9.1f}{hits.waiting:7.0f} {policy:5}{hits.hit:6.3f}"
                f"{'' if paper is None else f'{paper:.2f}':>7}{hits.in_memory:11.3f}{hits.in_memory_deep:11.3f}",
                flush=True,
            )
            settings = {"model": name, "disk_tb": disk, "served": served, "policy": policy, "part": args.part}
            figures = {**hits._asdict(), "paper_hit": paper, "modelled": True}
            cpu_s = round(time.process_time() - begun, 1)
            record("simulate_sessions", settings, {**figures, "cpu_s": cpu_s}, write=args.write)


if __name__ == "__main__":
    main()
