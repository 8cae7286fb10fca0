"""``lamina-launch sessions advise MODEL``: the memory or disk that inactive sessions need, and its cost.

See CachedAttention, sections 2.4, 4.2 and 4.3.6 (arXiv 2403.19708).
"""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple

from lamina.config.option import parse_size
from lamina.facts.report import size_text, table

# Capacity divided by the need of all sessions of an hour -> the share of turns that were hits, in the paper's run
# (figure 23).
PAPER_HITS = {0.1: 0.51, 0.25: 0.98}
MEMORY_HOUR, DISK_HOUR = 0.0088, 0.000082  # the paper's US dollars for an hour of a GB


class SessionMemory(NamedTuple):
    """Bytes. ``session``: CCpS, one at its longest; ``all``: CCpUT, all sessions of an hour. ``advised``: the share of
    these by PAPER_HITS with nearly as many hits.
    """

    session: float
    all: float
    advised: float


def session_memory(kv_bytes_per_token: float, context: int, per_hour: float) -> SessionMemory:
    """Return the memory of sessions. ``context``: most tokens; ``per_hour``: DSpUT, distinct active sessions within an
    hour, the least time that the KV of each is kept.
    """
    session = kv_bytes_per_token * context
    return SessionMemory(session, per_hour * session, max(PAPER_HITS) * per_hour * session)


def stored_cost(memory_bytes: float, disk_bytes: float) -> float:
    """Return the dollars for storage of one hour."""
    return (memory_bytes * MEMORY_HOUR + disk_bytes * DISK_HOUR) / 1e9


def add_arguments(group: Any) -> None:
    """Add the flags of this action."""
    add = group.add_argument
    add("--per-hour", type=float, metavar="N", help="distinct sessions that speak within an hour")
    add("--context", type=int, default=0, metavar="TOKENS", help="of a session at most; 0 = the model's (0)")
    add("--memory", default="", metavar="SIZE", help="host memory for it, before the disk: 128GB")


def run(args: argparse.Namespace) -> int:
    """Run the action. Returns exit status 0. Raises ValueError."""
    from .model_facts import model_facts

    if args.id:
        raise ValueError("sessions advise takes a model and no session_id")
    if args.per_hour is None:
        raise ValueError("sessions advise needs --per-hour: how many distinct sessions speak within an hour")
    if not 0 < args.per_hour < math.inf:
        raise ValueError(f"--per-hour must be above 0, not {args.per_hour:g}")
    facts = model_facts(args.url)
    context = args.context or facts.max_len
    if context <= 0:
        raise ValueError(f"--context must be above 0: {args.url} does not say how many tokens a session has at most")
    demand = session_memory(facts.kv_bytes_per_token, context, args.per_hour)
    memory = parse_size(args.memory, "--memory") if args.memory else 0
    disk = max(0.0, demand.advised - memory)
    rows = [
        ["a session", size_text(demand.session), f"of {context} tokens"],
        ["all of an hour", size_text(demand.all), f"of {args.per_hour:g} sessions: none is lost within an hour"],
    ]
    for share, hits in PAPER_HITS.items():
        what = f"had {hits:.0%} of the hits in CachedAttention's run"
        rows.append([f"{share:.2f} of that", size_text(share * demand.all), what])
    places = f"{size_text(memory)} of memory and {size_text(disk)} of disk" if memory else "on a disk"
    rows.append(["an hour of that", f"${stored_cost(min(memory, demand.advised), disk):.2f}", places])
    print(f"{args.url}: {size_text(facts.kv_bytes_per_token)} of KV a token ({facts.source}); modelled")
    print("\n".join(table(rows, left=(0, 2))))
    return 0
