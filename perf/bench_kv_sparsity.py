"""What --kv-sparsity evict costs in recall, on the demo's language model: key-value pairs, then ordinary text, then one
question, which is part of the prompt; one line for each distance, number of pairs and budget. Real workers.

    python perf/bench_kv_sparsity.py --write
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from common import record

from lamina import LLM, SamplingParams
from lamina.models.tokens import load_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny_lm.corpus import held_out_text  # noqa: E402
from tiny_lm.recall import RecallPrompt, RecallTask  # noqa: E402

MODEL = EXAMPLES / "tiny_lm" / "model"
DISTANCES = (256, 1024, 1800)
PAIRS = (4, 24)
SHARES = (1.0, 0.5, 0.25, 0.1)  # of the prompt's tokens; 1: all
RECENT, LEAST, SIZE = 16, 64, 16  # tokens; the last one of a block


def right(llm: LLM, prompts: list[RecallPrompt]) -> float:
    """Share of questions that greedy decoding answers."""
    params = SamplingParams(temperature=0.0, max_tokens=len(prompts[0].answer), ignore_eos=True)
    outputs = llm.generate([p.tokens for p in prompts], params, use_tqdm=False)
    return sum(o.outputs[0].token_ids == p.answer for o, p in zip(outputs, prompts, strict=True)) / len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64, help="questions of each row")
    parser.add_argument("--distances", type=int, nargs="+", default=DISTANCES, help="tokens of text between")
    parser.add_argument("--full-layers", type=int, default=1, help="layers that keep all")
    parser.add_argument("--write", action="store_true", help="append to perf/results")
    args = parser.parse_args()
    tokenizer = load_tokenizer(str(MODEL), trust_remote_code=False)
    filler = np.array(tokenizer.encode(held_out_text(), add_special_tokens=False, verbose=False))
    size = SIZE
    for distance in args.distances:
        asked = {n: RecallTask(tokenizer).prompts(filler, distance, count=args.prompts, pairs=n) for n in PAIRS}
        for share in SHARES:
            for pairs, prompts in asked.items():
                length = max(len(p.tokens) for p in prompts)
                budget = max(LEAST, int(length * share) // size * size)
                evict = {"kv_sparsity": "evict", "kv_budget": budget, "kv_recent": RECENT}
                options = {**evict, "kv_full_layers": args.full_layers} if share < 1 else {}
                with LLM(
                    str(MODEL), transport="loopback", block_size=size, enable_prefix_caching=False, **options
                ) as llm:
                    recall = right(llm, prompts)
                    evictions = llm.engine.scheduler.evictions
                found = {
                    "distance": distance, "pairs": pairs, "share": share, "budget": budget if share < 1 else length,
                    "length": length, "recall": recall, "dropped_blocks": evictions.num_dropped if evictions else 0,
                }  # fmt: skip
                settings = {"prompts": args.prompts, "full_layers": args.full_layers, "block_size": size}
                record("bench_kv_sparsity", {**settings, "recent": RECENT}, found, write=args.write)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
