"""Decides whether attention of stored tokens needs another kernel for another length of context (0 to 8k, 8k to 32k,
and beyond). The same tokens in all are stored as many short sequences and as few long ones. Each kernel attends them,
in turns of one run. The verdict has two parts: what the best kernel of a band gains over `native`, which serves all,
and how far the rates of `native` lie apart. Both are shares of the plain read of as many bytes. A kernel for a band
could gain at most that much if each were as good as the best. The competitors and their check are those of
bench_attention.py.

Prints a JSON line; --write appends it to perf/results/bench_bands.jsonl.

    python perf/bench_bands.py --threads 2 --write
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch
from bench_attention import CPU, DTYPES, AttentionCompetitor, Problem, check, lamina, read_limit, timed, torch_sdpa
from common import cpu_pressure, parser_of, record

from lamina.ops.attention import get

BANDS = {"0 to 8k": (1024, 4096, 8192), "8k to 32k": (16384, 32768), "beyond": (65536, 131072)}
TOKENS = 131072  # of all sequences together
SHAPE = {"heads": 8, "kv_heads": 2, "head_dim": 128, "rows": 1, "block_size": 32, "grow": 512}
WINS = 1.05  # times as fast, or a band is not worth a kernel of its own


def players_of(problem: Problem) -> dict[str, AttentionCompetitor]:
    """The read limit, and every kernel for CPUs."""
    backends = {name: lamina(problem, get(name, CPU, problem.dtype, problem.kv_dtype)) for name in ("native", "numba")}
    return {"read": read_limit(problem), **backends, "sdpa_folded": torch_sdpa(problem, folded=True)}


def shares(args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Context -> kernel -> its rate over that of the read, both of adjacent turns: the median of rounds."""
    every = dict[int, dict[str, AttentionCompetitor]]()
    for context in (n for band in BANDS.values() for n in band):
        settings = {**vars(args), **SHAPE, "batch": TOKENS // context, "context": context}
        problem = Problem(argparse.Namespace(**settings))
        every[context] = players_of(problem)
        check(problem, every[context])
    times = {context: {name: list[float]() for name in players} for context, players in every.items()}
    for number in range(args.rounds + 1):
        for context, players in every.items():
            for name, player in players.items():
                seconds = timed(player.turn, 0)["attention"]
                if number:  # the first one warms up
                    times[context][name].append(seconds)
    return {context: of_read(each) for context, each in times.items()}


def of_read(times: dict[str, list[float]]) -> dict[str, float]:
    """Returns the share of each kernel but the read."""
    reads = times["read"]
    return {
        name: round(median(r / t for r, t in zip(reads, each, strict=True)), 4)
        for name, each in times.items()
        if name != "read"
    }


def verdict(rates_of: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Returns, by band, the best kernel, and what it and the best conceivable one gain over ``native``."""
    best_native = max(each["native"] for each in rates_of.values())
    bands = {}
    for band, contexts in BANDS.items():
        rates = {name: median(rates_of[n][name] for n in contexts) for name in rates_of[contexts[0]]}
        best = max(rates, key=lambda name: rates[name])
        gain, most = rates[best] / rates["native"], best_native / rates["native"]
        bands[band] = {"best": best, "gain": round(gain, 3), "most": round(most, 3), "worth": gain >= WINS}
    return {"of_read": {str(context): each for context, each in rates_of.items()}, "bands": bands}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of each kernel (1)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of stored K and V (auto)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (15)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pressure = [cpu_pressure()]
    result = verdict(shares(args))
    settings = {k: v for k, v in vars(args).items() if k != "write"} | SHAPE | {"tokens": TOKENS}
    figures = {**result, "cpu_pressure_avg10": [*pressure, cpu_pressure()]}
    print(record("bench_bands", settings, figures, write=args.write))


if __name__ == "__main__":
    main()
