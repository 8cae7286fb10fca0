"""Load that two checkouts of Lamina serve, in turns: what the changes between them cost clients or bring them.

Each has a server of its own with the shipped model. ``bench serve`` of this checkout loads one after the other; the
idle server computes nothing. The ratios are of each pair of turns, after / before; CPU seconds are those of the server
and its workers. Prints one JSON line; exit status 1 where requests failed, or the median of the throughput's ratios is
below --least. --write appends the line to perf/results/bench_serve_versions.jsonl.

    git clone . ../lamina-before && git -C ../lamina-before checkout COMMIT  # and build its modules there
    python perf/bench_serve_versions.py --before ../lamina-before --pairs 12 --write
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import commit_of, cpu_pressure, cpu_seconds, line_of, parser_of, record, spread

HERE = Path(__file__).resolve().parents[1]
LAUNCH = [sys.executable, "-m", "lamina.cli.launch"]
FIGURES = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "cpu_s")
START_S = 120.0


@contextmanager
def serving(checkout: Path, flags: list[str]) -> Iterator[tuple[str, int]]:
    """Serve the shipped model from a checkout while the block runs. Yields the server's URL and its process."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [*LAUNCH, "serve", "examples/tiny_lm/model", "--port", "0", "--no-enable-log-requests", *flags]
    process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        line = line_of(process, START_S)
        if " on http" not in line:
            raise SystemExit(f"the server of {checkout} has not started: {line}")
        yield line.rsplit(" on ", 1)[1].strip(), process.pid
    finally:
        process.terminate()
        process.wait(60)


def load(server: tuple[str, int], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the results of one ``bench serve``: equal seeds send equal requests."""
    url, process = server
    before = cpu_seconds(process)
    flags = {
        "--base-url": url, "--num-prompts": args.requests, "--max-concurrency": args.clients, "--seed": seed,
        "--random-input-len": args.input_len, "--random-output-len": args.output_len, "--num-warmups": 1,
    }  # fmt: skip
    command = [*LAUNCH, "bench", "serve", "--json", *(str(word) for pair in flags.items() for word in pair)]
    done = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, text=True, check=True)
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results | {"cpu_s": cpu_seconds(process) - before}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load both servers in turns; which one is first alternates."""
    turns: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    pressure = []
    with ExitStack() as stack:
        checkouts = {"before": args.before.resolve(), "after": HERE}
        servers = {name: stack.enter_context(serving(at, args.flags)) for name, at in checkouts.items()}
        for server in servers.values():
            load(server, args, seed=0)  # warm
        for pair in range(args.pairs):
            for name in sorted(servers, reverse=pair % 2 == 0):
                turns[name].append(load(servers[name], args, seed=1 + pair))
            pressure.append(cpu_pressure())
    pairs = list(zip(turns["before"], turns["after"], strict=True))
    return {
        "before_commit": commit_of(args.before),
        "ratio": {name: spread([after[name] / before[name] for before, after in pairs]) for name in FIGURES},
        **{name: {figure: spread([turn[figure] for turn in turns[name]]) for figure in FIGURES} for name in turns},
        "not_served": {name: sum(turn["refused"] + turn["failed"] for turn in turns[name]) for name in turns},
        "cpu_pressure_avg10": pressure,
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="root of another checkout, its modules built")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--clients", type=int, default=64, help="requests under way")
    parser.add_argument("--requests", type=int, default=512, help="of each turn")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of a reply")
    parser.add_argument("--least", type=float, default=0.98, help="of the throughput's ratio")
    parser.add_argument("flags", nargs="*", default=["--dtype=float32", "--max-num-seqs=64"], help="of serve, after --")
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "before"}
    figures = measure(args)
    print(record("bench_serve_versions", settings, figures, write=args.write))
    held = figures["ratio"]["output_throughput"]["median"] >= args.least and not any(figures["not_served"].values())
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
