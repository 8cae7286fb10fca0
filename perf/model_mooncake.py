"""Modelled: how many requests a second Mooncake's pools serve within its limits, compared with instances that do both.

The shapes are those of table 1 of Mooncake (arXiv 2407.00079), with the limits of its sections 2 and 7.1.3. Its pools
are prefill instances under the shipped Conductor and instances that decode, on the virtual clock of `plan simulate`.
The others are as many engines of the shipped scheduler that compute prompts in the steps of those that decode, and get
requests in turns. Prompts are whole, as in vLLM then, or in chunks, as in vLLM now. An instance is a host of eight
A100, peak rates times the shares below, with LLaMA2-70B. Arrivals are Poisson, lengths vary by half around the mean of
table 1. A rate is kept where 0.9 of first tokens come within --ttft times, and 0.9 of gaps between tokens within --tbt
times, of what a request alone takes. For the real data, the limits are 30 s and 0.1 s. The paper does not say of what
0.9 is taken: rows are by all gaps ("gaps"), and by the longest of each request ("longest"). Prefill hides transfers to
decoding. Nothing is computed. Prints a table; --write appends JSON lines to perf/results/model_mooncake.jsonl.

    python perf/model_mooncake.py --write
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain, pairwise
from typing import NamedTuple

from common import BrokenError, parser_of, record

from lamina.facts.hardware import DEVICES
from lamina.request import SamplingParams
from lamina.scheduler.conductor import Conductor, ConductorConfig, PromptInfo
from lamina.scheduler.conductor.latency_model import (
    PrefillLatency,
    PrefillLatencyEstimator,
    TransferLatency,
    TransferLatencyEstimator,
)
from lamina.scheduler.conductor.overload import DecodeLoadModel, StepLatency
from lamina.tools.plan.simulator.bounded_index import BoundedPrefixIndex
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.conducted_run import SimulatedPools, SimulatedPoolSpec, TracedPrompt
from lamina.tools.plan.simulator.lossless import RoundLoad, SimulatedPool

CARDS, FLOPS_SHARE, READ_SHARE, IN_USE = 8, 0.5, 0.8, 0.9  # cards of a host, shares of peak, and share of memory
PARAMETERS, LAYERS, WIDTH, KV_WIDTH = 70e9, 80, 8192, 1024  # of LLaMA2-70B, bf16
NETWORK_BYTES = 100e9  # a second, of a host: 800 Gb/s
PAGE, MOST, CHUNK = 512, 1 << 8, 2048
SLACK, KEPT = 1.5, 0.9  # lengths are drawn around their mean; so many requests have to be in time
STEPS = 5  # of bisection
Limits = Callable[[TracedPrompt], tuple[float, float]]  # seconds to the first token, and between two


class Lateness(NamedTuple):
    """Over their limits: of requests, first tokens and longest gaps between two; and all gaps."""

    first: list[float]
    longest: list[float]
    gaps: list[float]

    def kept(self, what: str) -> bool:
        """Returns whether enough first tokens are in time, and enough of ``what``."""
        return all(sum(x <= 1.0 for x in each) >= KEPT * len(each) for each in (self.first, getattr(self, what)))


System = Callable[[list[TracedPrompt]], Lateness]


class Table1(NamedTuple):
    """A row of table 1: means of tokens, the part of a prompt that others begin with too, and the pools that serve it.
    The last value is what was published: requests a second more than with vLLM, in percent.
    """

    name: str
    prompt: int
    answer: int
    cached: float
    pools: Sequence[tuple[int, int]]
    published: str
    least: int = 0  # requests for each host: so many that the last ones can be late


PUBLIC = ((3, 1), (2, 2))
SHAPES = (
    Table1("ArXiv Summarization", 8088, 229, 0.0, PUBLIC, "20 % by 3P+1D"),
    Table1("L-Eval", 19019, 72, 0.8, PUBLIC, "40 % by 3P+1D"),
    *(Table1(f"simulated, {n}k", n * 1024, 512, 0.5, PUBLIC, "50 % to 525 %") for n in (16, 32, 64, 128)),
    Table1("real data", 7955, 194, 0.5, ((10, 10),), "75 %", 60),
)


class HostLaws(NamedTuple):
    """Laws of an instance, and the tokens whose KV it has room for."""

    prefill: PrefillLatency
    decode: StepLatency
    tokens: int
    moves: TransferLatency

    @staticmethod
    def of(name: str) -> HostLaws:
        """Eight of a device that a plan can name."""
        device, kv = DEVICES[name], 2 * LAYERS * KV_WIDTH * 2
        flops, read = CARDS * device.tflops * 1e12 * FLOPS_SHARE, CARDS * device.bandwidth_gbs * 1e9 * READ_SHARE
        row_s, pair_s = 2 * PARAMETERS / flops, 4 * LAYERS * WIDTH / flops
        room = CARDS * device.memory_gb * 1e9 * IN_USE - 2 * PARAMETERS
        return HostLaws(
            PrefillLatency(0.0, row_s, pair_s / 2), StepLatency(2 * PARAMETERS / read, row_s, kv / read),
            int(room / kv),
            TransferLatency.at_rate(NETWORK_BYTES / kv),
        )  # fmt: skip

    def round_s(self, load: RoundLoad) -> float:
        """Returns the time of a step that has rows of prompts too: their pairs, and what decoding reads."""
        stored, pairs = sum(step.stored for step in load.steps), sum(step.pairs for step in load.steps)
        step_s = self.decode.seconds(load.rows, stored - load.decoding)
        return step_s + 2.0 * self.prefill.c * max(0, pairs - stored)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="a100", help="of a host, by its name in a plan")
    parser.add_argument("--requests", type=int, default=24, help="for each host")
    parser.add_argument("--only", default="", help="shapes with this in their name")
    parser.add_argument("--ttft", type=float, default=10.0, help="times of the first token of a request alone")
    parser.add_argument("--tbt", type=float, default=5.0, help="times of a step of a request alone")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    host = HostLaws.of(args.device)
    for shape in [shape for shape in SHAPES if args.only in shape.name]:
        base, systems = systems_of(shape, host, args)
        runs = {name: cache(partial(_played, shape, system, args)) for name, system in systems.items()}
        for what in ("gaps", "longest"):
            rates = {name: most_rate(shape, host, what, run) for name, run in runs.items()}
            gains = {
                name: round(100 * (rate / rates[base] - 1)) if rates[base] else None for name, rate in rates.items()
            }
            told = {"shape": shape._asdict(), "what": what, "requests_per_s": rates, "gain_percent": gains}
            figures = {"modelled": True, **told, "instance": host._asdict()}
            print(record("model_mooncake", vars(args), figures, write=args.write))
            print(f"{shape.name}, {what}: {rates}, {gains} %; published {shape.published}", flush=True)


def _played(shape: Table1, system: System, args: argparse.Namespace, rate: float) -> Lateness:
    return system(arrivals_of(shape, rate, max(args.requests, shape.least) * sum(shape.pools[0]), args.seed))


def systems_of(shape: Table1, host: HostLaws, args: argparse.Namespace) -> tuple[str, dict[str, System]]:
    """All that serve the same, and which of them is the one that others are compared with."""
    limits, hosts = _limits(shape, host, args), sum(shape.pools[0])
    base = f"{hosts}M, whole prompts"
    systems: dict[str, System] = {f"{p}P+{d}D": partial(pooled, host, p, d, limits) for p, d in shape.pools}
    systems[base] = partial(coupled, host, hosts, 0, limits)
    systems[f"{hosts}M, chunks of {CHUNK}"] = partial(coupled, host, hosts, CHUNK, limits)
    return base, systems


def _limits(shape: Table1, host: HostLaws, args: argparse.Namespace) -> Limits:
    if shape.name == "real data":
        return lambda arrival: (30.0, 0.1)
    return lambda arrival: (
        args.ttft * host.prefill.seconds(arrival.prompt.tokens),
        args.tbt * host.decode.seconds(1, arrival.prompt.tokens),
    )


def arrivals_of(shape: Table1, rate: float, count: int, seed: int) -> list[TracedPrompt]:
    """Poisson. What is cached of a prompt is the beginning of one of as many documents as eight requests share one."""
    rng, at, arrivals = random.Random(seed), 0.0, list[TracedPrompt]()
    for number in range(count):
        at += rng.expovariate(rate)
        spread = rng.uniform(2 - SLACK, SLACK)
        tokens, answer = int(shape.prompt * spread), max(2, int(shape.answer * rng.uniform(2 - SLACK, SLACK)))
        shared, document = int(tokens * shape.cached) // PAGE, rng.randrange(max(1, count // 8))
        pages = [(document << 20) + n if n < shared else -(number << 20) - n - 1 for n in range(tokens // PAGE)]
        known = PromptInfo(tokens, [page.to_bytes(8, "little", signed=True) for page in pages], PAGE)
        arrivals.append(TracedPrompt(at, known, answer))
    return arrivals


def most_rate(shape: Table1, host: HostLaws, what: str, run: Callable[[float], Lateness]) -> float:
    """Requests a second, the most that are served within the limits. ``what`` counts of gaps."""

    def keeps(rate: float) -> bool:
        return run(rate).kept(what)

    hosts = sum(shape.pools[0])
    low, high = 0.0, hosts / host.prefill.seconds(shape.prompt)
    while keeps(high):
        low, high = high, 2 * high
        if high > 100 * hosts / host.prefill.seconds(shape.prompt):
            raise BrokenError(f"{shape.name}: all come so soon that none is late: take more --requests")
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return round(low, 4)


def pooled(host: HostLaws, prefill: int, decode: int, limits: Limits, arrivals: list[TracedPrompt]) -> Lateness:
    """Serves by the Conductor, policy mooncake: it is given the true laws.

    Steps that decode are alike: the longest counts.
    """
    conductor = Conductor(
        config=ConductorConfig(policy="mooncake"), prefix_index=BoundedPrefixIndex(host.tokens // PAGE),
        prefill_latency=PrefillLatencyEstimator(host.prefill), transfer_latency=TransferLatencyEstimator(host.moves),
        decode_load_model=DecodeLoadModel(decode, host.decode, 20.0),
        num_workers=prefill,
    )  # fmt: skip
    room = SimulatedPool(layers=1, blocks=host.tokens // 128, block=128, longest=1 << 19, most=MOST)
    pools = SimulatedPools(conductor, SimulatedPoolSpec(host.prefill, host.moves, decode, host.decode, room))
    pools.run(arrivals)
    late = Lateness([], [], [])
    for request in pools.requests:
        ttft_s, tbt_s = limits(request.arrival)
        waited_s = request.ended_s - request.arrival.at_s - request.ttft_s  # for room in the pool of decoding as well
        gap_s = max(request.longest_step_s, waited_s / max(1, request.arrival.answer - 1))
        late.first.append(request.ttft_s / ttft_s)
        late.longest.append(gap_s / tbt_s)
        late.gaps.append(gap_s / tbt_s)
    return late


def coupled(host: HostLaws, hosts: int, chunk: int, limits: Limits, arrivals: list[TracedPrompt]) -> Lateness:
    """Serves by engines that do both; nothing is kept of prompts. All gaps."""
    longest = max(a.prompt.tokens + a.answer for a in arrivals)
    pool = SimulatedPool(
        layers=1, blocks=host.tokens // 128, block=128, longest=longest, most=MOST, chunk=chunk or longest
    )  # fmt: skip
    shares: list[list[TracedPrompt]] = [[] for _ in range(hosts)]
    for number, arrival in enumerate(arrivals):  # in turns: as even as a router that knows no lengths can be
        shares[number % hosts].append(arrival)
    each = [_alone(pool, host, share, limits) for share in shares]
    return Lateness(*(list(chain.from_iterable(parts)) for parts in zip(*each, strict=True)))


def _alone(pool: SimulatedPool, host: HostLaws, arrivals: list[TracedPrompt], limits: Limits) -> Lateness:
    clock = VirtualClock()
    engine, _ = pool.engine(clock, host.round_s)
    told: dict[int, tuple[TracedPrompt, list[float]]] = {}
    left = deque(arrivals)
    while left or engine.has_work:
        if not engine.has_work:
            clock.now = max(clock.now, left[0].at_s)
        while left and left[0].at_s <= clock.now:
            params = SamplingParams(max_tokens=left[0].answer, ignore_eos=True, temperature=0)
            told[engine.add([0] * left[0].prompt.tokens, params)] = left.popleft(), []
        for output in engine.step():
            told[output.request_id][1].append(clock.now)
    late = Lateness([], [], [])
    for arrival, times in told.values():
        ttft_s, tbt_s = limits(arrival)
        late.first.append((times[0] - arrival.at_s) / ttft_s)
        gaps = [(b - a) / tbt_s for a, b in pairwise(times)]
        late.longest.append(max(gaps, default=0.0))
        late.gaps.extend(gaps)
    return late


if __name__ == "__main__":
    main()
