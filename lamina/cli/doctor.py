"""``lamina-launch doctor``: check what each transport needs of this machine; each with its fix."""

from __future__ import annotations

import argparse
import dataclasses
import json
from textwrap import wrap

from lamina.netstack.contract.base import rdma_device
from lamina.netstack.doctor import CHECKS, Finding, Machine, findings

COLUMNS, INDENT = 100, 38
WORDS = {True: "ok", False: "missing", None: "unknown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "check for this one only; may be repeated (default: all)"
    parser.add_argument("--transport", action="append", default=[], help=text)
    parser.add_argument(
        "--rdma-device", default="", metavar="NAME", help="as of `serve`; default: LAMINA_RDMA_DEVICE, else the nearest"
    )
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout")
    parser.add_argument("--dry-run", action="store_true", help="name the checks and run none")


def run(args: argparse.Namespace) -> int:
    """0; with --transport 1 if one of them does not open. ValueError for an unknown one."""
    if args.dry_run:
        print(*(f"{name} ({', '.join(transports)})" for name, transports, _ in CHECKS), sep="\n")
        return 0
    report = findings(Machine(wanted=rdma_device(args.rdma_device)), args.transport)
    if args.json:
        print(json.dumps([dataclasses.asdict(f) for f in report], indent=2))
    else:
        usable = [transport for f in report if f.check == "opens" and f.ok for transport in f.transports]
        print(f"you can use: {', '.join(usable) or 'none of these'}")
        print(*(lines(f) for f in report), sep="\n")
    return 1 if args.transport and any(f.check == "opens" and not f.ok for f in report) else 0


def lines(finding: Finding) -> str:
    """Return a table for a terminal of COLUMNS: what was found, and the fix below it, wrap in the last column."""
    entries = [f"{', '.join(finding.transports)}: {finding.detail}"]
    if finding.fix and not finding.ok:
        entries.append(f"fix: {finding.fix}")
    head, width = f"{WORDS[finding.ok]:8} {finding.check:28} ", COLUMNS - INDENT
    last = [x for text in entries for x in wrap(text, width, break_long_words=False, break_on_hyphens=False)]
    return head + f"\n{' ' * INDENT}".join(last)
