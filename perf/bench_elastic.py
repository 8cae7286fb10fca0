"""The pause of streams while memory workers come or go, and the part of it that is the move of their KV.

Sequences with so much KV decode on real processes; there come to be more memory workers, and then as many as before,
again and again. With each pause come the bytes that went from worker to worker, and the CPU seconds that this took the
workers that stay. The floor is measured in the same run: copies of as many bytes in memory that is there, by one core.
Prints a table and JSON lines; --write appends those to perf/results/bench_elastic.jsonl.

    python perf/bench_elastic.py --write
    python perf/bench_elastic.py --transport tcp --partition token --write
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import cpu_pressure, parser_of, record, spread
from reference_model import make

from lamina import LLM, SamplingParams
from lamina.engine.scheduler_factory import check_kv_capacity
from lamina.executor.elastic import ResizeResult

# Much KV for few weights: 64 KiB a token in half precision.
SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 256,
    "vocab_size": 512,
}
KV_BYTES = 2 * 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]  # of a token
COPIES = 9


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[80, 280], help="of KV that runs (default: 80 280)")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--few", type=int, default=2, help="memory workers before, and again")
    parser.add_argument("--many", type=int, default=4, help="memory workers in between")
    parser.add_argument("--changes", type=int, default=8)
    parser.add_argument("--kv-memory", default="512MiB", help="of each memory worker")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--partition", default="head")
    args = parser.parse_args()
    for mib in args.mib:
        with tempfile.TemporaryDirectory() as folder:
            model = make(Path(folder), "bfloat16", SHAPE, max_len=8192)
            results = measure(str(model), mib << 20, args)
        print(record("bench_elastic", {**vars(args), "mib": mib}, results, write=args.write))


def measure(model: str, nbytes: int, args: argparse.Namespace) -> dict[str, Any]:
    """Pauses, and what was moved in them."""
    tokens = nbytes // KV_BYTES // args.sequences
    prompts = [[i, *range(tokens - 1)] for i in range(args.sequences)]
    prompts = [[x % SHAPE["vocab_size"] for x in prompt] for prompt in prompts]
    options = {"transport": args.transport, "partition": args.partition, "kv_memory": args.kv_memory}
    with LLM(model, dtype="bfloat16", memory_workers=args.few, **options) as llm:
        for prompt in prompts:
            llm.engine.add(prompt, SamplingParams(max_tokens=8000 - tokens, ignore_eos=True))
        while llm.engine.scheduler.num_waiting or step_s(llm) is None:
            llm.engine.step()
        pairs = [change(llm, args.few if i % 2 else args.many) for i in range(args.changes)]
        copies = copy_rates(max(outcome.moved_bytes for outcome, _, _ in pairs))
    pauses = [outcome.pause_s for outcome, _, _ in pairs]
    moved = [outcome.moved_bytes for outcome, _, _ in pairs]
    cpu = [sum(spent) for _, _, spent in pairs]
    results = {
        "kv_bytes": nbytes,
        "moved_bytes": moved,
        "pause_s": spread(pauses),
        "pauses_s": pauses,
        "longest_silence_s": spread([gap for _, gap, _ in pairs]),
        "cpu_s": cpu,
        "cpu_s_per_gb": spread([1e9 * s / n for s, n in zip(cpu, moved, strict=True)]),
        "copy_bytes_per_s": spread(copies),
        "floor_s": spread([n / median(copies) for n in moved]),
        "cpu_pressure": cpu_pressure(),
    }
    print(
        f"{nbytes >> 20} MiB of KV, {min(moved) >> 20} to {max(moved) >> 20} moved: paused for {median(pauses):.3f} s, "
        f"at most {max(pauses):.3f} s. Workers take {median(cpu):.3f} CPU seconds, "
        f"a copy of as much by one core {median(moved) / median(copies):.3f} s"
    )
    return results


def step_s(llm: LLM) -> float | None:
    """Returns the seconds of one pass; None where it brought no token."""
    begun = time.perf_counter()
    return time.perf_counter() - begun if llm.engine.step() else None


def change(llm: LLM, count: int) -> tuple[ResizeResult, float, list[float]]:
    """There come to be ``count`` memory workers: the outcome, the longest time without a token, and CPU seconds in
    which each worker that is left moved. Raises RuntimeError where they do not.
    """
    elastic, before = llm.pools.resizer, moving(llm)
    wanted = elastic.plan(count)
    check_kv_capacity(llm.engine.scheduler, llm.engine.worker_info, wanted.capacity)
    elastic.begin(wanted)
    last, silence, outcome = time.perf_counter(), 0.0, None
    while outcome is None:
        while not llm.engine.step():
            pass
        now = time.perf_counter()
        last, silence = now, max(silence, now - last)
        outcome = elastic.take_outcome()
    if outcome.error:
        raise RuntimeError(outcome.error)
    return outcome, silence, [s - before.get(pid, 0.0) for pid, s in moving(llm).items()]


def moving(llm: LLM) -> dict[int, float]:
    """Returns, by process of a memory worker, the CPU seconds in which it has moved KV."""
    pids = llm.pools.pids
    return {pids[name]: of.get("move_cpu_s", 0.0) for name, of in llm.stats().items() if name.startswith("memory")}


def copy_rates(nbytes: int) -> list[float]:
    """Bytes a second that one core copies, in memory that is there."""
    import torch

    source, target, rates = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(COPIES):
        begun = time.perf_counter()
        target.copy_(source)
        rates.append(nbytes / (time.perf_counter() - begun))
    torch.set_num_threads(threads)
    return rates


if __name__ == "__main__":
    main()
