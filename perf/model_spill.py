"""Modelled: what --partition spill gains where some requests are long (the mixes of arXiv 2401.02669, figure 8).

The shipped Engine, Scheduler and loan policy serve a mix of short and long requests on a virtual clock, with four
memory workers, by each partition. A long request takes half or more of what one worker holds. Nothing is computed. A
step takes the time of the planner's cost model for its slices, and the reading of the worker that has the most to read
of K and V. Messages, byte by byte as the codec lays them out, take their time on the busiest card of each direction.
Prompts take no time, as prefill workers elsewhere compute them, nor does what a preempted request has to compute again:
preemptions are counted. Requests wait at once, so tokens a second are those of a full pool. Prints a table; --write
appends JSON lines to perf/results/model_spill.jsonl.

    python perf/model_spill.py --write
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from common import parser_of, record

from lamina.config.engine_config import CHUNK_TOKENS
from lamina.config.flat_options import make_config
from lamina.engine.engine import Engine
from lamina.facts.hardware import DEVICES
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.capacity import partition_of
from lamina.protocol.codec import LayerGroup, RowCounts, count_rows, messages, row_layout, worker_pieces
from lamina.protocol.control import RunRound
from lamina.protocol.kv_placement import KvPlacement
from lamina.protocol.step_plan import LayerShape, RowRange
from lamina.request import SamplingParams
from lamina.tools.plan.cost_model import CostModel
from lamina.tools.plan.deployment import Deployment
from lamina.tools.plan.model_facts import paper_models
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.lossless import SimulatedExecutor, simulated_ready
from lamina.tools.plan.tables import baseline, constants, network_link

WORKERS, BLOCK, ITEMSIZE = 4, 32, 2
SHAPE = LayerShape(64, 8, 128, 128, AttentionSpec(scale=0.1).encode())  # of llama3-70b
PREFILL_WORKERS = 64  # that take no time


class Pool(SimulatedExecutor):
    """Memory workers that share sequences by a partition, in the time of a step's busiest parts."""

    def __init__(self, clock: VirtualClock, name: str, tokens: int, costs: CostModel, where: Deployment) -> None:
        """``tokens``: that each worker holds."""
        longest = WORKERS * tokens if name != "request" else tokens
        self._costs, self._where, self._groups = costs, where, list[LayerGroup]()
        self._next = 0.0
        partition = partition_of(name, [SHAPE], [1.0] * WORKERS, longest)
        self._pieces = [worker_pieces([SHAPE], [0], partition, w, self._groups)[0] for w in range(WORKERS)]
        stripe = partition.stripe_chunks * CHUNK_TOKENS
        self._placement = KvPlacement(partition.num_kv_shards, stripe, partition.single_shard)
        ready = msgspec.structs.replace(
            simulated_ready(num_layers=costs.model.num_layers, num_blocks=0, block_size=BLOCK, max_len=tokens),
            windows=[g.window for g in self._groups], kv_shards=[g.kv_shards for g in self._groups],
            stripe_blocks=stripe // BLOCK,
            single_shard=partition.single_shard, num_blocks=[[tokens // BLOCK]] * WORKERS,
            holders=[[w] for w in range(WORKERS)],
        )  # fmt: skip
        super().__init__(clock, ready, lambda load: self._next)
        self.spent = Counter[str]()

    def submit(self, new: RunRound) -> None:
        steps = [list(step.plan.rows) for step in new.steps if step.plan.rows]
        self._next = sum(self._step(rows) for rows in steps)
        super().submit(new)

    def _step(self, rows: Sequence[RowRange]) -> float:
        costs, where, layers = self._costs, self._where, self._costs.model.num_layers
        number = sum(row.count for row in rows)
        parts = [
            costs.linear(where, number), costs.elementwise(where, number), costs.collective(where, number)
        ]  # fmt: skip
        device, (attention,) = DEVICES[where.memory.name], costs.model.attentions  # type: ignore[union-attr]
        stored, out, back = [], [], []
        for worker, pieces in enumerate(self._pieces):
            laid = row_layout(rows, self._groups[worker].kv_shards, 0, self._placement)
            here = tuple(count_rows(laid) if g == worker else RowCounts(0) for g in range(WORKERS))
            sizes = messages(pieces, here, ITEMSIZE)
            stored.append(
                sum(r.first for r in laid.whole_sequences)
                + sum((n.high - n.low) * n.rows.count for n in laid.merge_nodes)
            )
            out.append(sizes.q_bytes + sizes.kv_bytes)
            back.append(sizes.o_bytes)
        reading = layers * costs._reading(device, attention)[0](attention.kv_bytes * max(stored))
        cards = where.num_compute * costs.link.bandwidth(where.compute)
        card = costs.link.bandwidth(device)
        wire = max(sum(out) / cards, sum(back) / cards, max(out) / card, max(back) / card)
        network = layers * (costs.link.round_trip_s + wire)
        self.spent += Counter({"model": sum(p.seconds for p in parts), "attention": reading, "network": network})
        return sum(p.seconds for p in parts) + reading + network


def mix(share: float, count: int, tokens: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, answer) of each request: so many of them long, of half to all of what a worker holds."""
    rng, requests = random.Random(seed), list[tuple[int, int]]()
    for number in range(count):
        long = int((number + 1) * share) > int(number * share)
        answer = rng.randint(64, 512)
        prompt = rng.randint(tokens // 2, tokens - 1024) if long else rng.randint(256, 2048)
        requests.append((prompt, answer))
    rng.shuffle(requests)
    return requests


def serve(
    name: str, requests: list[tuple[int, int]], tokens: int, costs: CostModel, where: Deployment
) -> dict[str, Any]:
    """Tokens a second until the last request has begun, and what a step's time was spent on."""
    clock = VirtualClock()
    wire = Pool(clock, name, tokens, costs, where)
    config = make_config({
        "transport": "shm", "block_size": BLOCK, "max_num_seqs": 4096, "memory_workers": 1, "prefill_chunk": tokens,
        "prefill_workers": PREFILL_WORKERS, "enable_prefix_caching": False, "partition": name,
    })  # fmt: skip
    engine, given = Engine(wire, config, clock), 0
    for prompt, answer in requests:
        engine.add([0] * prompt, SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0))
    had, running = dict[int, int](), list[int]()
    while engine.has_work and engine.scheduler.num_waiting:
        for output in engine.step():
            length = len(output.outputs[0].token_ids)
            given += length - had.get(output.request_id, 0)
            had[output.request_id] = length
        running.append(engine.scheduler.num_running)
    return {
        "partition": name, "tokens_s": given / clock.now, "batch": sum(running) / len(running),
        "preemptions": engine.scheduler.num_preemptions,
        "shares": {k: round(v / clock.now, 3) for k, v in wire.spent.items()},
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shares", default="0.01,0.1,0.3", help="of long requests, by comma")
    parser.add_argument("--requests", type=int, default=600, help="in each mix")
    parser.add_argument("--tokens", type=int, default=65536, help="that each of four memory workers holds")
    parser.add_argument("--links", default="400Gbps", help="between the pools, as for lamina-launch plan")
    parser.add_argument("--seeds", type=int, default=2, help="mixes of each share; their medians are shown")
    args = parser.parse_args()
    where = Deployment(DEVICES["h100"], 2, DEVICES["h20"], WORKERS)
    for rate in args.links.split(","):
        costs = CostModel(paper_models()["llama3-70b"], constants(), network_link(rate), baseline("ideal"))
        for share in map(float, args.shares.split(",")):
            for seed in range(args.seeds):
                requests = mix(share, args.requests, args.tokens, seed)
                each = [serve(name, requests, args.tokens, costs, where) for name in ("spill", "request", "token")]
                spill, *others = [x["tokens_s"] for x in each]
                print(f"{rate} {share:.0%} seed {seed}: gain over the better of both {spill / max(others):.3f}")
                print(*(f"    {x}" for x in each), sep="\n", flush=True)
                settings = {
                    "link": rate,
                    "long_share": share,
                    "seed": seed,
                    "requests": args.requests,
                    "tokens": args.tokens,
                }
                record("model_spill", settings, {"modelled": True, "runs": each}, write=args.write)


if __name__ == "__main__":
    main()
