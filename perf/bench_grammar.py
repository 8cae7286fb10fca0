"""The cost of a grammar's masks in a step: made by one thread while O is awaited, and applied to the logits.

All take turns, so that noise of the machine hits them alike. Prints one JSON line; --write appends it to
perf/results/bench_grammar.jsonl.

    python perf/bench_grammar.py --rows 32 --vocabulary 131072 --write

A step is at least its last product, that of the vocabulary (``head``): --hidden is the model's width. What delays it is
``applied``, and of ``made`` what is longer than the attention of the last layer.
"""

from __future__ import annotations

import argparse
import os
import time
from random import Random
from typing import Any

import numpy as np
import torch
from common import parser_of, record, spread

from lamina.grammar.compiler import source_of
from lamina.grammar.rules import Grammars
from lamina.protocol.control import Vocabulary
from lamina.request import StructuredOutputsParams

ALPHABET = 'abcdefghijklmnopqrstuvwxyz0123456789 "{}[]:,.-'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 200},
        "kind": {"enum": ["small", "large", "none"]},
        "parts": {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "integer"}}}},
    },
    "required": ["name", "kind", "parts"],
    "additionalProperties": False,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=0, help="0 = all cores")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    args.threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(args.threads)
    settings = {k: v for k, v in vars(args).items() if k != "write"}
    print(record("bench_grammar", settings, measure(args), write=args.write))


def made_vocabulary(size: int) -> Vocabulary:
    """Returns all bytes, and random words of letters and JSON's marks."""
    dice, words = Random(0), dict.fromkeys(bytes([i]) for i in range(256))
    while len(words) < size - 1:
        words["".join(dice.choices(ALPHABET, k=dice.randint(2, 7))).encode()] = None
    return Vocabulary(tokens=[*words, b"\xff<end>"], special_token_ids=[size - 1], end_token_ids=[size - 1])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    grammars = Grammars()
    grammars.set_vocabulary(made_vocabulary(args.vocabulary))
    source = source_of(StructuredOutputsParams(json=SCHEMA))
    grammars.check(source)
    rules = [grammars.rule_of(source) for _ in range(args.rows)]
    dice = Random(1)
    logits = torch.randn(args.rows, args.vocabulary)
    x, head = torch.randn(args.rows, args.hidden).bfloat16(), torch.randn(args.vocabulary, args.hidden).bfloat16()
    times: dict[str, list[float]] = {"made": [], "applied": [], "head": []}
    tokens = list[list[int]]([] for _ in rules)
    for rule in rules:
        rule.begin(0, [])
    for _ in range(args.rounds):
        began = time.perf_counter()
        for rule, new in zip(rules, tokens, strict=True):
            rule.begin(rule.num_tokens, new)
        masks = [rule.mask() for rule in rules]
        made = time.perf_counter()
        rows = logits.clone()
        cloned = time.perf_counter()
        for mask, row in zip(masks, rows, strict=True):
            mask.apply(row)
        applied = time.perf_counter()
        torch.mm(x, head.T)
        ended = time.perf_counter()
        times["made"].append(made - began)
        times["applied"].append(applied - cloned)
        times["head"].append(ended - applied)
        tokens = [[int(dice.choice(np.flatnonzero(row.isfinite().numpy())))] for row in rows]
    found = {name: spread([1e3 * one for one in each]) for name, each in times.items()}
    middle = {name: sorted(each)[len(each) // 2] for name, each in times.items()}
    return {"ms": found, "applied of head": round(middle["applied"] / middle["head"], 4)}


if __name__ == "__main__":
    main()
