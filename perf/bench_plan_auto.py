"""`--pipeline auto` against all numbers of batches by hand, on emulated devices at five ratios of t_m and t_a.

Everything is real (engine, processes, messages, tokens of a small model) but the time of a slice and of an attention,
for which workers sleep. A slice takes t_m, and the attention of all sequences takes t_a, by its bytes. All engines of a
ratio run at the same time and take turns of a run each. Prints a JSON line and a line in words for each ratio; --write
appends the former to perf/results/bench_plan_auto.jsonl.

    python perf/bench_plan_auto.py --write
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from bench_pipeline import SHAPE, WARM_TOKENS, run, wake_soon
from common import add_sampling, cpu_pressure, parser_of, record, sampling_of
from reference_model import made

from lamina import LLM
from lamina.engine.tuning.tuner import Tuner
from lamina.utils.emulated_device import VARIABLE, DeviceTimes

SEQUENCES, PROMPT = 8, 8
TOKEN_BYTES = 2 * SHAPE["num_key_value_heads"] * SHAPE["hidden_size"] // SHAPE["num_attention_heads"] * 4  # of a layer


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ratio", default="0.25,0.5,1,2,4", help="t_m / t_a (default: %(default)s)")
    parser.add_argument("--most", type=int, default=4, help="batches (default: %(default)s)")
    parser.add_argument("--least-ms", type=float, default=40.0, help="the shorter of the two (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=6, help="of each sequence in a run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--transport", default="shm")
    add_sampling(parser)
    args = parser.parse_args()
    wake_soon(100)
    with made("float32", {**SHAPE, "num_hidden_layers": args.layers}, max_len=256) as path:
        for ratio in map(float, args.ratio.split(",")):
            measured = measure(path, ratio, args)
            print(record("bench_plan_auto", {**vars(args), "ratio": ratio}, measured, write=args.write), flush=True)
            times = ", ".join(f"{n} {s * 1e3:.0f} ms" for n, s in measured["token_s"].items())
            print(
                f"t_m = {ratio:g} t_a: {times}; planned {measured['planned_to_best']:.3f} of the best's speed",
                flush=True,
            )


def measure(path: Path, ratio: float, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a token of all sequences, by the number of batches, and with a plan."""
    least = args.least_ms / 1e3
    tm, ta = max(least, least * ratio), max(least, least / ratio)
    # The last slice and the first one of the next token are one turn: together they take what the others take.
    slices = [tm / 2, *[tm] * (args.layers - 1), tm / 2]
    stored = SEQUENCES * (PROMPT + WARM_TOKENS + args.tokens / 2) * TOKEN_BYTES
    times = DeviceTimes(slice_s=tuple(slices), attention_byte_s=ta / stored)
    os.environ[VARIABLE] = msgspec.json.encode(times).decode()
    ways: dict[str, dict[str, Any]] = {str(n): {"pipeline": n} for n in range(1, args.most + 1)}
    ways["plan"] = {"plan": f"auto:{args.most}"}
    token_s: dict[str, list[float]] = {name: [] for name in ways}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine(path, args.transport, way)) for name, way in ways.items()}
        for _ in range(args.runs):
            for name, llm in engines.items():
                token_s[name].append(median(run(llm, SEQUENCES, args.tokens, sampling_of(args))))
        tuner = engines["plan"].engine.feature(Tuner)
        reason = tuner.reason if tuner else ""
    each = {name: median(seconds) for name, seconds in token_s.items()}
    best = min(each[str(n)] for n in range(1, args.most + 1))
    return {
        "tm_s": tm, "ta_s": ta, "token_s": each, "runs_s": token_s, "planned_to_best": best / each["plan"],
        "reason": reason, "cpu_pressure": cpu_pressure(),
    }  # fmt: skip


def engine(path: Path, transport: str, way: dict[str, Any]) -> LLM:
    """On one memory worker."""
    return LLM(
        str(path), attention="emulate", transport=transport, memory_workers=1, max_num_seqs=SEQUENCES,
        compute_threads=1, **way,
    )  # fmt: skip


if __name__ == "__main__":
    main()
