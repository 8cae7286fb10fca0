"""Seconds of jobs whose KV is offloaded, as their pages fill and at the end: CachedAttention's figure 20 (arXiv
2403.19708). Compute worker and medium are emulated: to save a prompt of 1,000 tokens takes SAVED of the time in which
it is computed and 20 tokens are decoded. All else is real.

- at the end: each job's pages are saved once it has ended, and the next job begins after that
- as they fill: as the product does, the next job begins at once

Prompts of 1,000, 1,300 and 1,600 tokens, which share nothing. Competitors take turns; a turn is --jobs jobs, one after
the other, and lasts until all is saved. Prints one JSON line; --write appends it to
perf/results/bench_write_overlap.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_preloading import LAYERS, SHAPE, TOKEN_BYTES, tokens
from common import BrokenError, cpu_pressure, parser_of, record
from reference_model import make

from lamina import LLM, SamplingParams
from lamina.scheduler.kv_manager.offload_index import OffloadIndex

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from emulated_medium import environment

LENGTHS = 1000, 1300, 1600
STEPS = 20
SAVED = 0.15  # of the time of the job, so that saving is 13 % of both
STEP_PART = 0.02  # of the time in which 1,000 tokens of a prompt are computed, one step takes
PAPER = 0.13, 0.15
PARAMS = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)


class SavingJobs:
    """An engine with a slow medium."""

    def __init__(self, path: Path) -> None:
        self._llm = LLM(
            str(path), dtype="float32", memory_workers=1, max_model_len=2048, prefill_chunk=2048,
            kv_offloading_size="256MiB",
        )  # fmt: skip
        self._draw, tier = random.Random(1), self._llm.engine.scheduler.features.get(OffloadIndex)
        assert tier is not None
        self._tier, self._fill = tier, tier.batch_ops

    def run(self, jobs: int, length: int, *, as_they_fill: bool) -> float:
        """Seconds for so many jobs, until all of their KV is saved. Raises BrokenError where some is not."""
        engine, before = self._llm.engine, self._saved()
        vars(self._tier)["batch_ops"] = self._fill if as_they_fill else lambda running: []
        start = time.perf_counter()
        for _ in range(jobs):
            engine.add(tokens(self._draw, length), PARAMS)
            while engine.has_work:
                engine.step()
            if not as_they_fill:
                self._settle()
        self._settle()
        took = time.perf_counter() - start
        saved, wanted = self._saved() - before, jobs * (length + STEPS - 1) * TOKEN_BYTES
        if saved != wanted:
            raise BrokenError(f"{saved} bytes were saved, and {wanted} were to be")
        return took

    def _settle(self) -> None:
        """All is saved."""
        self._llm.engine.release_idle_blocks()
        self._llm.engine.finish_in_flight()

    def _saved(self) -> float:
        return sum(stats.get("kv_saved_bytes", 0.0) for stats in self._llm.stats().values())

    def close(self) -> None:
        """End its workers."""
        self._llm.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--compute-s", type=float, default=4.0, help="of 1,000 tokens of a prompt")
    parser.add_argument("--jobs", type=int, default=4, help="of a turn")
    parser.add_argument("--rounds", type=int, default=2, help="in which each length and way has a turn")
    args = parser.parse_args()
    slices = LAYERS + 1
    step_s = STEP_PART * args.compute_s
    job_s = args.compute_s + STEPS * step_s
    emulated = {"slice_row_s": args.compute_s / LENGTHS[0] / slices, "slice_s": [step_s / slices]}
    byte_s = SAVED * job_s / (LENGTHS[0] * TOKEN_BYTES)
    os.environ["LAMINA_EMULATE"] = json.dumps(emulated)
    os.environ.update(environment({"call": "write", "byte_s": byte_s}))
    with tempfile.TemporaryDirectory() as folder:
        jobs, pressure = SavingJobs(make(Path(folder) / "model", "bfloat16", SHAPE, 2048)), cpu_pressure()
        try:
            rows = {length: gain(jobs, length, args) for length in LENGTHS}
        finally:
            jobs.close()
    results: dict[str, Any] = {"by_length": rows, "paper_gain": PAPER, "modelled_gain": SAVED / (1 + SAVED)}
    results["cpu_pressure_avg10"] = {"before": pressure, "after": cpu_pressure()}
    settings = {"compute_s": args.compute_s, "jobs": args.jobs, "rounds": args.rounds, "steps": STEPS, "saved": SAVED}
    print(record("bench_write_overlap", settings, results, write=args.write))


def gain(jobs: SavingJobs, length: int, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a job in both ways, and the share that is gained."""
    took: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds):
        for way in random.sample([False, True], 2):
            took[way].append(jobs.run(args.jobs, length, as_they_fill=way) / args.jobs)
            print(length, "as they fill" if way else "at the end", took[way][-1], file=sys.stderr)
    at_end, filled = statistics.median(took[False]), statistics.median(took[True])
    return {"at_the_end_s": at_end, "as_they_fill_s": filled, "gain": 1 - filled / at_end}


if __name__ == "__main__":
    main()
