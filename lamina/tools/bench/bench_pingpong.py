"""``lamina-launch bench pingpong``: ``python -m lamina.netstack bench`` under one roof with the others."""

from __future__ import annotations

import argparse

# All that follows is the other command's: no flag is known here, not even --help.
PARSER_OPTIONS = {"prefix_chars": "\0", "add_help": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whatever ``lamina.netstack.bench`` takes."""
    parser.add_argument("argv", nargs="*")


def run(args: argparse.Namespace) -> int:
    """The exit status of the program that plays ping-pong."""
    from lamina.netstack import bench

    return bench.main(args.argv)
