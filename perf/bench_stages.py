"""Prompts on prefill workers that share their layers: the time over that of one worker that has all.

Devices are emulated (a slice takes so long for each row); processes, messages, the cut that crosses, and the K and V
that all stages send are real. Numbers of stages take turns. A prompt of N chunks on X stages takes N + X - 1 times what
the slowest stage takes for a chunk. One worker takes N times what all together take. Prints a table and JSON lines;
--write appends those to perf/results/bench_stages.jsonl. Tokens are compared.

    python perf/bench_stages.py --write
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from common import cpu_pressure, parser_of, record, spread
from reference_model import make

from lamina import LLM, SamplingParams
from lamina.protocol.prefill_stages import stage_layers
from lamina.utils.emulated_device import VARIABLE, DeviceTimes

SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 256,
}
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--stages", default="1,2,4", help="numbers to compare (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--row-us", type=float, default=400.0, help="of each row of a prompt in a slice")
    parser.add_argument("--prompts", default="64,128,512,1024", help="tokens of prompts")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    stages, lengths = ([int(x) for x in text.split(",")] for text in (args.stages, args.prompts))
    os.environ[VARIABLE] = msgspec.json.encode(DeviceTimes(prefill_row_s=args.row_us / 1e6)).decode()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_until:
        path = make(Path(folder) / "model", "float32", {**SHAPE, "num_hidden_layers": args.layers}, max_len=4096)
        llms = {x: open_until.enter_context(engine_of(path, x, args)) for x in stages}
        seconds, tokens = measure(llms, lengths, args)
        same = all(tokens[x] == tokens[stages[0]] for x in stages)
    for x in stages:
        rows = {n: row(n, x, seconds, args) for n in lengths}
        figures = {
            "tokens_equal": same,
            "prompts": rows,
            "cpu_pressure_avg10": cpu_pressure(),
        }
        print(record("bench_stages", {**vars(args), "stages": x}, figures, write=args.write))
        for n in lengths:
            print(f"{x} stages, {n:5} tokens: " + ", ".join(f"{k} {v}" for k, v in rows[n].items()))


def engine_of(path: Path, stages: int, args: argparse.Namespace) -> LLM:
    """One group of so many stages."""
    return LLM(
        str(path),
        memory_workers=1,
        prefill_workers=stages,
        prefill_pipeline=stages,
        prefill_chunk=args.chunk,
        compute_threads=1,
        deterministic=True,
        enable_prefix_caching=False,
    )


def measure(
    llms: dict[int, LLM], lengths: list[int], args: argparse.Namespace
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Seconds to the first token, by stages and length; and the tokens, by stages."""
    seconds: dict[Any, list[float]] = {(x, n): [] for x in llms for n in lengths}
    tokens: dict[int, list[int]] = {x: [] for x in llms}
    for run in range(args.runs + 1):  # the first one warms up
        for n in lengths:
            for x, llm in llms.items():
                begun = time.perf_counter()
                (output,) = llm.generate([[7 + (run + i) % 200 for i in range(n)]], ONE_TOKEN)
                if run:
                    seconds[x, n].append(time.perf_counter() - begun)
                tokens[x] += output.outputs[0].token_ids
    return seconds, tokens


def row(tokens: int, stages: int, seconds: dict[Any, list[float]], args: argparse.Namespace) -> dict[str, Any]:
    """The time of a prompt over that of one worker, and what it should be by the slices of each stage. The last slice
    of all runs for one row alone, which is nothing.
    """
    chunks = -(-tokens // args.chunk)
    slowest = max(len(stage_layers(args.layers, stages, s)) for s in range(stages))
    due = (chunks + stages - 1) * slowest / (chunks * args.layers)
    ratio = median(seconds[stages, tokens]) / median(seconds[1, tokens])
    return {
        "ms": round(1e3 * median(seconds[stages, tokens]), 2),
        "spread": spread([1e3 * s for s in seconds[stages, tokens]]),
        "chunks": chunks,
        "ratio": round(ratio, 4),
        "due": round(due, 4),
        "off": round(ratio / due - 1, 4),
    }


if __name__ == "__main__":
    main()
