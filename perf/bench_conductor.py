"""The Conductor's forecasts, the times of a running engine, and those of a simulation of the same requests.

Prompts come by chance to an engine with prefill workers, of real processes on emulated devices (the workers sleep for
the time of their GEMMs and attention). The laws that the engine has learned are given to the simulation, which is
played the same arrivals. Prints a JSON line and what it says; --write appends it to perf/results/bench_conductor.jsonl.
With --documents prompts begin with one of them, and workers keep what they have computed, or do not (--no-keep).

    python perf/bench_conductor.py --write
    python perf/bench_conductor.py --documents 4 --write; python perf/bench_conductor.py --documents 4 --no-keep --write
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections import Counter
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
from bench_prefill import SHAPE
from common import cpu_pressure, parser_of, record
from reference_model import made

from lamina import LLM, SamplingParams
from lamina.engine.engine import Engine
from lamina.request import OverloadedError
from lamina.scheduler.conductor import Conductor, ConductorConfig, PromptInfo
from lamina.scheduler.conductor.latency_model import PrefillLatencyEstimator, TransferLatency, TransferLatencyEstimator
from lamina.scheduler.conductor.overload import DecodeLoadModel, SloLimits
from lamina.scheduler.prefix_index import PrefixIndex
from lamina.tools.plan.simulator.conducted_run import SimulatedPools, SimulatedPoolSpec, TracedPrompt
from lamina.utils.emulated_device import VARIABLE, DeviceTimes

SMALL = {**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}  # devices' time counts, not ours
WARM = (200, 1600, 400, 800, 1200, 300, 1000, 600)  # tokens of prompts by which the laws are learned


class Comes(NamedTuple):
    """A prompt, and when; tokens of its answer."""

    at_s: float
    tokens: list[int]
    answer: int


class Served(NamedTuple):
    """Seconds to a request's first token, as foreseen at its arrival (NaN: where others decode) and as it was, infinite
    if it was refused. Also its output, and the tokens of its prompt that were there.
    """

    expected_s: float = math.inf
    real_s: float = math.inf
    answer: tuple[int, ...] = ()
    cached: int = 0


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--prefill-workers", type=int, default=2)
    parser.add_argument("--busy", type=float, default=0.85, help="of the prefill workers' time, that prompts ask for")
    parser.add_argument("--row-us", type=float, default=400.0, help="of each row of a prompt in a slice")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--answer", type=int, default=16, help="tokens of each")
    parser.add_argument("--slo-ttft", type=float, default=6.0, help="seconds to the first token")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--documents", type=int, default=0, help="of which each prompt begins with one; 0 = none")
    parser.add_argument("--document", type=int, default=1024, help="tokens of one")
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="prompts for others alike")
    parser.add_argument("--policy", default="auto", help="who computes a prompt")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ[VARIABLE] = msgspec.json.encode(
        DeviceTimes(slice_s=(0.002,), prefill_row_s=args.row_us / 1e6, attention_s=0.002)
    ).decode()
    with made("bfloat16", {**SMALL, "num_hidden_layers": args.layers}, max_len=4096) as path, LLM(
        str(path), attention="emulate", prefill_workers=args.prefill_workers, prefill_chunk=args.chunk,
        max_num_seqs=64, compute_threads=1, memory_workers=1, enable_prefix_caching=args.keep,
    ) as llm:  # fmt: skip
        figures = measure(llm.engine, args)
    print(record("bench_conductor", vars(args), figures, write=args.write))
    for name in ("served", "simulated"):
        mean, middle, refused = (figures[f"{name}_{what}"] for what in ("mean_s", "p50_s", "refused"))
        print(f"{name:10} first token after {mean:.2f} s in the mean, {middle:.2f} in the median; refused {refused}")
    print(f"foreseen: off by {figures['expected_off']:.3f} of the real time in the median")


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Both runs, in numbers."""
    rules = ConductorConfig(policy=args.policy, limits=SloLimits(ttft_s=args.slo_ttft))
    engine.slo_admission.set_config(rules)
    for number, tokens in enumerate(WARM):
        serve(engine, [Comes(0.0, [240 + number] * tokens, 2)])
    law = engine.slo_admission.conductor.prefill_latency.model
    rng, at, comes = random.Random(args.seed), 0.0, list[Comes]()
    for number in range(args.requests):
        document = [210 + rng.randrange(args.documents)] * args.document if args.documents else []
        question = [7 + number % 200] * rng.randint(max(200, args.chunk + 8), 1600)
        comes.append(Comes(at, [*document, *question], args.answer))
        at += rng.expovariate(args.busy * args.prefill_workers / law.seconds(900))
    served = serve(engine, comes)
    simulated = _simulated(engine, comes, rules, args)
    return {
        **_told("served", [s.real_s for s in served]),
        **_told("simulated", simulated),
        "expected_off": median(abs(s.expected_s - s.real_s) / s.real_s for s in served if math.isfinite(s.expected_s)),
        "first_tokens": [[round(s.expected_s, 3), round(s.real_s, 3)] for s in served if math.isfinite(s.expected_s)],
        "same_verdict": sum((a.real_s < math.inf) == (b < math.inf) for a, b in zip(served, simulated, strict=True)),
        "law": engine.slo_admission.conductor.prefill_latency.model._asdict(),
        "cpu_pressure_avg10": cpu_pressure(),
    }


def _told(name: str, times: list[float]) -> dict[str, Any]:
    came = [t for t in times if t < math.inf]
    return {f"{name}_mean_s": fmean(came), f"{name}_p50_s": median(came), f"{name}_refused": len(times) - len(came)}


def serve(engine: Engine, comes: list[Comes]) -> list[Served]:
    """All of them, each at its time, to their ends."""
    begun, left = time.monotonic(), list(enumerate(comes))
    served = [Served()] * len(comes)
    numbers, expected = dict[int, int](), dict[int, float]()
    while left or engine.has_work:
        while left and begun + left[0][1].at_s <= time.monotonic():
            number, (_, tokens, answer) = left.pop(0)
            try:
                params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
                request = engine.add(tokens, params)
            except OverloadedError:
                continue
            (sequence,) = engine.request(request).sequences
            booked = engine.slo_admission._reservations.get(sequence)
            numbers[request], expected[request] = number, booked.ttft_s if booked else math.nan
        if not engine.has_work:
            time.sleep(max(0.0, begun + left[0][1].at_s - time.monotonic()) if left else 0.0)
            continue
        for output in engine.step():
            first, request = output.times.first_token_s, output.request_id
            if first is not None:
                answer_of = tuple(output.outputs[0].token_ids)
                real = first - output.times.arrival_s
                served[numbers[request]] = Served(expected[request], real, answer_of, output.num_cached_tokens or 0)
    engine.release_idle_blocks()
    return served


def _simulated(engine: Engine, comes: list[Comes], rules: ConductorConfig, args: argparse.Namespace) -> list[float]:
    """Workers with room for all, which send each other what they have at the rate that was seen."""
    conductor, workers = engine.slo_admission.conductor, args.prefill_workers
    law, step = conductor.prefill_latency.model, conductor.decode_load_model.latency
    moves = conductor.transfer_latency.model if conductor.transfer_latency else TransferLatency(0.0, 0.0)
    transfers = TransferLatencyEstimator(moves) if conductor.transfer_latency else None
    one = Conductor(
        config=rules, prefix_index=PrefixIndex(),
        prefill_latency=PrefillLatencyEstimator(law), transfer_latency=transfers,
        decode_load_model=DecodeLoadModel(1, step, conductor.decode_load_model.decode_s), num_workers=workers,
    )  # fmt: skip
    pools = SimulatedPools(one, SimulatedPoolSpec(law, moves, 1, step))
    page = engine.worker_info.block_size
    known = [PromptInfo(len(each.tokens), _keys(each.tokens, page) if args.keep else (), page) for each in comes]
    pools.run([TracedPrompt(each.at_s, prompt, args.answer) for each, prompt in zip(comes, known, strict=True)])
    print("refused in the simulation:", dict(Counter(r.refused for r in pools.requests if r.refused)))
    return [math.inf if r.refused else r.ttft_s for r in pools.requests]


def _keys(tokens: list[int], page: int) -> list[bytes]:
    return [repr(tokens[:stop]).encode() for stop in range(page, len(tokens) + 1, page)]


if __name__ == "__main__":
    main()
