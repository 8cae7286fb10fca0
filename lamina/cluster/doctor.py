"""``lamina-launch doctor``: check what each transport needs of this machine; one line each, with the fix."""

from __future__ import annotations

import argparse
import dataclasses
import json

from lamina.netstack.doctor import CHECKS, Finding, Machine, findings

WORDS = {True: "ok", False: "missing", None: "unknown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transport", action="append", default=[], help="check for this one only; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout")
    parser.add_argument("--dry-run", action="store_true", help="name the checks and run none")


def run(args: argparse.Namespace) -> int:
    """0; with --transport 1 if one of them does not open. ValueError for an unknown one."""
    if args.dry_run:
        print(*(f"{name} ({', '.join(transports)})" for name, transports, _ in CHECKS), sep="\n")
        return 0
    found = findings(Machine(), args.transport)
    if args.json:
        print(json.dumps([dataclasses.asdict(f) for f in found], indent=2))
    else:
        print(*(line(f) for f in found), sep="\n")
        usable = [transport for f in found if f.check == "opens" and f.ok for transport in f.transports]
        print(f"you can use: {', '.join(usable) or 'none of these'}")
    return 1 if args.transport and any(f.check == "opens" and not f.ok for f in found) else 0


def line(finding: Finding) -> str:
    fix = f"; fix: {finding.fix}" if finding.fix and not finding.ok else ""
    return f"{WORDS[finding.ok]:8} {finding.check:24} {', '.join(finding.transports):16} {finding.detail}{fix}"
