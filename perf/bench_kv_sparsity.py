"""What --kv-sparsity costs in recall, on the demo's language model: key-value pairs, then ordinary text, then one
question; one line for each distance, number of pairs and budget. Real workers. The question is part of the prompt
(``seen``), or comes when the prompt is stored and has lost blocks, a token at a time (``later``).

    python perf/bench_kv_sparsity.py --write
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
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
FORMS, ORDERS = ("evict", "select"), ("seen", "later")
AT_ONCE = 16  # questions
SHARES = (1.0, 0.5, 0.25, 0.1)  # of the prompt's tokens; 1: all
RECENT, LEAST, SIZE = 16, 64, 16  # tokens; the last one of a block


def right(llm: LLM, prompts: list[RecallPrompt], order: str) -> float:
    """Share of questions that greedy decoding answers."""
    if order == "later":
        parts = [prompts[i : i + AT_ONCE] for i in range(0, len(prompts), AT_ONCE)]
        return sum(_right_later(llm, part) for part in parts) / len(prompts)
    params = SamplingParams(temperature=0.0, max_tokens=len(prompts[0].answer), ignore_eos=True)
    outputs = llm.generate([p.tokens for p in prompts], params, use_tqdm=False)
    return sum(o.outputs[0].token_ids == p.answer for o, p in zip(outputs, prompts, strict=True)) / len(prompts)


def _right_later(llm: LLM, prompts: list[RecallPrompt]) -> int:
    asked, length = [p.tokens[-p.asked :] for p in prompts], len(prompts[0].answer)
    answers: list[list[int]] = [[] for _ in prompts]
    with llm.lockstep([p.tokens[: -p.asked] for p in prompts], prompts[0].asked + length) as rows:
        for tokens in zip(*asked, strict=True):
            rows.logits()
            rows.choose(tokens)
        for _ in range(length):
            best = [int(np.frombuffer(logits, "<f4").argmax()) for logits in rows.logits()]
            rows.choose(best)
            for answer, token in zip(answers, best, strict=True):
                answer.append(token)
    return sum(answer == p.answer for answer, p in zip(answers, prompts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64, help="questions of each row")
    parser.add_argument("--distances", type=int, nargs="+", default=DISTANCES, help="tokens of text between")
    parser.add_argument("--full-layers", type=int, default=1, help="layers that keep all")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the prompt's tokens; 1: all")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS, help="of --kv-sparsity")
    parser.add_argument("--orders", nargs="+", default=ORDERS, choices=ORDERS, help="when the question comes")
    parser.add_argument("--write", action="store_true", help="append to perf/results")
    args = parser.parse_args()
    tokenizer = load_tokenizer(str(MODEL), trust_remote_code=False)
    filler = np.array(tokenizer.encode(held_out_text(), add_special_tokens=False, verbose=False))
    settings = {"prompts": args.prompts, "full_layers": args.full_layers, "block_size": SIZE, "recent": RECENT}
    for distance, share in product(args.distances, args.shares):
        asked = {n: RecallTask(tokenizer).prompts(filler, distance, count=args.prompts, pairs=n) for n in PAIRS}
        for form, (pairs, prompts) in product(args.forms if share < 1 else ["none"], asked.items()):
            length = max(len(p.tokens) for p in prompts)
            budget = max(LEAST, int(length * share) // SIZE * SIZE) if share < 1 else length
            options = {"kv_sparsity": form}
            if form != "none":
                options |= {"kv_budget": budget, "kv_recent": RECENT, "kv_full_layers": args.full_layers}
            for order in args.orders:
                with LLM(
                    str(MODEL), transport="loopback", block_size=SIZE, enable_prefix_caching=False, **options
                ) as llm:
                    recall = right(llm, prompts, order)
                    evictions = llm.engine.scheduler.evictions
                line = {
                    "form": form, "order": order, "distance": distance, "pairs": pairs, "share": share,
                    "budget": budget, "length": length, "recall": recall,
                    "dropped_blocks": evictions.num_dropped if evictions else 0,
                }  # fmt: skip
                record("bench_kv_sparsity", settings, line, write=args.write)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
