"""``lamina-launch drain URL``: a server that runs takes nothing new, and what is under way ends."""

from __future__ import annotations

import argparse
import time

from .operators import add_server, ask, check_url
from .words import counted

ASK_S = 10.0  # for one answer
LOOK_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    add_server(parser)
    parser.add_argument("--undo", action="store_true", help="take new requests again")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=300.0,
        help="seconds to wait for what is under way; 0 = do not (default: 300)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be asked for, and exit")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 once nothing is under way, or where that is not waited for; 1 where something still is. Raises as
    ``ask``.
    """
    check_url(args.url)
    if args.dry_run:
        print(f"would have {args.url} {'take new requests again' if args.undo else 'take no new requests'}")
        return 0
    deadline = time.monotonic() + args.timeout_s
    left = ask(args, "/drain", {"on": not args.undo}, ASK_S)["completions"]
    if args.undo:
        print("it takes new requests again")
        return 0
    while left and time.monotonic() < deadline:
        time.sleep(min(LOOK_S, max(0.0, deadline - time.monotonic())))
        left = ask(args, "/drain", {"on": True}, ASK_S)["completions"]
    print(f"it takes no new requests; {counted(left, 'completion')} under way")
    return int(bool(left) and args.timeout_s > 0)
