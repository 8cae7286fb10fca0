"""``lamina-launch lend``: lend this host's memory to engines elsewhere, by the ledger."""

from __future__ import annotations

import argparse
import logging
import math
import secrets
import socket
import threading

from lamina.config.option import parse_size
from lamina.executor.lending.lender_service import BLOCK_BYTES, LenderService
from lamina.executor.lending.lending_listener import key_of, parse_address
from lamina.facts.host_memory import free_bytes
from lamina.lending.creditor import LendingTerms
from lamina.utils.log_limit import limit_repeats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    add = parser.add_argument
    add("--ledger", required=True, metavar="HOST:PORT", help="address of `lamina-launch ledger serve`")
    add("--lend", type=float, default=0.5, metavar="FRACTION", help="share of the memory that is free here now (0.5)")
    add("--lend-memory", default="", metavar="SIZE", help="memory to lend, instead of a share, such as 16GiB")
    add("--debtor-cap", default="", metavar="SIZE", help="the most for one debtor (all that is lent)")
    add(
        "--address",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="address to which debtors connect; port 0 = any free one (127.0.0.1:0)",
    )
    add(
        "--place",
        default="",
        help="place of this host, such as zone/rack/host, so that the nearest lend first (its name)",
    )
    add("--lease-s", type=float, default=10.0, metavar="S", help="seconds until a lease ends that is not renewed (10)")
    add("--threads", type=int, default=0, metavar="N", help="threads of each guest's attention; 0 = all cores (0)")
    add(
        "--lend-cores",
        type=float,
        default=math.inf,
        metavar="N",
        help="make no new loan while guests use more cores (no limit)",
    )
    add("--lend-gbps", type=float, default=math.inf, metavar="N",
        help="make no new loan while guests read more gigabits of K and V per second (no limit)")  # fmt: skip
    add("--dry-run", action="store_true", help="check the flags, say what would be lent, and exit")


def run(args: argparse.Namespace) -> int:
    """Exit status 0; raises ValueError for bad input, OSError where there is no ledger."""
    if not 0.0 < args.lend <= 1.0:
        raise ValueError(f"--lend must be above 0 and at most 1, the part of free memory, not {args.lend:g}")
    if not 1.0 <= args.lease_s <= 3600.0:
        raise ValueError(f"--lease-s must be 1 to 3600 seconds, not {args.lease_s:g}")
    if not 0 <= args.threads <= 1024:
        raise ValueError(f"--threads must be 0 to 1024, not {args.threads}")
    for name, value in (("--lend-cores", args.lend_cores), ("--lend-gbps", args.lend_gbps)):
        if not value > 0.0:
            raise ValueError(f"{name} must be above 0, not {value:g}")
    free = free_bytes()
    nbytes = parse_size(args.lend_memory, "--lend-memory") if args.lend_memory else int(args.lend * free)
    if nbytes > free:
        raise ValueError(f"--lend-memory {args.lend_memory}: {free} bytes are free here")
    blocks = nbytes // BLOCK_BYTES
    if not blocks:
        raise ValueError(f"nothing is lent: {nbytes} bytes are less than a block of {BLOCK_BYTES}")
    cap = parse_size(args.debtor_cap, "--debtor-cap") // BLOCK_BYTES if args.debtor_cap else blocks
    ledger, at = parse_address(args.ledger, "--ledger"), parse_address(args.address, "--address")
    key, host = key_of("lending"), socket.gethostname()
    if args.dry_run:
        print(f"would lend {blocks} MiB, {min(cap, blocks)} MiB to one debtor, by the ledger at {args.ledger}")
        return 0
    terms = LendingTerms(blocks, min(cap, blocks), args.lease_s, location=args.place or host)
    name = f"lend-{host[:24]}-{secrets.token_hex(4)}"
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    limit_repeats()
    budget = {"most_cores": args.lend_cores, "most_gbps": args.lend_gbps}
    service = LenderService(at, ledger, key, name, blocks, terms, threads=args.threads, **budget)
    try:
        print(f"{name} lends {blocks} MiB at {service.address}", flush=True)
        service.serve(threading.Event())
    finally:
        service.close()
    return 0
