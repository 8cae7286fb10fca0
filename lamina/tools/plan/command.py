"""``lamina-launch plan MODEL``: ranks devices for a trace of requests, and decides whether to split at all."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.cli.common.flags import check_at_least
from lamina.config.conflicts import check_together
from lamina.config.engine_config import ModelOptions
from lamina.config.flat_options import OPTIONS
from lamina.config.option import parse_seconds
from lamina.facts.hardware import DEVICES, Device, device, read_devices

from .calibrate_command import calibrated
from .plan_flags import add_arguments

if TYPE_CHECKING:
    from lamina.tools.request_traces import RequestTrace

    from .deployment import Inventory
    from .ranking import Planner

__all__ = ["add_arguments", "run"]

MOST_DEVICES = 64  # of a kind: so many deployments are ranked in seconds
MOST_PLAYED = 1000  # requests, unless --simulate says more


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns exit status 0; raises ValueError for bad input."""
    from lamina.utils.progress import progress_bar

    from .deployment import deployments
    from .plan_report import Plan, plan_json, plan_text
    from .simulated import filled_rows, simulate_rows, simulated_text
    from .verdict import best_reachable, decide_by_simulation, decide_split

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
    verdict = decide_split(planner, ranking)
    with progress_bar(sys.stderr.isatty()) as on_progress:
        requests = min(len(ranking.trace.requests), MOST_PLAYED) if args.simulate is None else args.simulate
        played = simulate_rows(planner, ranking, args.rows, requests, rate, on_progress) if requests else []
    if rate is None:
        verdict = decide_by_simulation(planner, verdict, filled_rows(played))
    plan = Plan(planner, ranking, verdict, played, args.rows, rate)
    if args.json:
        sys.stdout.write(json.dumps(plan_json(plan), indent=2) + "\n")
    else:
        sys.stdout.write(plan_text(plan) + simulated_text(played, rate))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for bad values of flags, and for flags that do not go together."""
    check_at_least(args, 1, "rows")
    check_at_least(args, 0, "max_num_seqs", *(["simulate"] if args.simulate is not None else []))
    OPTIONS["dtype"].check(args.dtype)
    add_arguments(unset := argparse.ArgumentParser())
    check_together(
        {
            f"plan --{name.replace('_', '-')}"
            for name, value in vars(args).items()
            if value and value != unset.get_default(name)
        }
    )
    if args.calibrate:
        return
    for name in ("trace", "devices"):
        if not getattr(args, name):
            raise ValueError(f"--{name} is missing: a plan needs --trace and --devices, or --calibrate")


def _planner(args: argparse.Namespace, stock: Mapping[str, Inventory]) -> Planner:
    from . import tables
    from .cost_model import CostModel
    from .deployment import UNITS, DeviceMemory
    from .model_facts import model_facts
    from .operators import OperatorTables
    from .ranking import Planner
    from .replay import CHUNK

    if args.gigabyte not in UNITS:
        raise ValueError(f"--gigabyte {args.gigabyte} is not one of {', '.join(UNITS)}")
    if args.prompts not in ("elsewhere", "here"):
        raise ValueError(f"--prompts {args.prompts} is not one of elsewhere, here")
    constants, prices = tables.constants(), tables.price_book(args.prices)
    for each in stock.values():
        prices.hour(each.device)
    link, baseline, slo = (
        tables.network_link(args.link),
        tables.baseline(args.baseline),
        parse_seconds(args.slo_tbt, "--slo-tbt"),
    )
    operators = OperatorTables([Path(args.operators)] if args.operators else [])
    if args.operators:
        operators.check_devices(list(stock), f"--operators {args.operators}")
    on_cpus = all(each.device.is_cpu for each in stock.values())
    if args.quantization and not on_cpus:
        raise ValueError(f"--quantization {args.quantization} is for devices with `cpu = true`: leave it out on GPUs")
    facts = model_facts(
        args.model,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        packed=on_cpus,
        quantization=ModelOptions(quantization=args.quantization).quantization,
    )
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
    from lamina.tools.request_traces import read_trace

    return read_trace(path)


def _stock(args: argparse.Namespace) -> dict[str, Inventory]:
    from .deployment import Inventory

    known: dict[str, Device] = dict(DEVICES)
    if args.device_file:
        known |= read_devices(Path(args.device_file))
    stock: dict[str, Inventory] = {}
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
        stock[each.name] = Inventory(each, int(count))
    return stock


def _rate(text: str) -> float | None:
    """Return requests per second; 0 = as they came, None = as soon as they fit."""
    if text in ("", "trace"):
        return 0.0 if text else None
    value = float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"--rate {text} is neither a number of requests a second above 0 nor the word trace")
    return value
