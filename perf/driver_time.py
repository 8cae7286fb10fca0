"""The time that Lamina's driver takes of a round: Engine and Scheduler alone, over a wire whose rounds take no time.

The planner's constants driver_round and driver_row are a line through these numbers. With --bound the cost model says
what share of a round the driver takes at DOP (8, 64) with batches of 4,096 sequences. It also says from which rows on
the driver bounds the round. The driver works on a round while the one before runs. JSON lines; --write keeps them.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from common import parser_of, record
from paper_figures import H20, H100, batch_load, costs_of

from lamina.config.flat_options import make_config
from lamina.engine.engine import Engine
from lamina.request import SamplingParams
from lamina.tools.plan.deployment import Deployment
from lamina.tools.plan.model_facts import paper_models
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.lossless import SimulatedExecutor, simulated_ready

PROMPT, ROUNDS, WARM = 64, 60, 10


def seconds_of_a_round(rows: int) -> float:
    """Median over rounds in which every sequence takes one token, of the thread's CPU time: others may run here."""
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
        start = time.thread_time()
        engine.step()
        took.append(time.thread_time() - start)
    return statistics.median(took[WARM:-WARM])


def bound(seconds_by_rows: dict[int, float]) -> dict[str, Any]:
    """Return LLaMA3-70B's modelled round of two batches on 8 H100 + 64 H20, and the driver's time by its largest
    measurement.
    """
    costs, where = costs_of(paper_models()["llama3-70b"]), Deployment(H100, 8, H20, 64, 2)
    rows = max(seconds_by_rows)
    each = seconds_by_rows[rows] / rows
    batch = 4096
    phases = costs.step(where, batch_load(batch, 4096)).phases
    slices_s = sum(phases[name].seconds for name in ("linear", "elementwise", "collective"))
    fixed = costs.step(where, batch_load(1, 4096)).phases
    fixed_s = sum(fixed[name].seconds for name in ("linear", "elementwise", "collective"))
    slice_row_s = (slices_s - fixed_s) / batch
    return {
        "what": "modelled: DOP (8, 64), 2 batches of 4,096", "driver_row_s": each, "driver_s": 2 * batch * each,
        "slices_s": 2 * slices_s, "driver_share": batch * each / slices_s,
        # None: a row's share of the slices takes longer, so it never does.
        "driver_bounds_from_rows": None if each <= slice_row_s else fixed_s / (each - slice_row_s),
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 256, 512, 900])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bound", action="store_true", help="also where the driver bounds a modelled round")
    args = parser.parse_args()
    least = dict[int, float]()
    for rows in args.rows:
        took = [seconds_of_a_round(rows) for _ in range(args.repeats)]
        least[rows] = min(took)
        line = {"what": "driver of a round", "seconds": least[rows], "all": took}
        sys.stdout.write(record("driver_time", {"rows": rows}, line, write=args.write) + "\n")
    if args.bound:
        sys.stdout.write(record("driver_time", {"rows": max(least)}, bound(least), write=args.write) + "\n")


if __name__ == "__main__":
    main()
