"""How long streams pause when a memory worker is killed: with the KV of others beside it (--kv-parity 1), or computed
again; and what the parity costs while nobody dies.

Sequences of --prompt tokens decode until each has some; then memory worker 1 is killed, of whose kind a spare is there.
The pause is the longest silence of a stream behind that. Every completion is compared with that of a run without a
kill. With parity and without take turns. Prints JSON lines; --write appends them to perf/results/bench_parity.jsonl.

    python perf/bench_parity.py examples/tiny_lm/model --sequences 1 8 32 --write
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from statistics import median
from typing import Any

from common import cpu_pressure, record

from lamina import LLM, SamplingParams

FIRST = 8  # tokens of each sequence, before the kill
VICTIM = "memory-1"
SPARE_S = 2.0  # for another spare to have loaded


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams, *, kill: bool) -> tuple[list[Any], float, float]:
    """Completions, the pause behind the kill, and seconds of a step before it."""
    outputs, killed_at, pause, gaps, last = dict[int, Any](), 0.0, 0.0, list[float](), dict[int, float]()
    with llm.stream(prompts, params) as stream:
        for output in stream:
            now = time.perf_counter()
            if killed_at:
                pause = max(pause, now - max(last[output.request_id], killed_at))
            last[output.request_id] = now
            outputs[output.request_id] = output
            told = [len(one.outputs[0].token_ids) for one in outputs.values()]
            if not killed_at and len(told) == len(prompts) and min(told) >= 2:
                gaps.append(now)
            if kill and not killed_at and len(told) == len(prompts) and min(told) >= FIRST:
                os.kill(llm.pools.pids[VICTIM], signal.SIGKILL)
                killed_at = now
    each = [outputs[i].outputs[0] for i in sorted(outputs)]
    step_s = (gaps[-1] - gaps[0]) / (len(gaps) - 1) * len(prompts)
    completions = [(one.token_ids, [(t, p.logprob) for x in one.logprobs or [] for t, p in x.items()]) for one in each]
    return completions, pause, step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each (1000)")
    parser.add_argument("--tokens", type=int, default=24, help="of a completion (24)")
    parser.add_argument("--kills", type=int, default=3, help="of each kind (3)")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--write", action="store_true", help="append to the results")
    args = parser.parse_args()
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True, logprobs=1)
    for count in args.sequences:
        options: dict[str, Any] = {"memory_workers": 2, "transport": args.transport, "spare_memory": 1}
        options |= {"deterministic": True, "dtype": args.dtype, "max_recoveries": 10**6, "kv_memory": "256MiB"}
        options["enable_prefix_caching"] = False
        results: dict[str, Any] = {"cpu_pressure": cpu_pressure()}
        with LLM(args.model, **options) as plain, LLM(args.model, **options, kv_parity=1) as guarded:
            vocabulary = plain.engine.info.vocab_size
            prompts = [[rng.randrange(vocabulary) for _ in range(args.prompt)] for _ in range(count)]
            kinds = {"computed again": plain, "parity": guarded}
            wanted = {name: run(llm, prompts, params, kill=False) for name, llm in kinds.items()}
            taken: dict[str, list[Any]] = {name: [] for name in kinds}
            for _ in range(args.kills):
                for name, llm in kinds.items():
                    taken[name].append(run(llm, prompts, params, kill=True))
                    time.sleep(SPARE_S)
            stats = guarded.stats()[VICTIM]
        for name, each in taken.items():
            same = sum(a == b for found, _, _ in each for a, b in zip(found, wanted[name][0], strict=True))
            tokens = sum(a[0] == b[0] for found, _, _ in each for a, b in zip(found, wanted[name][0], strict=True))
            results[name] = {
                "pause_s": [round(pause, 4) for _, pause, _ in each],
                "median_s": round(median(pause for _, pause, _ in each), 4),
                "step_s": round(median([step for _, _, step in each] + [wanted[name][2]]), 5),
                "completions": len(each) * count,
                "bitwise": same,
                "token_equal": tokens,
            }
        results["parity"] |= {"moved_bytes": stats["moved_bytes"], "move_s": stats["move_s"]}
        settings = {**vars(args), "sequences": count}
        print(record("bench_parity", settings, results, write=args.write), flush=True)


if __name__ == "__main__":
    main()
