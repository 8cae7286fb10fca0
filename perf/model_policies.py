"""Modelled: policies of the Conductor, and rules by which routers of others choose, on a trace of requests.

`plan simulate` plays the first --rows requests of Mooncake's conversation trace, by each policy; by chance
with ten seeds. --speed below 1 leaves room for all. --also has more flags of `plan simulate`, such as those of
instances that decode and of limits, with which each rule of --overload is one run. Prints a line for each; --write
appends JSON lines to perf/results/model_policies.jsonl.

    python perf/model_policies.py conversation.jsonl.gz --write
    python perf/model_policies.py conversation.jsonl.gz --speed 0.3 --write
    python perf/model_policies.py conversation.jsonl.gz --rows 6000 --speed 2 --prefill-workers 16 --policies mooncake \
        --overload baseline,early,predictive --also="--spread 3 --instances 8 --slo-ttft 30s --slo-tbt 100ms" --write
    python perf/model_policies.py conversation.jsonl.gz --rows 0 --prefill-workers 16 --policies auto \
        --also="--instances 8 --slo-ttft 30s --slo-tbt 100ms" --write
"""

from __future__ import annotations

import argparse
import io
import json
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from baseline_policies import BASELINE_POLICIES
from common import BrokenError, cpu_pressure, parser_of, record

from lamina.cli import launch
from lamina.scheduler.conductor.routing import POLICIES

SEEDS = 10


def main() -> None:
    POLICIES.update(BASELINE_POLICIES)
    parser = parser_of(__doc__)
    parser.add_argument("trace", help="Mooncake's JSON lines, or .gz")
    parser.add_argument("--rows", type=int, default=4000, help="its first N requests")
    parser.add_argument("--speed", type=float, default=1.0, help="requests come X times as fast")
    parser.add_argument("--prefill-workers", type=int, default=8)
    parser.add_argument("--pages", type=int, default=6000, help="of each worker's store")
    parser.add_argument("--policies", default=",".join(POLICIES), help="some by comma")
    parser.add_argument("--overload", default="predictive", help="some by comma")
    parser.add_argument("--also", default="", help="more flags of `lamina-launch plan simulate`")
    args = parser.parse_args()
    settings = {**vars(args), "trace": Path(args.trace).name}
    for policy, overload in product(args.policies.split(","), args.overload.split(",")):
        runs = [_run(policy, overload, seed, args) for seed in range(SEEDS if policy == "random" else 1)]
        mean_s = fmean(run["mean_ttft_s"] for run in runs)
        figures = {"modelled": True, "mean_ttft_s": mean_s, "runs": runs, "cpu_pressure_avg10": cpu_pressure()}
        said = {**settings, "policy": policy, "overload": overload}
        record("model_policies", said, figures, write=args.write)
        hit, moved = fmean(run["hit"] for run in runs), runs[0]["moved_tokens"]
        print(f"{policy:18} first token after {mean_s:.2f} s in the mean, {hit:.3f} found, {moved} tokens moved")


def _run(policy: str, overload: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    said = io.StringIO()
    flags = {"rows": args.rows, "speed": args.speed, "pages": args.pages, "prefill-workers": args.prefill_workers}
    flags |= {"policy": policy, "overload": overload, "seed": seed}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with redirect_stdout(said):
        failed = launch.main(["plan", "simulate", "--trace", args.trace, *words, *args.also.split(), "--json"])
    if failed:
        raise BrokenError("the simulation was refused")
    (run,) = json.loads(said.getvalue())["runs"]
    told: dict[str, Any] = run
    return told


if __name__ == "__main__":
    main()
