"""The cost of a grammar's masks in a step: made by one thread while O is awaited, and heeded as tokens are drawn.

All take turns, so that noise of the machine hits them alike. Prints one JSON line; --write appends it to
perf/results/bench_grammar.jsonl.

    python perf/bench_grammar.py --rows 32 --vocabulary 131072 --write
    python perf/bench_grammar.py --layers 16 --write     # and whole steps of a model of 1 B, with and without

A step is at least its last product, that of the vocabulary (``head``): --hidden is the model's width. What delays it is
what ``masked`` draws take longer than ``plain`` ones, and ``made`` where no core is idle. The floor of the former is a
reading of the logits. --layers generates with a made model of that size, plain and by a schema in turns. ``step`` is
the time of a token more for all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bench_serve_peers import add_tokenizer
from common import parser_of, record, spread
from reference_model import make

from lamina import LLM, SamplingParams
from lamina.grammar.compiler import source_of
from lamina.grammar.rules import Grammars
from lamina.ops.sampling import SampleSpec
from lamina.ops.sampling.native import NativeSampling
from lamina.ops.sampling.sampling_settings import sampler_settings
from lamina.protocol.control import Vocabulary
from lamina.request import FILTERS, StructuredOutputsParams

SHORT = 8  # tokens of the shorter of two runs, which has the prompts too
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
    parser.add_argument("--layers", type=int, default=0, help="of the made model; 0 = no whole steps")
    parser.add_argument("--turns", type=int, default=12, help="of whole steps")
    parser.add_argument("--tokens", type=int, default=48, help="steps that the longer run has more")
    args = parser.parse_args()
    args.threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(args.threads)
    settings = {k: v for k, v in vars(args).items() if k != "write"}
    found = measure(args)
    if args.layers:
        found |= measure_steps(args)
    print(record("bench_grammar", settings, found, write=args.write))


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
    logits, backend = torch.randn(args.rows, args.vocabulary).bfloat16(), NativeSampling(args.threads)
    plain = [SampleSpec(i, sampler_settings(1.0, 0, 1.0, 0.0, FILTERS), i, 0) for i in range(args.rows)]
    x, head = torch.randn(args.rows, args.hidden).bfloat16(), torch.randn(args.vocabulary, args.hidden).bfloat16()
    times: dict[str, list[float]] = {"made": [], "masked": [], "plain": [], "head": []}
    tokens = list[list[int]]([] for _ in rules)
    for rule in rules:
        rule.begin(0, [])
    for at in range(args.rounds):
        began = time.perf_counter()
        for rule, new in zip(rules, tokens, strict=True):
            rule.begin(rule.num_tokens, new)
        masks = [rule.mask() for rule in rules]
        made = time.perf_counter()
        asks = [ask._replace(counter=at, allowed=mask.bits) for ask, mask in zip(plain, masks, strict=True)]
        tokens = [[token] for token in backend.sample(logits, asks)]
        masked = time.perf_counter()
        backend.sample(logits, plain)
        drawn = time.perf_counter()
        torch.mm(x, head.T)
        ended = time.perf_counter()
        for name, seconds in (("made", made - began), ("masked", masked - made), ("plain", drawn - masked)):
            times[name].append(seconds)
        times["head"].append(ended - drawn)
    found = {name: spread([1e3 * one for one in each]) for name, each in times.items()}
    middle = {name: sorted(each)[len(each) // 2] for name, each in times.items()}
    return {"ms": found, "masks of head": round((middle["masked"] - middle["plain"]) / middle["head"], 4)}


def measure_steps(args: argparse.Namespace) -> dict[str, Any]:
    """Times whole steps of all rows, plain and with a schema whose text does not end, in turns."""
    shape = {
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64,
        "num_key_value_heads": args.hidden // 256,
        "intermediate_size": 4 * args.hidden,
        "vocab_size": args.vocabulary,
    }
    prompts = [{"prompt_token_ids": [1 + i] * 16} for i in range(args.rows)]
    endless = StructuredOutputsParams(json={"type": "array", "items": {"type": "string"}, "minItems": 1000})
    with TemporaryDirectory() as folder:
        path = make(Path(folder) / "model", "bfloat16", shape)
        add_tokenizer(path, args.vocabulary)
        config = json.loads((path / "generation_config.json").read_text())
        (path / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": args.vocabulary - 1}))
        with LLM(str(path), max_model_len=1024, max_num_seqs=args.rows, enable_prefix_caching=False) as llm:

            def run(grammar: StructuredOutputsParams | None, tokens: int) -> float:
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0, structured_outputs=grammar)
                began = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert all(len(o.outputs[0].token_ids) == tokens for o in outputs), "a text ended"
                return time.perf_counter() - began

            kinds = {"plain": None, "grammar": endless}
            times = {(kind, tokens): list[float]() for kind in kinds for tokens in (SHORT, SHORT + args.tokens)}
            for _ in range(args.turns + 1):
                for (kind, tokens), each in times.items():
                    each.append(run(kinds[kind], tokens))
    seconds = {key: each[1:] for key, each in times.items()}  # the first turn warms up
    steps = {
        kind: 1e3 * (median(seconds[kind, SHORT + args.tokens]) - median(seconds[kind, SHORT])) / args.tokens
        for kind in kinds
    }
    runs = {f"{kind} {tokens}": spread(each) for (kind, tokens), each in seconds.items()}
    return {"step_ms": steps, "grammar of plain": round(steps["grammar"] / steps["plain"], 4), "run_s": runs}


if __name__ == "__main__":
    main()
