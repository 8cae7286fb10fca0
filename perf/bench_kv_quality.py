"""The cost of KV in 8 bits in quality, on the demo's language model: bits per byte of held-out text, and recall of
statements many tokens before. Real workers, one line for each --kv-cache-dtype.

    python perf/bench_kv_quality.py --write
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import parser_of, record

from lamina import LLM, SamplingParams
from lamina.config.engine_config import KV_CACHE_DTYPES
from lamina.models.tokenizer import load_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny_lm.corpus import held_out_text  # noqa: E402
from tiny_lm.recall import RecallTask  # noqa: E402

MODEL = EXAMPLES / "tiny_lm" / "model"
DISTANCES = (256, 1024)


def bits_per_byte(llm: LLM, tokenizer: Any, text: str, window: int) -> float:
    """Returns bits per byte as tiny_lm.evaluate does: every token once, from window / 2 to window tokens of context."""
    ids = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False, verbose=False)]
    pieces, counted, done = list[list[int]](), list[int](), 1
    while done < len(ids):
        start = max(0, done - window // 2)
        pieces.append(ids[start : start + window])
        counted.append(done - start)
        done = start + len(pieces[-1])
    outputs = llm.generate(pieces, SamplingParams(max_tokens=1, prompt_logprobs=0))
    losses = [
        -next(iter(entry.values())).logprob
        for output, first in zip(outputs, counted, strict=True)
        for entry in (output.prompt_logprobs or [])[first:]
        if entry
    ]
    return math.fsum(losses) / math.log(2) / len(text.encode())


def recall(llm: LLM, tokenizer: Any, distance: int, prompts: int, filler: str) -> float:
    """Returns the share of questions that greedy decoding answers, ``distance`` tokens after the statement."""
    ids = np.array(tokenizer.encode(filler, add_special_tokens=False, verbose=False))
    questions = RecallTask(tokenizer).prompts(ids, distance, count=prompts, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=len(questions[0].answer), ignore_eos=True)
    outputs = llm.generate([p.tokens for p in questions], params)
    return sum(o.outputs[0].token_ids == p.answer for o, p in zip(outputs, questions, strict=True)) / prompts


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--text-bytes", type=int, default=60_000, help="of the held-out text")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=64, help="questions at each distance")
    parser.add_argument("--dtype", default="float32", help="of the wire and, for auto, of the stored K and V")
    args = parser.parse_args()
    tokenizer, held_out = load_tokenizer(str(MODEL), trust_remote_code=False), held_out_text()
    text = held_out.encode()[: args.text_bytes].decode(errors="ignore")
    for name in KV_CACHE_DTYPES:
        with LLM(str(MODEL), dtype=args.dtype, kv_cache_dtype=name, transport="loopback") as llm:
            figures = {
                "kv_cache_dtype": name,
                "bits_per_byte": bits_per_byte(llm, tokenizer, text, args.window),
                "recall": {str(d): recall(llm, tokenizer, d, args.prompts, held_out) for d in DISTANCES},
            }
        record("bench_kv_quality", {k: v for k, v in vars(args).items() if k != "write"}, figures, write=args.write)
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
