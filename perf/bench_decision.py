"""CPU time of a decision of the Conductor: who of many prefill workers computes a long prompt, and whether it is taken.

Each worker has some of the prompt's pages and a prompt of its own before it, and some completions decode; both limits
are looked at. Prints a JSON line for each policy; --write appends it to perf/results/bench_decision.jsonl.

    python perf/bench_decision.py --write
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from common import cpu_pressure, parser_of, record, spread

from lamina.scheduler.conductor import Conductor, ConductorConfig, PromptInfo
from lamina.scheduler.conductor.latency_model import (
    PrefillLatency,
    PrefillLatencyEstimator,
    TransferLatency,
    TransferLatencyEstimator,
)
from lamina.scheduler.conductor.overload import DecodeLoadModel, SloLimits, StepLatency
from lamina.scheduler.conductor.routing import POLICIES
from lamina.tools.plan.simulator.bounded_index import BoundedPrefixIndex

PAGE, PAGES, INSTANCES = 512, 6000, 8
PREFILL, STEP, RATE = PrefillLatency(0.0, 2e-4, 2e-9), StepLatency(0.01, 0.0015, 8e-8), 31_000.0


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prefill-workers", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=126_000, help="of the prompt")
    parser.add_argument("--decoding", type=int, default=200, help="completions")
    parser.add_argument("--runs", type=int, default=2000)
    args = parser.parse_args()
    for policy in POLICIES:
        decide = decision(policy, args)
        times = [cpu_s(decide) for _ in range(args.runs)]
        each = spread(times)
        figures = {"cpu_s": each, "least_cpu_s": min(times), "cpu_pressure_avg10": cpu_pressure()}
        record("bench_decision", {**vars(args), "policy": policy}, figures, write=args.write)
        print(f"{policy:14} {1e3 * min(times):.3f} ms at least, {1e3 * each['median']:.3f} in the median")


def decision(policy: str, args: argparse.Namespace) -> Callable[[], None]:
    """One that changes nothing, so that it can be made again."""
    rng, keys = random.Random(1), [n.to_bytes(8, "little") for n in range(-(-args.tokens // PAGE))]
    known = PromptInfo(args.tokens, keys, PAGE)
    one = Conductor(
        config=ConductorConfig(policy=policy, limits=SloLimits(30.0, 0.1)),
        prefix_index=BoundedPrefixIndex(PAGES), prefill_latency=PrefillLatencyEstimator(PREFILL),
        transfer_latency=TransferLatencyEstimator(TransferLatency.at_rate(RATE)),
        decode_load_model=DecodeLoadModel(INSTANCES, STEP, 15.0),
        num_workers=args.prefill_workers,
    )  # fmt: skip
    for worker in range(args.prefill_workers):
        some = known.keys[: rng.randrange(len(known.keys))]
        one.prefix_index.add(one.places[worker], some)
        other = PromptInfo(rng.randint(1000, 9000))
        one.reserve(worker, other, one.choose(other, 0.0)._replace(worker=worker), 0.0)
    for number in range(args.decoding):
        one.decode_load_model.join(("decodes", number), number % INSTANCES, 8000, 0.0)

    def decide() -> None:
        one.check_admission(known, one.choose(known, 0.0), 0.0)

    return decide


def cpu_s(work: Callable[[], None]) -> float:
    """Seconds of this thread."""
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


if __name__ == "__main__":
    main()
