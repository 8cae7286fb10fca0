"""``lamina-launch sessions advise MODEL``: how much memory or disk its sessions need, and what that costs."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from lamina.config.option import parse_size
from lamina.facts.report import duration_text, size_text, table

if TYPE_CHECKING:
    from .session_memory import SessionMemory, SessionPrices


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
    from .session_memory import session_memory

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
    from .session_memory import SessionPrices

    given = {"gpu": args.gpu_hour, "memory": args.memory_hour, "disk": args.disk_hour}
    return SessionPrices()._replace(**{name: price for name, price in given.items() if price is not None})


def _capacity(args: argparse.Namespace, context: int, demand: SessionMemory) -> list[list[str]]:
    from .session_memory import PAPER_HITS, stored_cost

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

    from .session_memory import computed_cost

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
