"""``lamina-launch plan pipeline``: the rotation of n batches over n - 1 replicas, for given times."""

from __future__ import annotations

import argparse
import dataclasses
import json

from lamina.facts.report import count_text
from lamina.scheduler.rotation.pipeline import PipelinePlan, num_replicas, rotation

WIDTH = 96  # characters of the picture


MOST_TURNS = 200_000  # seconds of planning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags. Times are in any one unit; a single value holds for all slices."""
    parser.add_argument("--n", type=int, required=True, help="concurrent batches")
    parser.add_argument("--tm", required=True, metavar="T[,T...]", help="time of a slice, or one for each slice")
    parser.add_argument("--ta", required=True, metavar="T[,T...]", help="time of an attention, or one for each slice")
    parser.add_argument("--slices", type=int, help="slices of a token (attention operators of the model)")
    parser.add_argument("--tokens", type=int, default=2, help="tokens of each batch (default: 2)")
    parser.add_argument("--network", type=float, default=0.0, help="unhidden network time of a turn (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check the input, print what would be planned, and exit")


def run(args: argparse.Namespace) -> int:
    """Print the plan as a picture and a summary, or as JSON."""
    tm, ta = _times("--tm", args.tm), _times("--ta", args.ta)
    slices = args.slices if args.slices is not None else max(len(tm), len(ta))
    if slices < 1:
        raise ValueError(f"--slices must be at least 1, not {slices}")
    if args.n * slices * args.tokens > MOST_TURNS:
        raise ValueError(
            f"--n {args.n} batches of {args.tokens} tokens and {slices} slices are more than {MOST_TURNS} turns: lower "
            f"--n, --tokens or --slices"
        )
    if args.dry_run:
        rotation(args.n, _each("--tm", tm, slices), _each("--ta", ta, slices), 1, args.network)
        batches, replicas = count_text(args.n, "batch", "batches"), count_text(num_replicas(args.n), "replica")
        print(f"would plan {count_text(args.tokens, 'token')} of {batches} over {replicas}")
        return 0
    plan = rotation(args.n, _each("--tm", tm, slices), _each("--ta", ta, slices), args.tokens, args.network)
    print(json.dumps(dataclasses.asdict(plan)) if args.json else render(plan))
    return 0


def render(plan: PipelinePlan) -> str:
    """Return one line for each replica and one for the memory pool; a digit or letter is the batch that is served."""
    scale = WIDTH / plan.makespan
    lanes = {f"replica {r}": [" "] * WIDTH for r in range(1, num_replicas(plan.n) + 1)}
    lanes["memory"] = [" "] * WIDTH
    for e in plan.events:
        for lane, start, end in (
            (f"replica {e.replica}", e.start, e.end),
            ("memory", e.attention_start, e.attention_end),
        ):
            for at in range(round(start * scale), min(WIDTH, round(end * scale))):
                lanes[lane][at] = "0123456789abcdefghijklmnopqrstuvwxyz"[e.batch % 36]
    busy = ", ".join(f"{pool} {share:.0%}" for pool, share in plan.utilisation.items())
    return "\n".join(
        [
            *(f"{name:>10} |{''.join(cells)}|" for name, cells in lanes.items()),
            f"makespan {plan.makespan:g}, lower bound {plan.lower_bound:g} ({plan.makespan / plan.lower_bound:.2f}x)",
            f"busy{f' once all {plan.n} batches are under way' if plan.n > 1 else ''}: {busy}",
        ]
    )


def _times(flag: str, text: str) -> list[float]:
    try:
        return [float(t) for t in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} must be a number, or numbers by comma, not {text!r}") from None


def _each(flag: str, values: list[float], slices: int) -> list[float]:
    if len(values) not in (1, slices):
        raise ValueError(f"{flag} has {len(values)} times for --slices {slices}: give one, or one for each slice")
    return values * slices if len(values) == 1 else values
