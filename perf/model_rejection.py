"""Modelled: how near --overload early and predictive come to the step that a prompt finds when it is computed.

Prompts of 11 s come three a second to 40 prefill workers, and decode for 12 s on two instances, on the virtual clock of
`plan simulate`. The limits are 30 s and 50 ms, with no second look (Mooncake, arXiv 2407.00079, sections 6.3 and 6.4).
Of each prompt that is taken: the step that was foreseen at its arrival, and the one that there was at its end. Prints a
line for each rule; --write appends JSON lines to perf/results/model_rejection.jsonl.

    python perf/model_rejection.py --write
"""

from __future__ import annotations

import argparse
import random
from statistics import median
from typing import Any

from common import parser_of, record

from lamina.scheduler.conductor import Conductor, ConductorConfig, PromptInfo
from lamina.scheduler.conductor.latency_model import PrefillLatency, PrefillLatencyEstimator, TransferLatency
from lamina.scheduler.conductor.overload import DecodeLoadModel, SloLimits, StepLatency
from lamina.scheduler.prefix_index import PrefixIndex
from lamina.tools.plan.simulator.conducted_run import SimulatedPools, SimulatedPoolSpec, TracedPrompt
from lamina.tools.plan.simulator.simulation_report import report

TOKENS, ANSWER, WORKERS, INSTANCES = 8000, 300, 40, 2
PREFILL, STEP = PrefillLatency(0.0, 11.0 / TOKENS, 0.0), StepLatency(0.01, 0.0015, 8e-8)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--slo-tbt", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    for overload in ("early", "predictive"):
        figures = play(overload, args)
        print(record("model_rejection", {**vars(args), "overload": overload}, figures, write=args.write))
        told = ", ".join(f"{name} {figures[name]:.2f}" for name in ("off", "correlation", "decode_deviation"))
        print(f"{overload}: {told}; refused {figures['refused']}, goodput {figures['goodput']}")


def play(overload: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run, in numbers. ``steps``: foreseen and real ones, in parts of the limit."""
    rules = ConductorConfig(overload=overload, limits=SloLimits(30.0, args.slo_tbt), check_before_decode=False)
    conductor = Conductor(
        config=rules, prefix_index=PrefixIndex(), prefill_latency=PrefillLatencyEstimator(PREFILL),
        transfer_latency=None,
        decode_load_model=DecodeLoadModel(INSTANCES, STEP, 12.0), num_workers=WORKERS,
    )  # fmt: skip
    rng, at, arrivals = random.Random(args.seed), 0.0, list[TracedPrompt]()
    for _ in range(args.requests):
        at += rng.expovariate(args.rate)
        arrivals.append(TracedPrompt(at, PromptInfo(TOKENS), ANSWER))
    pools = SimulatedPools(
        conductor, SimulatedPoolSpec(PREFILL, TransferLatency(0.0, 0.0), INSTANCES, STEP), sample_s=1.0, steps=True
    )
    pools.run(arrivals)
    steps = [(r.expected_tbt_s / args.slo_tbt, r.tbt_s / args.slo_tbt) for r in pools.requests if r.ended]
    told = report(pools, conductor)
    return {
        "modelled": True,
        "steps": [[round(x, 3) for x in both] for both in steps],
        "off": median(abs(expected - real) / real for expected, real in steps),
        "refused": sum(told.refused.values()),
        "goodput": told.goodput_requests,
        "correlation": told.correlation,
        "decode_deviation": told.decode_deviation,
    }


if __name__ == "__main__":
    main()
