"""``lamina-launch ledger serve|show``: the loans between deployments."""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from lamina.executor.lending.ledger_service import LedgerService
from lamina.executor.lending.lending_listener import LEDGER_NAME, key_of, open_link, parse_address
from lamina.lending.lending_messages import DebtsReply, DebtsRequest, FromLedger, LenderRow
from lamina.protocol.control import LinkClosedError
from lamina.utils.log_limit import limit_repeats

SHOW_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    parser.add_argument(
        "order", choices=("serve", "show", "drill"), metavar="serve|show",
        help="serve: run the ledger; show: print the loans that it knows",
    )  # fmt: skip
    parser.add_argument("place", metavar="HOST:PORT", help="address of the ledger; serve: port 0 = any free one")
    parser.add_argument(
        "--silent-s",
        type=float,
        default=5.0,
        help="serve: seconds without a heartbeat after which an instance counts as dead (5)",
    )
    parser.add_argument("--dry-run", action="store_true", help="check the flags, say what would be done, and exit")
    parser.add_argument("--json", action="store_true", help="show: as JSON")


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises ValueError for bad input, and OSError where the ledger cannot listen or does not answer."""
    if args.order == "drill":
        raise ValueError("ledger drill is no command any more: run `python tests/support/lending_drill.py MODEL`")
    if not 0.5 <= args.silent_s <= 3600.0:
        raise ValueError(f"--silent-s must be 0.5 to 3600 seconds, not {args.silent_s:g}")
    place, key = parse_address(args.place, "HOST:PORT"), key_of("the ledger")
    if args.dry_run:
        print(f"would {args.order} the ledger at {args.place}")
        return 0
    return _serve(place, key, args.silent_s) if args.order == "serve" else _show(place, key, args.json)


def _serve(place: tuple[str, int], key: bytes, silent_s: float) -> int:
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    limit_repeats()
    service = LedgerService(place, key, silent_s)
    try:
        print(f"the ledger is at {service.address}", flush=True)
        service.serve(threading.Event())
    finally:
        service.close()
    return 0


def _show(place: tuple[str, int], key: bytes, as_json: bool) -> int:
    link = open_link(place, key, FromLedger, name=f"show-{secrets.token_hex(4)}", peer=LEDGER_NAME, what="ledger")
    try:
        link.send(DebtsRequest())
        answer = link.recv(SHOW_S)
        assert isinstance(answer, DebtsReply)
        print(json.dumps(ledger_json(answer)) if as_json else ledger_table(answer))
        return 0
    except (TimeoutError, LinkClosedError) as error:
        raise OSError(f"the ledger has gone: {error}") from None
    finally:
        link.close()


def ledger_json(reply: DebtsReply) -> dict[str, Any]:
    """Blocks of 1 MiB."""
    return {
        "creditors": [
            {
                "name": row.name,
                "place": row.place,
                "address": row.address,
                "free": row.free,
                "lent": row.num_lent,
                "cap": row.cap,
                "debtors": {d.debtor: d.blocks for d in row.lent},
                "refusing": row.refusing,
                "silent_s": row.silent_s,
            }
            for row in reply.lenders
        ],
        "remote_share": remote_share(reply.lenders),
        "cycles": [{"members": list(c.members), "blocks": c.blocks} for c in reply.cycles],
    }


def remote_share(rows: Sequence[LenderRow]) -> float:
    """Return the part that is lent, of all that could be."""
    cap = sum(row.cap for row in rows)
    return round(sum(row.num_lent for row in rows) / cap, 4) if cap else 0.0


def ledger_table(reply: DebtsReply) -> str:
    """Return the ledger as a table for people, in MiB."""
    lines = [f"{'creditor':40} {'free':>8} {'lent':>8} {'cap':>8}  debtors"]
    for row in reply.lenders:
        debtors = ", ".join(f"{d.debtor} {d.blocks}" for d in row.lent) or "-"
        state = " (refuses until its next heartbeat)" if row.refusing else ""
        lines.append(f"{row.name:40} {row.free:8} {row.num_lent:8} {row.cap:8}  {debtors}{state}")
    lines.append(f"{remote_share(reply.lenders):.0%} of what could be lent is lent")
    lines += [f"cycle of {c.blocks} MiB: {' -> '.join([*c.members, c.members[0]])}" for c in reply.cycles]
    return "\n".join(lines)
