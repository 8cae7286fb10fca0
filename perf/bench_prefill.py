"""Prompts and decoding together: what each costs the other, with prefill workers and without.

Devices are emulated (the workers sleep for the time of their GEMMs and attention); processes, messages and the K and V
that prefill workers send are real. Three situations take turns. Either some sequences decode, or prompts arrive alone,
one after the other, or both. Prints a table and JSON lines; --write appends those to perf/results/bench_prefill.jsonl.

    python perf/bench_prefill.py --write
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from common import add_sampling, cpu_pressure, parser_of, record, sampling_of, spread
from reference_model import made

from lamina import LLM, SamplingParams
from lamina.engine.engine import Engine
from lamina.utils.emulated_device import VARIABLE, DeviceTimes

SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 64,
    "vocab_size": 256,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prefill-workers", default="1,0", help="numbers to compare (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--slice-ms", type=float, default=5.0, help="of a slice in a decoding step")
    parser.add_argument("--attention-ms", type=float, default=5.0, help="of a layer on a memory worker")
    parser.add_argument("--row-us", type=float, default=200.0, help="of each row of a prompt in a slice")
    parser.add_argument("--decoding", type=int, default=8, help="sequences that decode")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=3, help="in each run, one after the other")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--memory-workers", type=int, default=1)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--runs", type=int, default=5)
    add_sampling(parser)
    args = parser.parse_args()
    os.environ[VARIABLE] = msgspec.json.encode(
        DeviceTimes(
            slice_s=(args.slice_ms / 1e3,),
            slice_row_s=0.0,
            prefill_row_s=args.row_us / 1e6,
            attention_s=args.attention_ms / 1e3,
        )
    ).decode()
    rows = []
    with made("bfloat16", {**SHAPE, "num_hidden_layers": args.layers}, max_len=8192) as path:
        for workers in map(int, args.prefill_workers.split(",")):
            figures = measure(path, workers, args)
            rows.append((workers, figures))
            print(record("bench_prefill", {**vars(args), "prefill_workers": workers}, figures, write=args.write))
    print(table(rows))


def measure(path: Path, workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a decoding step and of a prompt until its first token, alone and together."""
    row_s = 0.0 if workers else args.row_us / 1e6  # a compute worker that has prompts takes the time for their rows
    times = msgspec.json.decode(os.environ[VARIABLE], type=DeviceTimes)
    os.environ[VARIABLE] = msgspec.json.encode(msgspec.structs.replace(times, slice_row_s=row_s)).decode()
    with LLM(
        str(path),
        attention="emulate",
        transport=args.transport,
        memory_workers=args.memory_workers,
        prefill_workers=workers,
        prefill_chunk=args.chunk,
        max_num_seqs=args.decoding + 2,
        compute_threads=1,
        enable_prefix_caching=False,
    ) as llm:
        spans: dict[str, list[float]] = {k: [] for k in ("step_ms", "prompt_ms", "step_beside_ms", "prompt_beside_ms")}
        pressure = []
        begun = llm.stats()
        for _ in range(args.runs):
            steps, _ = situation(llm.engine, args, decoding=args.decoding, prompts=0)
            _, alone = situation(llm.engine, args, decoding=0, prompts=args.prompts)
            beside, prompts = situation(llm.engine, args, decoding=args.decoding, prompts=args.prompts)
            for key, values in zip(spans, (steps, alone, beside, prompts), strict=True):
                spans[key].append(1e3 * median(values))
            pressure.append(cpu_pressure())
        spent = llm.stats()
    out: dict[str, Any] = {key: spread(values) for key, values in spans.items()}
    return {
        **out,
        "step_ratio": out["step_beside_ms"]["median"] / out["step_ms"]["median"],
        "prompt_ratio": out["prompt_beside_ms"]["median"] / out["prompt_ms"]["median"],
        "cpu_pressure_avg10": pressure,
        "seconds_by_role": {w: {k: v - begun[w].get(k, 0.0) for k, v in s.items()} for w, s in spent.items()},
    }


def situation(
    engine: Engine, args: argparse.Namespace, *, decoding: int, prompts: int
) -> tuple[list[float], list[float]]:
    """Seconds of each step of the sequences that decode, once all do; and of each prompt until its first token."""
    endless = SamplingParams(max_tokens=4000, ignore_eos=True, **sampling_of(args))
    ids = [engine.add([1 + i] * 64, endless) for i in range(decoding)]
    started: set[int] = set()
    while len(started) < decoding:
        started |= {o.request_id for o in engine.step()}
    steps, waits, left = list[float](), list[float](), prompts
    until = time.perf_counter() + 1.5  # for those that only decode
    asked, last = -1, time.perf_counter()
    while left or asked >= 0 or (not prompts and time.perf_counter() < until):
        if asked < 0 and left:
            left -= 1
            begun = time.perf_counter()
            asked = engine.add([7 + left] * args.prompt, SamplingParams(temperature=0.0, max_tokens=1))
        touched = {o.request_id for o in engine.step()}
        now = time.perf_counter()
        if decoding and ids[0] in touched:
            steps.append(now - last)
            last = now
        if asked in touched:
            waits.append(now - begun)
            asked = -1
    for request in ids:
        engine.cancel(request)
    engine.release_idle_blocks()
    return steps[1:], waits


def table(rows: list[tuple[int, dict[str, Any]]]) -> str:
    """Returns a table for people and the README."""
    lines = [
        "| prefill workers | step alone | with prompts | ratio | prompt alone | while decoding | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for workers, f in rows:
        step, beside, prompt, paced = (
            f"{f[k]['median']:.1f} ms ({f[k]['p10']:.1f} to {f[k]['p90']:.1f})"
            for k in ("step_ms", "step_beside_ms", "prompt_ms", "prompt_beside_ms")
        )
        lines.append(
            f"| {workers} | {step} | {beside} | {f['step_ratio']:.2f} | {prompt} | {paced} | {f['prompt_ratio']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
