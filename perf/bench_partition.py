"""The evenness with which memory workers share the attention of a ragged batch, by partition.

Prompts of very different lengths are decoded together; what each memory worker's attention reads from its store, in
bytes, comes from the workers' own counters. Bytes do not depend on how busy the machine is. Prints a table; --write
appends JSON lines to perf/results/bench_partition.jsonl.

    python perf/bench_partition.py --memory-workers 2,3 --weights 0.7,0.3
"""

from __future__ import annotations

import random
from typing import Any

from common import parser_of, record

from lamina import LLM, SamplingParams
from lamina.config.partition import PARTITIONS

MODEL = "examples/tiny_lm/model"


def measure(partition: str, weights: list[float], prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Bytes read by each memory worker, and the most that one of them reads beyond its part, as a share of the part."""
    text = ",".join(map(str, weights))
    with LLM(MODEL, transport="loopback", memory_workers=len(weights), memory_weights=text, partition=partition) as llm:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        read = [v["stored_bytes"] for k, v in sorted(llm.stats().items()) if k.startswith("memory")]
    parts = [sum(read) * w / sum(weights) for w in weights]
    worst = max(r / p for r, p in zip(read, parts, strict=True)) - 1
    return {"partition": partition, "weights": weights, "read_bytes": read, "imbalance": round(worst, 4)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--memory-workers", default="2,3", help="numbers of equal memory workers, by comma")
    parser.add_argument("--weights", default="0.7,0.3", help="weights of a pool that is not equal")
    parser.add_argument("--prompts", type=int, default=24, help="prompts of 20 to 1800 tokens, decoded together")
    parser.add_argument("--tokens", type=int, default=32, help="tokens after each prompt")
    args = parser.parse_args()
    sizes = random.Random(0)
    prompts = [[sizes.randrange(5, 500) for _ in range(sizes.randint(20, 1800))] for _ in range(args.prompts)]
    pools = [[1.0] * int(n) for n in args.memory_workers.split(",")] + [[float(w) for w in args.weights.split(",")]]
    print(f"{'memory workers':<18}{'partition':<12}{'read by each, MB':<32}imbalance")
    for weights in pools:
        for partition in PARTITIONS:
            figures = measure(partition, weights, prompts, args.tokens)
            read = "  ".join(f"{n / 1e6:.1f}" for n in figures["read_bytes"])
            print(
                f"{', '.join(f'{w:g}' for w in weights):<18}{partition:<12}{read:<32}{figures['imbalance']:.1%}",
                flush=True,
            )
            settings = {"model": MODEL, "prompts": args.prompts, "tokens": args.tokens}
            record("bench_partition", settings, figures, write=args.write)


if __name__ == "__main__":
    main()
