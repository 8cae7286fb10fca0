"""A trace, scaled down, on two prefill workers and the shipped model, by one policy of the Conductor after the other.

Real processes, deterministic: every policy has to give every request the same tokens, or this ends in an error. Pages
of the trace become pages of --page tokens, lengths shrink alike; requests that are still too long are left out. Tells
of each policy the hits, what workers sent each other, the time to the first token, and how far it was from what was
foreseen at the arrival. --write appends to perf/results/bench_policies.jsonl.

    python perf/bench_policies.py conversation.jsonl.gz --write
"""

from __future__ import annotations

import argparse
import hashlib
import math
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench_conductor import Comes, Served, serve
from common import BrokenError, cpu_pressure, parser_of, record

from lamina import LLM
from lamina.engine.engine import Engine
from lamina.scheduler.conductor import ConductorConfig
from lamina.scheduler.conductor.routing import POLICIES
from lamina.tools.request_traces import HASHED, RequestTrace, read_trace

MODEL = Path(__file__).resolve().parents[1] / "examples" / "tiny_lm" / "model"
LONGEST = 2048  # tokens of the model
WARM = (100, 900, 300, 1500, 600, 1200, 200, 1800)  # tokens of prompts by which the law is learned


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("trace", help="Mooncake's JSON lines, or .gz")
    parser.add_argument("--rows", type=int, default=200, help="of the trace, that are short enough")
    parser.add_argument("--page", type=int, default=16, help="tokens that 512 of the trace become")
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--answer", type=int, default=8, help="tokens of each at most")
    parser.add_argument("--busy", type=float, default=0.5, help="of the prefill workers' time, that prompts ask for")
    parser.add_argument("--policies", default=",".join(POLICIES))
    args = parser.parse_args()
    trace, answers = read_trace(args.trace), dict[str, list[tuple[int, ...]]]()
    law_s = 0.0  # of the mean prompt, as the first run has learned it: all policies get the same arrivals
    for policy in args.policies.split(","):
        with LLM(
            str(MODEL),
            prefill_workers=2,
            prefill_chunk=args.chunk,
            deterministic=True,
            max_num_seqs=64,
            compute_threads=1,
        ) as llm:
            engine = llm.engine
            engine.slo_admission.set_config(ConductorConfig(policy=policy))
            for number, tokens in enumerate(WARM):
                serve(engine, [Comes(0.0, [5 + number] * tokens, 2)])
            comes = scaled(trace, args)
            law_s = law_s or fmean(
                engine.slo_admission.conductor.prefill_latency.model.seconds(len(c.tokens)) for c in comes
            )
            span_s = law_s * len(comes) / 2 / args.busy
            last = comes[-1].at_s or 1.0
            llm.reset_prefix_cache()
            figures, told = measure(engine, [c._replace(at_s=c.at_s / last * span_s) for c in comes])
            stats = llm.stats()
            figures["fetched_bytes"] = sum(stats[f"prefill-{w}"]["fetched_bytes"] for w in range(2))
        answers[policy] = [one.answer for one in told]
        figures["answers_sha256"] = hashlib.sha256(repr(answers[policy]).encode()).hexdigest()
        settings = {**vars(args), "trace": trace.name, "policy": policy}
        print(record("bench_policies", settings, figures, write=args.write))
    if any(given != answers[args.policies.split(",")[0]] for given in answers.values()):
        raise BrokenError("policies have given other tokens")


def scaled(trace: RequestTrace, args: argparse.Namespace) -> list[Comes]:
    """Requests of a page for each of the trace."""
    comes = list[Comes]()
    for request in trace.requests:
        length = max(2, request.prompt * args.page // HASHED)
        if length + args.answer > LONGEST or len(comes) == args.rows:
            continue
        tokens = [2 + (block * 7919 + at * 131) % 2000 for block in request.blocks for at in range(args.page)][:length]
        comes.append(Comes(request.at_s, tokens, min(args.answer, max(1, request.answer * args.page // HASHED))))
    return comes


def measure(engine: Engine, comes: list[Comes]) -> tuple[dict[str, Any], list[Served]]:
    """The figures of one policy, and what was served."""
    served = serve(engine, comes)
    booked = [s for s in served if not math.isnan(s.expected_s)]
    replicas = engine.slo_admission.num_page_replicas
    return {
        "requests": len(served),
        "prompt_tokens": sum(len(c.tokens) for c in comes),
        "cached_tokens": sum(s.cached for s in served),
        "ttft_mean_s": fmean(s.real_s for s in served),
        "ttft_p50_s": median(s.real_s for s in served),
        "booked": len(booked),
        "expected_off": median(abs(s.expected_s - s.real_s) / s.real_s for s in booked),
        "replicas": replicas,
        "transfer_law": engine.slo_admission.conductor.transfer_latency
        and engine.slo_admission.conductor.transfer_latency.model._asdict(),
        "law": engine.slo_admission.conductor.prefill_latency.model._asdict(),
        "cpu_pressure_avg10": cpu_pressure(),
    }, served


if __name__ == "__main__":
    main()
