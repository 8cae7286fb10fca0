"""Times of a token with and without early Q, over an emulated link and emulated devices: the paper's figure 14.

A tiny model with the proportions of LLaMA-65B (G = 1) or LLaMA3-70B (G = 8) runs on one compute and one memory worker.
Slices, attention and link take the times of the cost model for a layer on 2 H100 + 4 H20, with --batch sequences of
4,096 tokens, multiplied by --slower. All processes, messages and threads are real. Three ways take
turns:

- early: Q leaves before K and V are computed, and memory workers attend stored tokens meanwhile
- captured: Q leaves with K and V, and memory workers attend stored tokens while K and V arrive
- apart: as captured, and memory workers wait for K and V before they attend

``expected_s`` is arithmetic on the same times, of a token in each way. Prints a JSON line for each model and batch;
--write appends it to perf/results/bench_early_q.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from common import cpu_pressure, parser_of, record
from paper_figures import batch_load, costs_of, table5_pair
from reference_model import made

from lamina import LLM, SamplingParams
from lamina.tools.plan.message_sizes import message_bytes_of
from lamina.tools.plan.model_facts import paper_models

LAYERS, HIDDEN, HEADS = 8, 256, 8
# Model -> KV heads, the width of its MLP for HIDDEN, and the share that the paper's overlap saves at most.
MODELS = {"llama-65b": (HEADS, 688, 0.132), "llama3-70b": (1, 896, 0.035)}
WAYS = {"early": (True, True), "captured": (False, True), "apart": (False, False)}  # early Q, overlap
PROMPT = list(range(5, 21))


class Times(NamedTuple):
    """Seconds of one layer: its slice, its attention, and its messages on the wire; ``latency_s``: of each message."""

    slice_s: float
    attention_s: float
    q_s: float
    kv_s: float
    o_s: float
    latency_s: float
    q_share: float = 1.0  # of the slice, before Q

    def layer(self, *, early_q: bool, overlap: bool) -> float:
        """Return the seconds from O to O of the next layer."""
        q_sent = self.slice_s * (self.q_share if early_q else 1.0)
        q_there = q_sent + self.q_s
        kv_there = max(self.slice_s, q_there) + self.kv_s
        begin = q_there if overlap else max(q_there, kv_there)
        return max(begin + self.attention_s, kv_there) + self.o_s + 2 * self.latency_s


def times_of(name: str, batch: int, slower: float) -> Times:
    """Return the times of a layer by the cost model, ``slower`` times over."""
    model, where = paper_models()[name], table5_pair(name, 1)[0]
    assert where.memory is not None
    costs = costs_of(model)
    step, sent = costs.step(where, batch_load(batch, 4096)), message_bytes_of(model, where, batch)
    cards = min(where.ranks, where.memory_workers)
    bandwidth = cards * costs.link.bandwidth(where.compute, where.memory)
    each = slower / model.num_layers
    q_s, kv_s, o_s = (each * x / bandwidth for x in (sent.q, sent.kv, sent.o))
    latency_s = slower * costs.link.round_trip_s / 2
    return Times(each * step.model_s, each * step.attention_s, q_s, kv_s, o_s, latency_s)


def shares_of(path: Path) -> tuple[float, ...]:
    """Return the shares of a middle slice after which Q, and K and V, leave."""
    from lamina.converter.explain import send_shares
    from lamina.models.meta_capture import plan_cuts

    return send_shares(plan_cuts(str(path)).program.slices[1])


def seconds_of_a_token(path: Path, times: Times, tokens: int, *, early_q: bool, overlap: bool) -> float:
    """Return the median seconds of a token of one sequence."""
    q_bytes = HIDDEN * 2
    os.environ["LAMINA_EMULATE"] = json.dumps(
        {"slice_s": [times.slice_s], "attention_s": times.attention_s, "early_q": early_q}
    )
    link = f"emulate+shm?latency_ms={times.latency_s * 1e3}&gbps={q_bytes * 8 / times.q_s / 1e9}"
    stamps = list[float]()
    with LLM(str(path), transport=link, memory_workers=1, overlap=overlap, attention="emulate") as llm:
        llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        engine = llm.engine
        engine.add(PROMPT, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        while engine.has_work:
            if engine.step():
                stamps.append(time.perf_counter())
    return statistics.median(b - a for a, b in pairwise(stamps[4:]))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 16, 32], help="sequences of the modelled batch")
    parser.add_argument("--slower", type=float, default=20.0, help="factor on all times")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for name in args.models.split(","):
        kv_heads, width, paper = MODELS[name]
        shape = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
                 "num_key_value_heads": kv_heads, "intermediate_size": width, "vocab_size": 512}  # fmt: skip
        with made("bfloat16", shape, 512) as path:
            share, _ = shares_of(path)
            for batch in args.batch:
                times = times_of(name, batch, args.slower)._replace(q_share=share)
                settings = {"model": name, "batch": batch, "slower": args.slower, "tokens": args.tokens}
                print(record("bench_early_q", settings, compare(path, times, paper, args), write=args.write))


def compare(path: Path, times: Times, paper: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a token in each way, measured and expected, and what early Q saves."""
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    pressure = cpu_pressure()
    for _ in range(args.rounds):
        for way in random.sample(list(WAYS), len(WAYS)):
            early_q, overlap = WAYS[way]
            took[way].append(seconds_of_a_token(path, times, args.tokens, early_q=early_q, overlap=overlap))
            print(way, took[way][-1], file=sys.stderr)
    measured = {way: statistics.median(each) for way, each in took.items()}
    # The last slice, which sends nothing, takes the time of any other one.
    expected = {
        way: LAYERS * times.layer(early_q=early_q, overlap=overlap) + times.slice_s
        for way, (early_q, overlap) in WAYS.items()
    }
    return {
        "times_s": times._asdict(),
        "measured_s": measured,
        "expected_s": expected,
        "saved": {w: 1 - measured["early"] / measured[w] for w in ("captured", "apart")},
        "saved_expected": {w: 1 - expected["early"] / expected[w] for w in ("captured", "apart")},
        "paper_most": paper,
        "cpu_pressure_avg10": {"before": pressure, "after": cpu_pressure()},
    }


if __name__ == "__main__":
    main()
