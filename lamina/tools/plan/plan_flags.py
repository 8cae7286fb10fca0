"""The flags of ``lamina-launch plan``."""

from __future__ import annotations

import argparse

from lamina.config.engine_config import DTYPES
from lamina.facts.hardware import DEVICES
from lamina.tools.request_traces import TRACE_HELP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, grouped by subject."""
    parser.add_argument(
        "model", help="a directory, a hub id or a configuration file; or llama-33b, llama-65b, llama3-70b"
    )
    _add_wanted(parser)
    _add_facts(parser)
    _add_played(parser)
    _add_recorded(parser)
    parser.add_argument("--rows", type=int, default=5, metavar="N", help="deployments to show (5)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would be planned")


def _add_wanted(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is wanted").add_argument
    add("--trace", metavar="FILE", help=TRACE_HELP)
    add(
        "--devices", metavar="NAME:N,...",
        help=f"what can be had, such as h100:8,h20:16: {', '.join(DEVICES)}",
    )  # fmt: skip
    add("--slo-tbt", default="", metavar="TIME", help="mean time between two tokens, at most: 100ms")
    add("--max-num-seqs", type=int, default=0, metavar="N", help="sequences at once; 0 = as many as fit (0)")
    add(
        "--prompts", default="elsewhere", metavar="PLACE",
        help="where prompts are computed: elsewhere, at no price, or here, next to the rows that decode (elsewhere)",
    )  # fmt: skip


def _add_facts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is known").add_argument
    add("--prices", default="paper", metavar="BOOK", help="paper, or a TOML file of your own (paper)")
    add("--link", default="400Gbps", metavar="RATE", help="of a network card: 400Gbps, 50GB/s, 400Gbps:nccl (400Gbps)")
    add(
        "--baseline", default="ideal", metavar="NAME",
        help="homogeneous engines: ideal, or calibrated, as slow as the paper's seem (ideal)",
    )  # fmt: skip
    add("--gigabyte", default="GiB", metavar="UNIT", help="what GB is on sheets of memory: GiB or GB (GiB)")
    add("--device-file", metavar="FILE", help="more devices, or others of a name, as in lamina/facts/data")
    add("--operators", metavar="FILE", help="operators that you have measured, as in lamina/tools/plan/data")
    add("--dtype", default="auto", help=f"{', '.join(DTYPES)}; auto is the configuration's (auto)")
    add("--quantization", default="", help="int8 or int4: weights as a start on CPUs would round them")
    add("--trust-remote-code", action="store_true", help="run Python code that ships with the model")


def _add_played(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is played").add_argument
    add(
        "--simulate", type=int, default=None, metavar="N",
        help="play N requests on the rows shown, by the engine's own scheduler, those of the trace again and again; "
        "0 = none (those of the trace, 1000 at most)",
    )  # fmt: skip
    add(
        "--rate", default="", metavar="N",
        help="play so many requests a second, or `trace`: as they came; else each as soon as there is room",
    )  # fmt: skip


def _add_recorded(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a recorded run, in place of devices").add_argument
    add("--calibrate", metavar="RUN", help="fit tables to a trace that a run of this model wrote with --trace")
    add("--predict", default="", metavar="SHAPES", help="runs to predict by them: 8x2048,32x512, or 8x512:2 for n = 2")
