"""``lamina-launch sessions advise MODEL``: the memory or disk that inactive sessions need, and its cost compared with
computing them again (CachedAttention, arXiv 2403.19708, sections 2.4, 3.2 and 4.3.6).
"""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple

from lamina.config.option import parse_size
from lamina.facts.report import duration_text, size_text, table

HOUR_S = 3600.0
# Capacity divided by the need of all sessions of an hour -> the share of turns that were hits, in the paper's run
# (figure 23).
PAPER_HITS = {0.1: 0.51, 0.25: 0.98}


class SessionPrices(NamedTuple):
    """US dollars for an hour: of a GPU, of a GB of memory, of a GB of disk. Those of the paper (section 4.2)."""

    gpu: float = 5.0
    memory: float = 0.0088
    disk: float = 0.000082


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


def stored_cost(memory_bytes: float, disk_bytes: float, prices: SessionPrices) -> float:
    """Return the dollars for storage of one hour."""
    return (memory_bytes * prices.memory + disk_bytes * prices.disk) / 1e9


def computed_cost(tokens: float, tokens_per_s: float, prices: SessionPrices) -> float:
    """Return the dollars for computing so many tokens again, if a GPU computes ``tokens_per_s`` of a prompt."""
    return tokens / tokens_per_s / HOUR_S * prices.gpu


def add_arguments(group: Any) -> None:
    """Add the flags of this action."""
    add = group.add_argument
    add("--per-hour", type=float, metavar="N", help="distinct sessions that speak within an hour")
    add("--turns", type=float, metavar="N", help="turns within an hour, to show what computing them again costs")
    add("--context", type=int, default=0, metavar="TOKENS", help="of a session at most; 0 = the model's (0)")
    add("--new", type=int, default=100, metavar="TOKENS", help="that a turn adds (100)")
    add("--prefill-rate", type=float, metavar="TOKENS", help="of a prompt that a GPU computes in a second")
    add("--load-rate", default="", metavar="BYTES", help="from host memory in a second, such as 26GB")
    add("--memory", default="", metavar="SIZE", help="host memory for it, before the disk: 128GB")
    add("--gpu-hour", type=float, metavar="USD", help="of a GPU (5)")
    add("--memory-hour", type=float, metavar="USD", help="of a GB of host memory (0.0088)")
    add("--disk-hour", type=float, metavar="USD", help="of a GB of disk (0.000082)")


def run(args: argparse.Namespace) -> int:
    """Run the action. Returns exit status 0. Raises ValueError."""
    from .model_facts import model_facts

    if args.id:
        raise ValueError("sessions advise takes a model and no session_id")
    if args.per_hour is None:
        raise ValueError("sessions advise needs --per-hour: how many distinct sessions speak within an hour")
    for name in ("per_hour", "turns", "prefill_rate", "gpu_hour", "memory_hour", "disk_hour", "new"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
    facts = model_facts(args.url)
    context = args.context or facts.max_len
    if context <= 0:
        raise ValueError(f"--context must be above 0: {args.url} does not say how many tokens a session has at most")
    demand = session_memory(facts.kv_bytes_per_token, context, args.per_hour)
    rows = _capacity(args, context, demand)
    if args.prefill_rate is None:
        rows.append(["give --prefill-rate", "", "to see what computing it again takes"])
    else:
        rows += _again(args, context, demand)
    print(f"{args.url}: {size_text(facts.kv_bytes_per_token)} of KV a token ({facts.source}); modelled")
    print("\n".join(table(rows, left=(0, 2))))
    return 0


def prices_of(args: argparse.Namespace) -> SessionPrices:
    """Return the paper's prices, replaced by those that are given."""
    given = {"gpu": args.gpu_hour, "memory": args.memory_hour, "disk": args.disk_hour}
    return SessionPrices()._replace(**{name: price for name, price in given.items() if price is not None})


def _capacity(args: argparse.Namespace, context: int, demand: SessionMemory) -> list[list[str]]:
    memory = parse_size(args.memory, "--memory") if args.memory else 0
    prices = prices_of(args)
    disk = max(0.0, demand.advised - memory)
    cost = stored_cost(min(memory, demand.advised), disk, prices)
    places = f"{size_text(memory)} of memory and {size_text(disk)} of disk" if memory else "on a disk"
    return [
        ["a session", size_text(demand.session), f"of {context} tokens"],
        ["all of an hour", size_text(demand.all), f"of {args.per_hour:g} sessions: none is lost within an hour"],
        *(
            [
                f"{share:.2f} of that",
                size_text(share * demand.all),
                f"had {hits:.0%} of the hits in CachedAttention's run",
            ]
            for share, hits in PAPER_HITS.items()
        ),
        ["an hour of that", f"${cost:.2f}", places],
    ]


def _again(args: argparse.Namespace, context: int, demand: SessionMemory) -> list[list[str]]:
    """Return rows on the cost of computing a session again at its longest."""
    from lamina.kv.layerwise_load import buffer_bytes

    prices, rows = prices_of(args), list[list[str]]()
    rows.append(["computed again", duration_text(context / args.prefill_rate), f"of a GPU for {context} tokens"])
    if args.turns is not None:
        cost = computed_cost(args.turns * context / 2, args.prefill_rate, prices)
        rows.append(["an hour of that", f"${cost:.2f}", f"for {args.turns:g} turns, half of the context after each"])
    if args.load_rate:
        rate = parse_size(args.load_rate, "--load-rate")
        load_s, prefill_s = demand.session / rate, args.new / args.prefill_rate
        first = buffer_bytes(rate, load_s, prefill_s)
        rows.append(["loaded", duration_text(load_s), f"at {size_text(rate)} a second"])
        rows.append(["ahead of a turn", size_text(first), f"so that {args.new} new tokens hide the rest of the load"])
    return rows
