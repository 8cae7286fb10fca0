"""``lamina-launch drain URL``: a server that runs takes nothing new, and what is under way ends. With
``--memory-worker I`` that worker alone gives its KV to the others and ends, with ``--host ADDRESS`` all those of a host
do, and streams go on.
"""

from __future__ import annotations

import argparse
import time

from lamina.config.conflicts import check_together
from lamina.facts.report import count_text

from .operator_client import add_server, check_timeout, check_url, check_worker, request

ASK_S = 10.0  # for one answer
LOOK_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    add_server(parser)
    parser.add_argument(
        "--memory-worker",
        type=int,
        metavar="I",
        help="this memory worker alone gives its KV to the others, and ends; the server continues to accept requests",
    )
    parser.add_argument(
        "--host", metavar="ADDRESS", help="the same for all memory workers of that host, so that it can be removed"
    )
    parser.add_argument("--undo", action="store_true", help="accept new requests again")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=300.0,
        help="seconds to wait until running requests have finished; 0 = do not wait (default: 300)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be asked for, and exit")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 once nothing is under way, or where that is not waited for; 1 where something still is. Raises as
    ``request``.
    """
    check_url(args.url)
    check_timeout(args.timeout_s, none=True)
    check_worker(args.memory_worker or 0)
    given = {"drain --memory-worker": args.memory_worker is not None, "drain --host": args.host is not None}
    check_together({name for name, is_given in {**given, "drain --undo": args.undo}.items() if is_given})
    if args.memory_worker is not None or args.host is not None:
        return _dismiss(args)
    if args.dry_run:
        print(f"would have {args.url} {'accept new requests again' if args.undo else 'refuse new requests'}")
        return 0
    deadline = time.monotonic() + args.timeout_s
    left = request(args, "/drain", {"on": not args.undo}, ASK_S, "completions")["completions"]
    if args.undo:
        print("it takes new requests again")
        return 0
    while left and time.monotonic() < deadline:
        time.sleep(min(LOOK_S, max(0.0, deadline - time.monotonic())))
        left = request(args, "/drain", {"on": True}, ASK_S, "completions")["completions"]
    print(f"it takes no new requests; {count_text(left, 'completion')} under way")
    return int(bool(left) and args.timeout_s > 0)


def _dismiss(args: argparse.Namespace) -> int:
    worker, host = args.memory_worker, args.host
    who = f"memory worker {worker}" if host is None else f"the memory workers on {host}"
    if args.dry_run:
        print(f"would have {who} of {args.url} give KV to the others, and end")
        return 0
    body = {"memory_worker": worker} if host is None else {"host": host}
    answer = request(args, "/drain", body, args.timeout_s or ASK_S, "memory_workers", "pause_s")
    left, pause_s = answer["memory_workers"], answer["pause_s"]
    print(f"{who} {'has' if host is None else 'have'} gone, {left} left; streams paused for {pause_s:.2f} s")
    return 0
