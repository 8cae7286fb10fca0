"""``lamina-launch check MODEL``: checks that equal prompts give equal results for every division of the work."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence

from lamina.cli.common.flags import add_engine_flags, check_at_least, engine_config
from lamina.cli.common.parser import Parser
from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import flat_options, replace_options

from .check_report import report_json, show
from .matrix import BASE_OPTIONS, Setting, full_settings, quick_settings, settings_of_axes
from .verdict import Verdict

# Options of every run: those of the model and the machine. All other options are compared.
OPTIONS = (
    "max_model_len", "block_size", "kv_memory", "attention", "gemm", "compute_device", "memory_device",
    "compute_threads", "memory_threads",
    "trust_remote_code", "hf_overrides", "quantization", "allow_unused_weights", "start_timeout_s", "step_timeout_s",
)  # fmt: skip
EPILOG = """\
All axes take minutes for the shipped model, and an hour or more for one of 135 M parameters. --axis runs a part.

promises: bitwise = the same tokens and the same log-probabilities, to the last bit, as the base run. It is promised for
the transport, the number of memory workers, their weights, the partition and overlap, given the same plans, which are
compared. With --deterministic it is also promised for the pipeline and other sequences of the batch.
token-equal = the greedy tokens of transformers in fp32 wherever its two best logits are further apart than ten times
the measured logit error. After a smaller distance the comparison continues with the token that Lamina chose. Such ties
may be 1 % of all tokens.
bounded = log-probabilities have an error of at most 0.01. In half precision and with --kv-cache-dtype int8 or fp8 the
error may be 4 times that of transformers with its numbers rounded in the same way, if that is more.
nothing = for replies with --kv-sparsity, which leaves KV out. But runs with it are bitwise equal to each other while no
sequence is preempted and no worker is lost. After that, evict continues with the blocks that it had, token-equal, and
for select nothing is promised.

In some runs a worker, then a process of its own, is killed at a certain message, and another one replaces it. After the
death of a compute worker or one of its ranks, or a planned change, all bits stay (token-equal without --deterministic).
After a prefill worker's death the bits of its prompts' K and V stay, too. After a memory worker's death the prompts of
whose KV it had a part are token-equal, and all others keep their bits. After the death of a server's engine all are
token-equal. A run in which no process died, or none replaced it, does not count.

Exit status: 0 = all promises are kept, 1 = one is broken or a worker was lost, 2 = bad input. A setting that this model
or machine cannot run is listed as refused, with the reason. The model is loaded in fp32, once for transformers and once
for each compute worker.
"""


def add_arguments(parser: Parser) -> None:
    """Add the flags of this sub-command."""
    parser.epilog = EPILOG
    parser.add_argument("model", help="a directory, a GGUF file or a hub id")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="every axis, most of them once (the default)")
    size.add_argument("--all", action="store_true", help="every value of every axis, and combinations")
    parser.add_argument(
        "--axis",
        action="append",
        default=[],
        help="run this axis only; may be given several times",
    )
    parser.add_argument("--prompt", action="append", default=[], help="a text to complete; may be given several times")
    parser.add_argument("--prompt-seed", type=int, default=0, help="seed of the random prompts, without --prompt")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of each completion (default: 32)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    add_engine_flags(parser, OPTIONS)


def run(args: argparse.Namespace) -> int:
    """Run the check. Returns exit status 0 if all promises are kept, 1 if one is broken; raises ValueError for bad
    input.
    """
    config = replace_options(engine_config(args), BASE_OPTIONS)
    check_at_least(args, 2, "max_tokens")
    check_at_least(args, 0, "prompt_seed")
    settings = settings_of_axes(_matrix(config, all_of_them=args.all), args.axis)
    asked = [s for s in settings if s.axis in args.axis or not args.axis]
    if args.print_config:
        runs = [{"axis": s.axis, "promised": s.promised.word, **s.options} for s in settings]
        print(json.dumps({"model": args.model, "base": flat_options(config), "runs": runs}, indent=2))
        return 0
    from lamina.cli.common.preflight import check

    check(args.model, config)
    if args.dry_run:
        print(f"would check {args.model} with {len(settings)} runs")
        for s in settings:
            why = "" if s in asked else ", which others are compared with"
            print(f"  {s.axis}: {s.text or 'as the base'} ({s.promised.word}){why}")
        return 0
    verdicts: list[Verdict] = []
    try:
        verdicts.extend(_run(args, config, settings))
    finally:  # also if it is ended early, by Ctrl-C or SIGTERM
        if verdicts:
            left = len(settings) - len(verdicts)
            if args.json:
                print(json.dumps(report_json(args.model, config, verdicts, left), indent=2))
            else:
                show(args.model, config, verdicts, args.axis, left)
    return 1 if any(v.held is False for v in verdicts) else 0


def _matrix(config: EngineConfig, *, all_of_them: bool) -> list[Setting]:
    from lamina.netstack import SCHEMES
    from lamina.ops import attention, gemm

    others = [name for name in attention.BACKENDS if name not in (config.kv.attention, *attention.WRAPPERS)]
    if not all_of_them:
        return quick_settings(others)
    transports = [name for name in SCHEMES if name not in ("auto", config.launch.scheme)]
    kinds = {"compute_device": config.devices.compute_device, "memory_device": config.devices.memory_device}
    devices = [{name: "cpu" if kind != "cpu" else "cuda"} for name, kind in kinds.items()]
    return full_settings(others, [name for name in gemm.BACKENDS if name != config.model.gemm], transports, devices)


def _run(args: argparse.Namespace, config: EngineConfig, settings: Sequence[Setting]) -> Iterator[Verdict]:
    """Yield the verdicts, and print progress on stderr."""
    from .runner import Check

    began, runs = time.monotonic(), Check(args.model, config, args.prompt, args.max_tokens, args.prompt_seed)
    for done, verdict in enumerate(runs.run(settings), 1):
        yield verdict
        name, left = (
            f"{verdict.axis} {verdict.setting}".strip(),
            time_left(time.monotonic() - began, done, len(settings)),
        )
        print(f"{done}/{len(settings)} {name}: {verdict.word}, {verdict.seconds:.1f} s{left}", file=sys.stderr)


def time_left(took_s: float, done: int, count: int) -> str:
    """Return words about how long the remaining runs take, if they are like those that are done."""
    left_s = took_s / done * (count - done)
    if done == count:
        return ""
    return f"; about {left_s / 60:.0f} min are left" if left_s >= 90 else f"; about {left_s:.0f} s are left"
