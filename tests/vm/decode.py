"""Decode with 2 memory workers: ``decode.py MODEL TRANSPORT`` prints, as JSON, the tokens and each worker's process."""

from __future__ import annotations

import json
import sys

from lamina import LLM, SamplingParams

PROMPTS = ["def read_lines(path):\n    ", "class Stack:\n    def __init__(self):\n", "The purpose of"]
TOKENS = 12
PATIENCE_S = 1500.0  # an emulated processor imports torch in a minute, and cuts the model in one and a half


def main(model: str, transport: str) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    patience = {"start_timeout_s": PATIENCE_S, "step_timeout_s": PATIENCE_S}
    with LLM(model, transport=transport, memory_workers=2, dtype="float32", **patience) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)]
        received = [llm.stats()[f"memory-{n}"]["bytes_received"] for n in range(2)]
        print(json.dumps({"tokens": tokens, "processes": llm.pools.pids, "received": received}))


if __name__ == "__main__":
    main(*sys.argv[1:])
