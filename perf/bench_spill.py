"""The cost of a loan for a step (arXiv 2401.02669, figure 11), and a small replay of short and long prompts by
partition.

loans: one sequence decodes with all of its K and V at home, and with half of them on loan, in turns of a few steps on
the same cores. Two engines of a compute worker and two memory workers each are alike but for their memory. Wall time of
a step, and CPU time of all workers of an engine, which depends little on who else uses the machine. With --slow N
devices and link are emulated. They are N times as slow as a layer of Llama 8B on an H100, its K and V on H20, over 25
Gb/s and 10 us. The time of this host's processes themselves then counts for little. replay: the shipped model serves a
mix of prompts, of which some are long, over two memory workers of little memory, by each partition in turn. Tokens a
second, rounds, bytes to and from memory workers, preemptions. Figure 8 at the size of its shapes is modelled:
perf/model_spill.py.

Prints JSON lines; --write appends them to perf/results/bench_spill.jsonl.

    python perf/bench_spill.py loans --length 8192 --write
    python perf/bench_spill.py loans --length 8192 --slow 200 --write
    python perf/bench_spill.py replay --write
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_decode import DecodeLamina
from common import cpu_pressure, parser_of, record, spread
from reference_model import made

from lamina import LLM, SamplingParams
from lamina.utils.emulated_device import VARIABLE
from lamina.workers.compute.kv_capacity import store_bytes

ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
SHAPE = {**ATTENTION, "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
SHIPPED = "examples/tiny_lm/model"
TURN_STEPS = 8
WORKERS = 2


def emulated(slow: float) -> str:
    """Have workers that start from now on take the time of these devices; the transport for them."""
    layer, share = 4, 0.8  # heads of Llama 8B over those of SHAPE, and the part of peak bandwidths that is reached
    slice_s, byte_s = slow * 436e6 / (share * 3.35e12), slow * layer / (share * 4.0e12)
    os.environ[VARIABLE] = json.dumps({"slice_s": [slice_s], "attention_byte_s": byte_s})
    return f"emulate+shm?latency_ms={0.01 * slow:g}&gbps={25 / slow / layer:g}"


def loans(length: int, turns: int, transport: str, slow: float) -> dict[str, Any]:
    """Measures a sequence of ``length`` tokens: medians of steps at home and half on loan, and CPU seconds
    of a step.
    """
    prompt, tokens = [7 * n % 1000 for n in range(length)], (turns + 4) * (TURN_STEPS + 1)
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "memory_workers": WORKERS,
        "partition": "spill",
        "transport": emulated(slow) if slow else transport,
        "attention": "emulate" if slow else "auto",
        "prefill_workers": int(bool(slow)),  # else prompts, too, cross the slow links again and again
    }
    with made("bfloat16", SHAPE, 2 * length) as path:
        whole = length + tokens + 4096
        sizes = {"home": whole, "half": (length + tokens) // 2 + length // 32}
        players = {
            name: DecodeLamina(path, [prompt], tokens, kv_memory=str(kv_bytes(held)), **options)
            for name, held in sizes.items()
        }
        try:
            print("prompts are read: turns begin", file=sys.stderr, flush=True)
            line = alternate(players, turns)
            half, home = (line["step_s"][name]["median"] for name in ("half", "home"))
            lends = {name: lent(p.llm) for name, p in players.items()}
            return {**line, "half_over_home": round(half / home, 3), "on_loan": lends}
        finally:
            for player in players.values():
                player.close()


def kv_bytes(tokens: int) -> int:
    """Returns the KV bytes of SHAPE in bfloat16."""
    from lamina.ops.attention.spec import AttentionSpec
    from lamina.protocol.step_plan import LayerShape

    shape = LayerShape(8, 2, 128, 128, AttentionSpec(scale=1.0).encode())
    return store_bytes([shape] * SHAPE["num_hidden_layers"], torch.bfloat16, tokens, 32)


def lent(llm: LLM) -> float:
    """Returns the share, of the blocks that memory workers use, that lies with a creditor."""
    used = sum(sum(n) for n in llm.engine.worker_info.num_blocks) - sum(llm.engine.free_blocks)
    return round(sum(llm.engine.scheduler_stats.borrowed_blocks or []) / used, 3)


def alternate(players: dict[str, DecodeLamina], turns: int) -> dict[str, Any]:
    """Steps of all in turns."""
    steps = {name: list[float]() for name in players}
    cpu, pressure = dict.fromkeys(players, 0.0), [cpu_pressure()]
    for turn in range(turns + 1):
        for name, player in players.items():
            before = cpu_s(player.llm)
            times = player.turn(TURN_STEPS)
            if turn:  # the first one warms up
                steps[name] += times
                cpu[name] += cpu_s(player.llm) - before
        pressure.append(cpu_pressure())
    count = turns * (TURN_STEPS + 1)
    return {
        "step_s": {name: spread(each) for name, each in steps.items()},
        "cpu_s_of_a_step": {name: seconds / count for name, seconds in cpu.items()},
        "cpu_pressure_avg10": pressure,
    }


def cpu_s(llm: LLM) -> float:
    """Returns the CPU seconds that all workers of an engine have used."""
    ticks = 0
    for pid in llm.pools.pids.values():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def replay(share: float, rounds: int, transport: str) -> dict[str, Any]:
    """The same prompts by each partition, in turns."""
    rng = random.Random(0)
    prompts = [
        [
            rng.randrange(5, 2000)
            for _ in range(rng.randint(1100, 1600) if rng.random() < share else rng.randint(30, 250))
        ]
        for _ in range(30)
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=rng.randint(8, 48), ignore_eos=True) for _ in prompts]
    options: dict[str, Any] = {
        "memory_workers": WORKERS,
        "transport": transport,
        "kv_memory": "7MiB",
        "max_model_len": 1696,
    }
    engines = {
        name: LLM(SHIPPED, partition=name, dtype="bfloat16", **options) for name in ("spill", "request", "token")
    }
    try:
        seconds = {name: list[float]() for name in engines}
        answers = dict[str, Any]()
        for _ in range(rounds):
            for name, llm in engines.items():
                start = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds[name].append(time.perf_counter() - start)
                answers[name] = [o.outputs[0].token_ids for o in outputs]
        tokens = sum(len(ids) for ids in answers["spill"])
        return {"long_share": share, "runs": {name: told(llm, seconds[name], tokens) for name, llm in engines.items()}}
    finally:
        for llm in engines.values():
            llm.close()


def told(llm: LLM, seconds: list[float], tokens: int) -> dict[str, Any]:
    """Returns the reports of all its rounds."""
    memory = [v for k, v in llm.stats().items() if k.startswith("memory")]
    return {
        "seconds": spread(seconds),
        "tokens_s": round(tokens / spread(seconds)["median"], 1),
        "preemptions": llm.engine.scheduler.num_preemptions,
        "bytes": {k: sum(v.get(k, 0) for v in memory) for k in ("bytes_received", "bytes_sent", "stored_bytes")},
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("loans", "replay"))
    parser.add_argument("--length", type=int, default=8192, help="loans: tokens of the sequence")
    parser.add_argument("--turns", type=int, default=12, help="of each engine; replay: rounds")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--slow", type=float, default=0.0, help="loans: emulate devices, so many times as slow (none)")
    parser.add_argument("--share", type=float, default=0.1, help="replay: of long prompts")
    args = parser.parse_args()
    settings = {k: v for k, v in vars(args).items() if k != "write"}
    if args.what == "loans":
        figures = loans(args.length, args.turns, args.transport, args.slow)
    else:
        figures = replay(args.share, args.turns, args.transport)
    print(record("bench_spill", settings, figures, write=args.write))


if __name__ == "__main__":
    main()
