"""The time that Lamina's driver takes of a round: Engine and Scheduler alone, over a wire whose rounds take no time.

The planner's constants driver_round and driver_row are a line through these numbers. JSON lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from common import host

from lamina.config.flat_options import make_config
from lamina.engine.engine import Engine
from lamina.request import SamplingParams
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.lossless import SimulatedExecutor, simulated_ready

PROMPT, ROUNDS, WARM = 64, 60, 10


def seconds_of_a_round(rows: int) -> float:
    """Median over rounds in which every sequence takes one token."""
    options = {
        "transport": "shm", "block_size": 16, "max_num_seqs": rows, "prefill_chunk": rows * PROMPT,
        "enable_prefix_caching": False,
    }  # fmt: skip
    blocks = (rows + 2) * (PROMPT + ROUNDS + WARM + 64) // 16
    ready = simulated_ready(num_layers=80, num_blocks=blocks, block_size=16, max_len=4096)
    wire = SimulatedExecutor(VirtualClock(), ready, lambda load: 0.0)
    engine = Engine(wire, make_config(options))
    for _ in range(rows):
        engine.add([0] * PROMPT, SamplingParams(max_tokens=ROUNDS + WARM, ignore_eos=True, temperature=0))
    took = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        took.append(time.perf_counter() - start)
    return statistics.median(took[WARM:-WARM])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 256, 512, 900])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for rows in args.rows:
        took = [seconds_of_a_round(rows) for _ in range(args.repeats)]
        line = {"what": "driver of a round", "rows": rows, "seconds": min(took), "all": took, "host": host()}
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
