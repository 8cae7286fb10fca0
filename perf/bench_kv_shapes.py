"""Two questions about --kv-sparsity: should layers keep unequal numbers of tokens, and how many rows should be scored?
The measure is the recall of the demo's model by the shape of its budgets, on transformers.

The policy is that of ``--kv-sparsity evict`` (blocks of 16, first layer full), played on a cache of transformers, whose
layers may have different lengths. `flat` is the engine's way: one choice for all sparse layers. `by layer` keeps as
many blocks, but each layer chooses its own. With `pyramid` earlier layers keep more and later ones less, in even steps
from three halves to a half of the budget; `inverted` is the reverse. All keep as much together.

    python perf/bench_kv_shapes.py --write
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from bench_kv_sparsity import MODEL, PAIRS, RECENT, SIZE, budget_of, held_out_tokens
from common import parser_of, record
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from lamina.kv.sparsity import KvBudget, choose_dropped
from lamina.models.tokenizer import load_tokenizer

sys.path.insert(0, str(MODEL.parents[1]))

from tiny_lm.recall import RecallPrompt, RecallTask

# By how much of the mean the last sparse layer's budget differs from it, and the first one's the other way.
SLOPES = {"flat": 0.0, "by layer": 0.0, "pyramid": -0.5, "inverted": 0.5}
SINK, WINDOW = 4, 16  # of the shapes


class ShapedRecall:
    """The model twice: one tells what rows attend, the other goes on with caches of unequal layers."""

    def __init__(self) -> None:
        def load(attention: str) -> Any:
            return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation=attention)

        self._telling, self._going = load("eager").eval(), load("sdpa").eval()
        self._told: dict[tuple[int, ...], tuple[list[Tensor], Any, Tensor]] = {}

    def right(self, prompt: RecallPrompt, order: str, shape: str, budget: int, rows: int) -> bool:
        """Returns whether greedy decoding answers the question, after a prompt that has lost blocks."""
        seen = prompt.tokens if order == "seen" else prompt.tokens[: -prompt.asked]
        weights, cache, logits = self._read(seen)
        pruned, length = DynamicCache(), len(seen)
        for layer, kept in enumerate(kept_tokens(weights, shape, budget, rows)):
            k, v = cache.layers[layer].keys, cache.layers[layer].values
            pruned.update(k[:, :, kept], v[:, :, kept], layer)
        for number, token in enumerate(prompt.tokens[length:]):
            logits = self._step(token, length + number, pruned)
        answer = list[int]()
        for number in range(len(prompt.answer)):
            answer.append(int(logits.argmax()))
            logits = self._step(answer[-1], len(prompt.tokens) + number, pruned)
        return answer == prompt.answer

    def _read(self, tokens: list[int]) -> tuple[list[Tensor], Any, Tensor]:
        """Returns, by layer, what each of the last rows attends, [heads, rows, tokens], then the cache, and the logits
        of the last row.
        """
        key = tuple(tokens)
        if key not in self._told:
            out = self._telling(torch.tensor([tokens]), use_cache=True, output_attentions=True)
            weights = [x[0, :, -64:].clone() for x in out.attentions]
            self._told = {key: (weights, out.past_key_values, out.logits[0, -1])}  # shapes of one prompt take turns
        return self._told[key]

    def _step(self, token: int, position: int, cache: DynamicCache) -> Tensor:
        ids, at = (torch.tensor([[number]]) for number in (token, position))
        logits: Tensor = self._going(ids, position_ids=at, past_key_values=cache).logits[0, -1]
        return logits


def kept_tokens(weights: Sequence[Tensor], shape: str, budget: int, rows: int) -> list[Tensor]:
    """Returns, by layer, the tokens that stay. The first layer keeps all."""
    length, sparse = weights[0].shape[-1], len(weights) - 1
    blocks = -(-length // SIZE)
    by_layer = [_by_block(x[:, -rows:], blocks) for x in weights[1:]]
    if shape == "flat":
        together = sum(by_layer[1:], by_layer[0])
        by_layer = [together] * sparse
    kept = [torch.arange(length)]
    steps = np.linspace(-SLOPES[shape], SLOPES[shape], sparse) if sparse > 1 else [0.0]
    for scores, step in zip(by_layer, steps, strict=True):
        of = KvBudget(round(budget * (1 + step) / SIZE) * SIZE, SINK, RECENT, SIZE)
        gone = set(choose_dropped(scores.tolist(), (), length, of))
        kept.append(torch.tensor([t for t in range(length) if t // SIZE not in gone]))
    return kept


def _by_block(weights: Tensor, blocks: int) -> Tensor:
    each = weights.double().sum((0, 1))
    padded = torch.nn.functional.pad(each, (0, blocks * SIZE - len(each)))
    return (padded.view(blocks, SIZE).sum(1) * (1 << 24)).long()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=64, help="questions of each row")
    parser.add_argument("--distances", type=int, nargs="+", default=[256, 1024], help="tokens of text between")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.15, 0.1], help="of the prompt's tokens")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 64], help="of flat besides")
    parser.add_argument("--orders", nargs="+", default=["seen", "later"], choices=["seen", "later"])
    args = parser.parse_args()
    tokenizer = load_tokenizer(str(MODEL), trust_remote_code=False)
    filler = held_out_tokens(tokenizer)
    cells = [(shape, WINDOW) for shape in SLOPES] + [("flat", n) for n in args.rows]
    settings = {"prompts": args.prompts, "full_layers": 1, "block_size": SIZE, "recent": RECENT}
    task, recall = RecallTask(tokenizer), ShapedRecall()
    for distance, pairs, order in product(args.distances, PAIRS, args.orders):
        prompts = task.prompts(filler, distance, count=args.prompts, pairs=pairs)
        count = dict.fromkeys(product(args.shares, cells), 0)
        for prompt in prompts:
            for share, (shape, rows) in count:
                budget = budget_of(len(prompt.tokens), share)
                with torch.inference_mode():
                    count[share, (shape, rows)] += recall.right(prompt, order, shape, budget, rows)
        for (share, (shape, rows)), answered in count.items():
            line = {
                "shape": shape, "rows": rows, "order": order, "distance": distance, "pairs": pairs, "share": share,
                "recall": answered / args.prompts,
            }  # fmt: skip
            record("bench_kv_shapes", settings, line, write=args.write)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
