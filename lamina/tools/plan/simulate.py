"""``lamina-launch plan simulate``: a trace of requests, dispatched by the conductor to prefill workers on a virtual
clock.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from typing import TYPE_CHECKING, Any

from lamina.cli.common.flags import check_at_least
from lamina.config.conflicts import need_text
from lamina.config.flag_groups import flag_name
from lamina.config.option import parse_seconds
from lamina.config.resolve import check_stages
from lamina.facts.report import table
from lamina.scheduler.conductor import Conductor, ConductorConfig
from lamina.scheduler.conductor.latency_model import (
    PrefillLatency,
    PrefillLatencyEstimator,
    PrefillPipelineShape,
    TransferLatency,
    TransferLatencyEstimator,
)
from lamina.scheduler.conductor.overload import OVERLOAD_POLICIES, DecodeLoadModel, SloLimits, StepLatency
from lamina.scheduler.conductor.routing import POLICIES
from lamina.tools.request_traces import HASHED, TRACE_HELP, RequestTrace, read_trace

if TYPE_CHECKING:
    from .simulator.conducted_run import SimulatedPoolSpec, TracedPrompt
    from .simulator.simulation_report import PoolsReport

DECODE_S = 20.0  # assumed time of decoding a completion, until some have ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    add = parser.add_argument
    add("--trace", required=True, metavar="FILE", help=TRACE_HELP)
    add("--rows", type=int, default=0, metavar="N", help="its first N requests only; 0 = all (0)")
    add("--speed", type=float, default=1.0, metavar="X", help="requests come X times as fast (1)")
    add("--spread", type=float, default=0.0, metavar="S", help="each comes up to S seconds later, by chance (0)")
    add(
        "--policy", default=",".join(POLICIES),
        help=f"which policies choose the prefill worker, separated by commas: {', '.join(POLICIES)}",
    )  # fmt: skip
    add("--prefill-workers", type=int, default=8, metavar="N", help="prefill workers (8)")
    add(
        "--prefill-pipeline", type=int, default=1, metavar="X",
        help="so many of them compute a prompt together, each some of the layers (1)",
    )  # fmt: skip
    add("--prefill-chunk", type=int, default=1024, metavar="N", help="tokens that go from one to the next (1024)")
    add("--pages", type=int, default=6000, metavar="N", help="pages of 512 tokens in the store of each (6000)")
    add("--prefill-law", default="0,2e-4,2e-9", metavar="A,B,C", help="seconds of a prompt: A + B tokens + C tokens^2")
    add("--transfer-rate", type=float, default=31000.0, metavar="T", help="tokens per second from one sender (31000)")
    add("--kvcache-balancing-threshold", type=float, default=1.5, metavar="X", help="of the policy mooncake (1.5)")
    add("--instances", type=int, default=0, metavar="N", help="instances that decode; 0 = nothing is decoded (0)")
    add("--decode-law", default="0.02,2e-3,4e-7", metavar="A,B,C", help="seconds of a step: A + B rows + C tokens read")
    add(
        "--overload",
        default="early",
        help=f"when the load of decoding counts, separated by commas: {', '.join(OVERLOAD_POLICIES)}",
    )
    add("--slo-ttft", default="", metavar="TIME", help="to the first token at most, else a request is refused: 30s")
    add("--slo-tbt", default="", metavar="TIME", help="between two tokens at most, else a request is refused: 100ms")
    add("--seed", type=int, default=0, help="of all that is by chance (0)")
    add("--json", action="store_true", help="print everything as JSON")
    add("--dry-run", action="store_true", help="check everything, print what would be simulated")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns exit status 0; raises ValueError for bad input."""
    _check(args)
    truth = _truth(args)
    runs = [_rules(args, policy, overload) for policy in _listed(args.policy) for overload in _listed(args.overload)]
    trace = read_trace(args.trace)
    arrivals = _arrivals(trace.first(args.rows or None), args)
    _check_limits(args, truth, arrivals)
    if args.dry_run:
        print(f"would conduct {len(arrivals)} requests of {trace.name} in {len(runs)} runs")
        return 0
    told = [_one(args, truth, rules, arrivals) for rules in runs]
    if args.json:
        report = {"trace": trace.name, "surrogate": trace.is_surrogate, "runs": [_told(*one) for one in told]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(_text(args, trace, told))
    return 0


def _truth(args: argparse.Namespace) -> SimulatedPoolSpec:
    """Return the laws of the workers. Those that compute a prompt together are one: each has some of its layers, which
    it computes and sends.
    """
    from .simulator.conducted_run import SimulatedPoolSpec

    stages = args.prefill_pipeline
    return SimulatedPoolSpec(
        PrefillLatency(*(x / stages for x in _law(args.prefill_law, "--prefill-law"))),
        TransferLatency.at_rate(args.transfer_rate * stages),
        args.instances,
        StepLatency(*_law(args.decode_law, "--decode-law")),
    )


def _one(
    args: argparse.Namespace, truth: SimulatedPoolSpec, rules: ConductorConfig, arrivals: list[TracedPrompt]
) -> tuple[ConductorConfig, PoolsReport, float]:
    from .simulator.bounded_index import BoundedPrefixIndex
    from .simulator.conducted_run import SimulatedPools
    from .simulator.simulation_report import report

    stages = args.prefill_pipeline
    conductor = Conductor(
        config=rules, prefix_index=BoundedPrefixIndex(args.pages * stages),
        prefill_latency=PrefillLatencyEstimator(truth.prefill),
        transfer_latency=TransferLatencyEstimator(truth.transfer),
        decode_load_model=DecodeLoadModel(max(1, args.instances), truth.decode, DECODE_S),
        num_workers=args.prefill_workers // stages, seed=args.seed,
        staged=PrefillPipelineShape(stages, args.prefill_chunk),
    )  # fmt: skip
    begun = time.process_time()
    pools = SimulatedPools(conductor, truth, sample_s=1.0 if args.instances else 0.0)
    pools.run(arrivals)
    return rules, report(pools, conductor), time.process_time() - begun


def _arrivals(trace: RequestTrace, args: argparse.Namespace) -> list[TracedPrompt]:
    from lamina.scheduler.conductor import PromptInfo

    from .simulator.conducted_run import TracedPrompt

    rng = random.Random(args.seed)
    arrivals = [
        TracedPrompt(
            (r.at_s + rng.random() * args.spread) / args.speed,
            PromptInfo(r.prompt, [block.to_bytes(8, "little") for block in r.blocks], HASHED),
            r.answer,
        )
        for r in trace.requests
    ]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _rules(args: argparse.Namespace, policy: str, overload: str) -> ConductorConfig:
    ttft_s, tbt_s = parse_seconds(args.slo_ttft, "--slo-ttft"), parse_seconds(args.slo_tbt, "--slo-tbt")
    try:
        return ConductorConfig(
            policy=policy, threshold=args.kvcache_balancing_threshold, overload=overload,
            limits=SloLimits(ttft_s or math.inf, tbt_s or math.inf),
        )  # fmt: skip
    except ValueError as error:  # it names the flags of serve
        text = str(error).replace(flag_name("overload"), "--overload")
        raise ValueError(
            text.replace(flag_name("kvcache_balancing_threshold"), "--kvcache-balancing-threshold")
        ) from None


def _check(args: argparse.Namespace) -> None:
    for policy in _listed(args.policy):
        if policy not in POLICIES:
            raise ValueError(f"--policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    check_at_least(args, 0, "rows", "instances")
    check_at_least(args, 1, "prefill_workers", "prefill_pipeline", "prefill_chunk", "pages")
    check_stages(args.prefill_pipeline, args.prefill_workers)
    for name in ("speed", "transfer_rate"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {getattr(args, name):g}")
    if not 0 <= args.spread < math.inf:
        raise ValueError(f"--spread must be a number of seconds, not {args.spread:g}")


def _check_limits(args: argparse.Namespace, truth: SimulatedPoolSpec, arrivals: list[TracedPrompt]) -> None:
    """Raises ValueError for a limit that no request could keep."""
    ttft_s, tbt_s = parse_seconds(args.slo_ttft, "--slo-ttft"), parse_seconds(args.slo_tbt, "--slo-tbt")
    if tbt_s and not args.instances:
        raise ValueError(need_text("plan simulate --slo-tbt", ["plan simulate --instances"]))
    if args.instances and 0 < tbt_s < (first := truth.decode.seconds(1, 1)):
        raise ValueError(f"--slo-tbt {args.slo_tbt} is below a step of one completion alone, {first:g} s: raise it")
    shortest = min((arrival.prompt.tokens for arrival in arrivals), default=0)
    stages = PrefillPipelineShape(args.prefill_pipeline, args.prefill_chunk)
    alone_s = truth.prefill.seconds(shortest)
    alone_s += stages.fill_s(shortest, 0, alone_s)
    if 0 < ttft_s < alone_s:
        raise ValueError(
            f"--slo-ttft {args.slo_ttft} is below what the shortest prompt, of {shortest} tokens, takes alone, "
            f"{alone_s:g} s: raise it"
        )


def _law(text: str, name: str) -> tuple[float, float, float]:
    try:
        a, b, c = (float(part) for part in text.split(","))
    except ValueError:
        a = b = c = -1.0
    if not all(0 <= x < math.inf for x in (a, b, c)) or not (b or c):
        raise ValueError(
            f"{name} must be three numbers of at least 0, separated by commas, such as 0,2e-4,2e-9: {text!r}"
        )
    return a, b, c


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _told(rules: ConductorConfig, report: PoolsReport, cpu_s: float) -> dict[str, Any]:
    return {"policy": rules.policy, "overload": rules.overload, "cpu_s": round(cpu_s, 2), **report.to_json()}


_COLUMNS = ["policy", "TTFT mean", "p50", "p90", "p99", "hit", "moved", "copies", "max/mean", "off", "CPU s"]


def _head(args: argparse.Namespace, trace: RequestTrace, count: int) -> str:
    surrogate = " (a surrogate)" if trace.is_surrogate else ""
    return (
        f"{count} requests of {trace.name}{surrogate} on {args.prefill_workers} prefill workers of {args.pages} pages, "
        f"simulated"
    )


def _text(
    args: argparse.Namespace,
    trace: RequestTrace,
    told: list[tuple[ConductorConfig, PoolsReport, float]],
) -> str:
    rows = [
        [
            rules.policy, f"{r.mean_ttft_s:.2f}", f"{r.p50_ttft_s:.2f}", f"{r.p90_ttft_s:.2f}", f"{r.p99_ttft_s:.2f}",
            f"{r.hit:.3f}", f"{r.moved_tokens}", f"{r.kv_replicas}", f"{r.imbalance:.2f}", f"{r.expected_off:.2f}",
            f"{cpu_s:.1f}",
        ]
        for rules, r, cpu_s in told
    ]  # fmt: skip
    columns, *shown = table([_COLUMNS, *rows])
    lines = [_head(args, trace, told[0][1].requests), columns]
    for line, (rules, report, _) in zip(shown, told, strict=True):
        lines.append(line)
        if rules.limits != SloLimits():
            refused = ", ".join(f"{n} by {why}" for why, n in sorted(report.refused.items())) or "none"
            lines.append(
                f"  {rules.overload}: goodput {report.goodput_requests}, refused {refused}, "
                f"{report.wasted_tokens} tokens computed in vain"
            )
        if args.instances:
            lines.append(
                f"  loads of the pools: correlation {report.correlation:.2f}, decode deviates by "
                f"{report.decode_deviation:.3f}"
            )
    return "\n".join(lines) + "\n"
