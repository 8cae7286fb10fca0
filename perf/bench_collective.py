"""The cost of ranks that meet: sums and gathers of the sizes of slices, by ``mesh``, ranks in processes.

A row has microseconds, and GB/s as nccl-tests have them: algbw, the size of the result over the time, and busbw, what
each rank's link carries each way. Every result is compared with a plain sum. With two GPUs, gpu_suite.py has the same
of ``nccl`` (gpu/collective.py).

    python perf/bench_collective.py --write
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from common import BrokenError, cpu_pressure, line_of, parser_of, record
from gpu.collective import LIMIT_S, RUNS, play

from lamina import netstack
from lamina.ops.collective import COLLECTIVES, why_unavailable
from lamina.ops.collective.mesh import connect_mesh
from lamina.workers.staging import open_staging

KEY_BYTES = 32
CPU = torch.device("cpu")


def flags() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes, cores in turns (default: 2)")
    parser.add_argument("--transport", default="shm", help="of the mesh, between processes (default: shm)")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"of each size (default: {RUNS})")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser


def usable() -> list[str]:
    """The collectives that ranks on CPUs have here; stderr says why the others are left out."""
    lacking = {name: why_unavailable(name, CPU) for name in COLLECTIVES}
    for reason in filter(None, lacking.values()):
        print(f"left out: {reason}", file=sys.stderr)
    return [name for name, reason in lacking.items() if not reason]


def rank_process(args: argparse.Namespace) -> None:
    """One rank: says where it listens, hears where all do, and prints what it measured. The key comes by stdin."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[args.rank % len(cores)]})
    torch.set_num_threads(1)
    fabric = netstack.open(args.transport, key=bytes.fromhex(sys.stdin.readline()))
    names = [f"rank {n}" for n in range(args.ranks)]
    listener = fabric.listen(reception=netstack.ListenTerms(name=names[args.rank]))
    print(listener.url, flush=True)
    urls, kinds = json.loads(sys.stdin.readline())
    mesh = connect_mesh(fabric, listener, urls, names, args.rank, start_timeout_s=LIMIT_S, step_timeout_s=LIMIT_S)
    print(json.dumps(play(dict.fromkeys(kinds, mesh), open_staging(CPU), args.runs)), flush=True)
    fabric.close()


def measure(argv: Sequence[str], ranks: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Measures on rank 0. Raises BrokenError where a rank ends without a result; its message is above."""
    command = [sys.executable, str(Path(__file__).resolve()), *argv]
    processes = [
        subprocess.Popen([*command, "--rank", str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for n in range(ranks)
    ]
    try:
        key = os.urandom(KEY_BYTES).hex()
        urls = [_asked(process, key) for process in processes]
        for process in processes:
            _tell(process, json.dumps([urls, list(names)]))
        results = [json.loads(process.communicate(timeout=10 * LIMIT_S)[0] or "{}") for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not all(results):
        raise BrokenError("a rank ended without a result")
    figures: dict[str, dict[str, float]] = results[0]
    return figures


def _asked(process: subprocess.Popen[str], line: str) -> str:
    _tell(process, line)
    try:
        return line_of(process, LIMIT_S)
    except RuntimeError as error:
        raise BrokenError(f"a rank does not listen: {error}") from error


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def main() -> int:
    args = flags().parse_args()
    if args.rank is not None:
        rank_process(args)
        return 0
    if args.ranks < 2:
        print(f"error: --ranks must be 2 or more, not {args.ranks}", file=sys.stderr)
        return 2
    before = cpu_pressure()
    argv = ["--ranks", str(args.ranks), "--transport", args.transport, "--runs", str(args.runs)]
    figures = measure(argv, args.ranks, usable())
    settings = {"ranks": args.ranks, "transport": args.transport, "runs": args.runs}
    record("bench_collective", settings, {"figures": figures, "cpu_pressure": before}, write=args.write)
    for what, row in figures.items():
        print(f"{what:20}" + "  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
