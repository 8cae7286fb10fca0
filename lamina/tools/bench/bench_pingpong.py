"""``lamina-launch bench pingpong``: runs ``python -m lamina.netstack bench``."""

from __future__ import annotations

import argparse

# All arguments belong to the other command: this parser knows no flag, not even --help.
PARSER_OPTIONS = {"prefix_chars": "\0", "add_help": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Accept all arguments of ``lamina.netstack.bench``."""
    parser.add_argument("argv", nargs="*")


def run(args: argparse.Namespace) -> int:
    """Run ``lamina.netstack.bench``. Returns its exit status."""
    from lamina.netstack import bench

    return bench.main(args.argv, "lamina-launch bench pingpong")
