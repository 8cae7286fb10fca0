"""The pipeline against its plan: n batches over n - 1 replicas, on emulated devices.

Everything is real (engine, processes, messages, tokens of a small model) but the time of a slice and of an attention,
for which the workers sleep. So the pools can be measured on two cores as if each worker had a device of its own. The
plan knows no software: what is above it is what Lamina adds, and what the machine adds where other jobs keep workers
from waking up in time. Of that the longer times suffer less, and the median over the tokens of a run less than their
mean. Prints one JSON line for each point and a table; --write appends the lines to perf/results/bench_pipeline.jsonl.

    python perf/bench_pipeline.py --write
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import struct
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from common import add_sampling, cpu_pressure, parser_of, record, sampling_of, spread
from reference_model import made
from rotation_plan import rotation

from lamina import LLM, SamplingParams
from lamina.scheduler.rotation.pipeline import lower_bound
from lamina.utils.emulated_device import VARIABLE, DeviceTimes

SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}
WARM_TOKENS = 2  # of each batch, until all are under way
PROMPT = 8


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--n", default="1,2,3,4", help="numbers of batches (default: %(default)s)")
    parser.add_argument("--ratio", default="0.25,0.5,1,2,4", help="t_m / t_a (default: %(default)s)")
    parser.add_argument("--least-ms", type=float, default=60.0, help="the shorter of the two (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=6, help="of each batch in a run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--per-batch", type=int, default=2, help="sequences of a batch (default: %(default)s)")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--slice-us", type=int, default=100, help="ask for this time slice (see wake_soon); 0 = do not")
    add_sampling(parser)
    args = parser.parse_args()
    if args.slice_us and not wake_soon(args.slice_us):
        args.slice_us = 0  # the record tells
    rows = []
    with made("float32", {**SHAPE, "num_hidden_layers": args.layers}, max_len=256) as path:
        for n in map(int, args.n.split(",")):
            for ratio in map(float, args.ratio.split(",")):
                figures = measure(path, n, ratio, args)
                rows.append((n, ratio, figures))
                settings = {**vars(args), "n": n, "ratio": ratio}
                print(record("bench_pipeline", settings, figures, write=args.write), flush=True)
    print(table(rows))


def measure(path: Path, n: int, ratio: float, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a token of all n batches: measured, planned, and the plan's lower bound."""
    least = args.least_ms / 1e3
    tm, ta = max(least, least * ratio), max(least, least / ratio)
    # The last slice and the first one of the next token are one turn: together they take what the others take.
    slices = [tm / 2, *[tm] * (args.layers - 1), tm / 2]
    os.environ[VARIABLE] = msgspec.json.encode(DeviceTimes(slice_s=tuple(slices), attention_s=ta)).decode()
    turns = [tm] * args.layers, [ta] * args.layers
    with LLM(
        str(path),
        pipeline=n,
        attention="emulate",
        transport=args.transport,
        memory_workers=1,
        max_num_seqs=n * args.per_batch,
        compute_threads=1,
    ) as llm:
        begun = llm.stats()
        times, pressure = [], []
        for _ in range(args.runs):
            times.append(run(llm, n * args.per_batch, args.tokens, sampling_of(args)))
            pressure.append(cpu_pressure())
        spent = llm.stats()
    plan, bound = median(planned(n, *turns, args.tokens)), lower_bound(n, *turns)
    measured = spread([median(t) for t in times])
    return {
        "tm_s": tm,
        "ta_s": ta,
        "token_s": measured,
        "plan_s": plan,
        "lower_bound_s": bound,
        "ratio_to_plan": measured["median"] / plan,
        "ratio_of_means": sum(map(sum, times)) / (plan * args.tokens * args.runs),
        "tokens_of_runs_s": times,
        "cpu_pressure_avg10": pressure,
        "seconds_by_role": {w: {k: v - begun[w].get(k, 0.0) for k, v in s.items()} for w, s in spent.items()},
    }


def run(llm: LLM, sequences: int, tokens: int, sampling: dict[str, Any]) -> list[float]:
    """Seconds of each of ``tokens`` tokens of all sequences, once all are under way."""
    params = SamplingParams(max_tokens=WARM_TOKENS + tokens + 2, ignore_eos=True, **sampling)
    engine = llm.engine
    counts = {engine.add([1 + i] * PROMPT, params): 0 for i in range(sequences)}
    reached: dict[int, float] = {}
    while engine.has_work:
        for output in engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)
        reached.setdefault(min(counts.values()), time.perf_counter())
    engine.release_idle_blocks()
    return [reached[k + 1] - reached[k] for k in range(WARM_TOKENS, WARM_TOKENS + tokens)]


def planned(n: int, slices: list[float], attention: list[float], tokens: int) -> list[float]:
    """Returns what ``run`` would measure if all workers followed the plan: the last batch's tokens, once all are under
    way.
    """
    plan = rotation(n, slices, attention, WARM_TOKENS + tokens + 1)
    starts = {e.token: e.start for e in plan.events if e.slice == 0 and e.batch == n - 1}
    return [starts[k + 1] - starts[k] for k in range(WARM_TOKENS, WARM_TOKENS + tokens)]


def wake_soon(slice_us: int) -> bool:
    """Asks the kernel for short time slices, for this process and its workers. A process that sleeps most of the time
    then gets a core sooner after waking up, next to jobs that compute; its share stays the same. sched_setattr(2),
    Linux 6.12.
    """
    size, normal, nice = 56, 0, os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack("=IIQiIQQQII", size, normal, 0, nice, 0, slice_us * 1000, 0, 0, 0, 0)
    call = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
    return call is not None and ctypes.CDLL(None).syscall(call, 0, attributes, 0) == 0


def table(rows: list[tuple[int, float, dict[str, Any]]]) -> str:
    """Returns a table for people and the README."""
    lines = [
        "| n | t_m/t_a | measured ms | p10 to p90 | plan | measured/plan | lower bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for n, ratio, figures in rows:
        token, ms = figures["token_s"], 1e3
        lines.append(
            f"| {n} | {ratio:g} | {token['median'] * ms:.1f} | {token['p10'] * ms:.1f} to {token['p90'] * ms:.1f} "
            f"| {figures['plan_s'] * ms:.1f} | {figures['ratio_to_plan']:.3f} | {figures['lower_bound_s'] * ms:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
