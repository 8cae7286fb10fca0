"""``lamina-launch bench serve|decode|pingpong``: measure a server, an engine, a transport."""

from __future__ import annotations

import argparse
from importlib import import_module

# benchmark -> (module, one line for --help)
BENCHMARKS = {
    "serve": ("bench_serve", "latency and throughput of a running server"),
    "pingpong": ("bench_pingpong", "a message between two processes, of one host or of two"),
    "decode": ("bench_decode", "steps of an engine in this process: tokens per second, and where the time goes"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one parser for each benchmark."""
    parser.epilog = "Each has --help and --dry-run."
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, (module, help) in BENCHMARKS.items():
        benchmark = import_module(f"{__name__}.{module}")
        options = getattr(benchmark, "PARSER_OPTIONS", {})
        benchmark.add_arguments(benchmarks.add_parser(name, help=help, description=help, allow_abbrev=False, **options))


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark. Returns its exit status."""
    status: int = import_module(f"{__name__}.{BENCHMARKS[args.benchmark][0]}").run(args)
    return status
