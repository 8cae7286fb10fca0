"""``lamina-launch cordon URL --memory-worker I``: no new sequence begins on that memory worker of a running server."""

from __future__ import annotations

import argparse

from .operator_client import add_server, check_url, check_worker, request

ASK_S = 30.0  # for its answer, between two steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    add_server(parser)
    parser.add_argument(
        "--memory-worker", type=int, metavar="I", required=True, help="the memory worker's number, from 0"
    )
    parser.add_argument("--undo", action="store_true", help="let sequences begin on it again")
    parser.add_argument("--dry-run", action="store_true", help="say what would be asked for, and exit")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 once it is so. Raises as ``request``."""
    worker = args.memory_worker
    check_worker(worker)
    check_url(args.url)
    if args.dry_run:
        begin = "let sequences begin again" if args.undo else "have no new sequence begin"
        print(f"would {begin} on memory worker {worker} of {args.url}")
        return 0
    left = request(args, "/cordon", {"memory_worker": worker, "on": not args.undo}, ASK_S, "cordoned")["cordoned"]
    where = f"no new sequence begins on memory worker {', '.join(map(str, left))}" if left else ""
    print(where or "sequences begin on all memory workers")
    return 0
