"""``lamina-launch scale URL --memory-workers N``: other numbers of workers for a server that runs."""

from __future__ import annotations

import argparse

from lamina.config.flag_groups import flag_name

from .operator_client import add_server, check_timeout, check_url, request

SIZES = {
    "memory_workers": "memory workers, which share the KV cache and the attention over it",
    "prefill_workers": "workers of their own for prompts; 0 = the compute workers do them",
    "tensor_parallel_size": "compute workers that share the weights of a replica",
    "pipeline": "batches that take turns; n > 2 rotate over n - 1 replicas",
}
LEAST = {"prefill_workers": 0}  # of the others 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    add_server(parser)
    for name, help in SIZES.items():
        parser.add_argument(flag_name(name), type=int, metavar="N", help=f"{help} (default: as many as there are)")
    parser.add_argument(
        "--timeout-s", type=float, default=900.0, help="seconds to wait for the server's answer (default: 900)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be asked for, and exit")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 once the server goes on with these numbers. Raises ValueError, OSError, and WorkerError where it
    does not.
    """
    asked = {name: value for name in SIZES if (value := getattr(args, name)) is not None}
    if not asked:
        raise ValueError(f"nothing is to change: give {', '.join(map(flag_name, SIZES))}")
    for name, number in asked.items():
        if number < (least := LEAST.get(name, 1)):
            raise ValueError(f"{flag_name(name)} must be at least {least}, not {number}")
    check_url(args.url)
    check_timeout(args.timeout_s)
    if args.dry_run:
        print(f"would ask {args.url} for {as_flags(asked)}")
        return 0
    answer = request(args, "/scale", asked, args.timeout_s, "before", "after", "pause_s")
    changed = {name: n for name, n in answer["after"].items() if answer["before"][name] != n}
    before = {name: answer["before"][name] for name in changed}
    if not changed:
        print(f"nothing to do: it has {as_flags(asked)}")
    else:
        print(f"{as_flags(before)} -> {as_flags(changed)}; streams paused for {answer['pause_s']:.2f} s")
    return 0


def as_flags(sizes: dict[str, int | str]) -> str:
    """Return them as flags of ``serve``; a word is the plan by which batches are chosen."""
    return ", ".join(f"{flag_name(name)} {n}" for name, n in sizes.items())
