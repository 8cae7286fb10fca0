"""A memory worker that is throttled, and what its loss of a part of the work brings back (--memory-weights measured).

Sequences with so much KV decode on real processes. Then memory worker 1 is stopped and continued (SIGSTOP, SIGCONT)
many times a second, so that it runs for --duty of the time, and later left alone. The output has seconds of a step:
alone, throttled with its old part, with a smaller one, and recovered, with the part that it then has again. It also has
the times when parts changed, with the pauses. Prints JSON; --write appends it to perf/results/bench_reweigh.jsonl.

    python perf/bench_reweigh.py --write
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench_elastic import KV_BYTES, SHAPE
from common import cpu_pressure, parser_of, record
from reference_model import make

from lamina import LLM, SamplingParams
from lamina.executor.load_balance import COOLDOWN_S
from lamina.server.engine_client.engine_process import COUNTERS_S
from lamina.server.engine_client.rebalance import Rebalancer

VICTIM = "memory-1"
PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)
THROTTLE = """
import os, signal, sys, time
pid, period_s, duty = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
try:
    while True:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(period_s * (1 - duty))
        os.kill(pid, signal.SIGCONT)
        time.sleep(period_s * duty)
finally:
    os.kill(pid, signal.SIGCONT)
"""


class Watched:
    """An engine that is stepped, with the work of a server: counters are asked for, and parts looked at."""

    def __init__(self, llm: LLM, prompts: list[list[int]]) -> None:
        """``prompts`` are completed again and again, so that as much KV runs all the time; it is retained meanwhile."""
        self.llm, self.reweigh = llm, Rebalancer(llm.engine, llm.pools)
        self._prompts = {llm.engine.add(prompt, PARAMS): prompt for prompt in prompts}
        self.begun = self._asked_at = time.perf_counter()
        self.changes: list[dict[str, Any]] = []

    def steps(self, until_s: float, *, change: bool = False) -> list[float]:
        """Seconds of each step, until that time, or ``change``: until parts are others."""
        pools, taken, count = self.llm.pools, list[float](), len(self.changes)
        last = time.perf_counter()
        while last - self.begun < until_s and not (change and len(self.changes) > count):
            if outputs := self.llm.engine.step():
                now = time.perf_counter()
                taken.append(now - last)
                last = now
                for output in (o for o in outputs if o.finished):
                    prompt = self._prompts.pop(output.request_id)
                    self._prompts[self.llm.engine.add(prompt, PARAMS)] = prompt
            if (counters := pools.collect_stats()) is not None:
                self.reweigh.update(counters)
            if time.perf_counter() - self._asked_at > COUNTERS_S:
                self._asked_at = time.perf_counter()
                pools.request_stats()
            if (outcome := pools.resizer.take_outcome()) is not None:
                at = time.perf_counter() - self.begun
                told = {"at_s": round(at, 2), "pause_s": outcome.pause_s, "moved_bytes": outcome.moved_bytes}
                self.changes.append(told | {"weights": pools.resizer.weights, "error": outcome.error})
        return taken


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, default=384, help="of KV that runs (384)")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--duty", type=float, default=0.5, help="part of the time in which it runs (0.5)")
    parser.add_argument("--period-s", type=float, default=0.02, help="between two of its stops (0.02)")
    parser.add_argument("--measure-s", type=float, default=20.0, help="of each of the four times (20)")
    parser.add_argument("--kv-memory", default="512MiB", help="of each memory worker")
    parser.add_argument("--partition", default="head")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder), "bfloat16", SHAPE, max_len=8192)
        results = measure(str(model), args)
    print(record("bench_reweigh", vars(args), results, write=args.write))


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    tokens = (args.mib << 20) // KV_BYTES // args.sequences
    prompts = [[x % SHAPE["vocab_size"] for x in (i, *range(tokens - 1))] for i in range(args.sequences)]
    options = {"partition": args.partition, "kv_memory": args.kv_memory, "memory_weights": "measured"}
    with LLM(model, dtype="bfloat16", memory_workers=2, memory_threads=1, **options) as llm:
        at_start = llm.pools.resizer.weights
        watched = Watched(llm, prompts)
        took = {"alone": watched.steps(now := COOLDOWN_S)[-200:]}
        words = [str(llm.pools.pids[VICTIM]), str(args.period_s), str(args.duty)]
        throttled = subprocess.Popen([sys.executable, "-c", THROTTLE, *words])
        try:
            throttled_at = now
            took["throttled"] = watched.steps(now := now + args.measure_s, change=True)
            if not watched.changes:
                watched.steps(now + 300.0, change=True)
            now = time.perf_counter() - watched.begun
            took["with a smaller part"] = watched.steps(now := now + args.measure_s)
            watched.steps(max(now, throttled_at + COOLDOWN_S + args.measure_s))
        finally:
            throttled.terminate()
            throttled.wait()
            os.kill(int(words[0]), signal.SIGCONT)  # it may have been stopped when that ended
        recovered_at, count = time.perf_counter() - watched.begun, len(watched.changes)
        watched.steps(recovered_at + 300.0, change=True)
        now = time.perf_counter() - watched.begun
        took["recovered"] = watched.steps(now + args.measure_s)
        pids_alike = llm.pools.pids[VICTIM] == int(words[0])
    return {
        "weights_at_start": at_start,
        "throttled_at_s": throttled_at,
        "recovered_at_s": recovered_at,
        "changes": watched.changes,
        "changes_while_throttled": count,
        "same_process": pids_alike,
        "step_s": {name: median(each) for name, each in took.items() if each},
        "steps": {name: len(each) for name, each in took.items()},
        "cpu_pressure": cpu_pressure(),
    }


if __name__ == "__main__":
    main()
