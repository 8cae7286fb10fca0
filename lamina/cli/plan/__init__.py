"""``lamina-launch plan MODEL``: which devices to buy for a trace of requests, and whether to split at all."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.cli.flags import check_writable
from lamina.config import OPTIONS
from lamina.facts.hardware import DEVICES, Device, device, read_devices
from lamina.protocol.options.declare import parse_seconds

from .calibrate import calibrated
from .flags import add_arguments

if TYPE_CHECKING:
    from lamina.planner.deployment import Stock
    from lamina.planner.rank import Planner
    from lamina.planner.traces import RequestTrace

__all__ = ["add_arguments", "run"]

_PLANNED = (  # flags of a plan by devices
    "devices", "device_file", "html", "operators", "rate", "slo_tbt", "prices", "link", "baseline", "gigabyte",
    "prompts",
)  # fmt: skip
MOST_DEVICES = 64  # of a kind: so many deployments are ranked in seconds


def run(args: argparse.Namespace) -> int:
    """Exit status 0; raises ValueError for bad input."""
    from lamina.planner.deployment import deployments
    from lamina.planner.page import page
    from lamina.planner.played import full, play, played_text
    from lamina.planner.verdict import best_reachable, decide, decide_played
    from lamina.planner.words import Plan, plan_json, plan_text
    from lamina.progress import progress_bar

    _check(args)
    if args.calibrate:
        return calibrated(args)
    stock, rate = _stock(args), _rate(args.rate)
    planner, trace = _planner(args, stock), _trace(args.trace)
    asked = list(deployments(stock, planner.costs.model))
    if args.dry_run:
        print(f"would rank {len(asked)} deployments of {args.model} on {len(trace.requests)} requests")
        return 0
    ranking = planner.rank(asked, trace)
    if not ranking.points:
        raise ValueError(
            f"--slo-tbt {args.slo_tbt or 'is not given'}: nothing can be ranked; {best_reachable(ranking)}"
        )
    verdict = decide(planner, ranking)
    with progress_bar(sys.stderr.isatty()) as told:
        played = play(planner, ranking, args.rows, args.simulate, rate, told) if args.simulate else []
    if rate is None:
        verdict = decide_played(planner, verdict, full(played))
    plan = Plan(planner, ranking, verdict, played, args.rows, rate)
    if args.html:
        Path(args.html).write_text(page(plan))
    if args.json:
        sys.stdout.write(json.dumps(plan_json(plan), indent=2) + "\n")
    else:
        sys.stdout.write(plan_text(plan) + played_text(played, rate))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for flags that no plan can have, and for those that do not go together."""
    for name in ("rows", "max_num_seqs", "simulate"):
        if getattr(args, name) < (name == "rows"):
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least {int(name == 'rows')}, not {getattr(args, name)}"
            )
    OPTIONS["dtype"].check(args.dtype)
    check_writable(args.html, "--html")
    if args.calibrate:
        add_arguments(unset := argparse.ArgumentParser())
        for name in _PLANNED:
            if getattr(args, name) != unset.get_default(name):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{flag} does not go with --calibrate, which fits a run and predicts others: leave it out"
                )
        return
    for name in ("trace", "devices"):
        if not getattr(args, name):
            raise ValueError(f"--{name} is missing: a plan needs --trace and --devices, or --calibrate")
    if args.predict:
        raise ValueError("--predict goes with --calibrate RUN, whose tables it is by")


def _planner(args: argparse.Namespace, stock: Mapping[str, Stock]) -> Planner:
    from lamina.planner import tables
    from lamina.planner.cost import CostModel
    from lamina.planner.deployment import UNITS, DeviceMemory
    from lamina.planner.model_facts import model_facts
    from lamina.planner.operators import OperatorTables
    from lamina.planner.rank import Planner
    from lamina.planner.replay import CHUNK

    if args.gigabyte not in UNITS:
        raise ValueError(f"--gigabyte {args.gigabyte} is not one of {', '.join(UNITS)}")
    if args.prompts not in ("elsewhere", "here"):
        raise ValueError(f"--prompts {args.prompts} is not one of elsewhere, here")
    constants, prices = tables.constants(), tables.price_book(args.prices)
    for each in stock.values():
        prices.hour(each.device)
    link, baseline, slo = (
        tables.link(args.link),
        tables.baseline(args.baseline),
        parse_seconds(args.slo_tbt, "--slo-tbt"),
    )
    operators = OperatorTables([Path(args.operators)] if args.operators else [])
    if args.operators:
        operators.check_devices(list(stock), f"--operators {args.operators}")
    facts = model_facts(args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    costs = CostModel(facts, constants, link, baseline, operators)
    return Planner(
        costs,
        DeviceMemory(constants, args.gigabyte),
        prices,
        slo,
        args.max_num_seqs,
        CHUNK if args.prompts == "here" else 0,
    )


def _trace(path: str) -> RequestTrace:
    from lamina.planner.traces import read_trace

    return read_trace(path)


def _stock(args: argparse.Namespace) -> dict[str, Stock]:
    from lamina.planner.deployment import Stock

    known: dict[str, Device] = dict(DEVICES)
    if args.device_file:
        known |= read_devices(Path(args.device_file))
    stock: dict[str, Stock] = {}
    for pair in args.devices.split(","):
        name, _, count = pair.strip().partition(":")
        if not count.isdecimal() or not 1 <= int(count) <= MOST_DEVICES:
            raise ValueError(
                f"--devices {pair.strip()!r} is not a name and a number up to {MOST_DEVICES}, such as h100:8"
            )
        try:
            each = device(name, "--devices", known)
        except ValueError as error:
            raise ValueError(f"{error}; --device-file FILE adds others") from None
        if each.name in stock:
            raise ValueError(f"--devices has {each.name} twice: add up the numbers")
        stock[each.name] = Stock(each, int(count))
    return stock


def _rate(text: str) -> float | None:
    """Requests per second; 0 = as they came, None = as soon as there is room."""
    if text in ("", "trace"):
        return 0.0 if text else None
    value = float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"--rate {text} is neither a number of requests a second above 0 nor the word trace")
    return value
