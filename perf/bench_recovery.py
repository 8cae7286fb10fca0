"""How long streams pause when a worker is killed, and whether they then are what they would have been.

Sequences decode on real processes; at random moments one worker after the other is killed. The pause is the longest
time between two outputs behind a kill; a start of the same workers is measured beside it, as a new process takes most
of the pause. Every completion is compared with that of a run without a kill. Prints a table and JSON lines; --write
appends those to perf/results/bench_recovery.jsonl.

    python perf/bench_recovery.py examples/tiny_lm/model --write
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from contextlib import suppress
from statistics import median
from typing import Any

from common import cpu_pressure, record, spread

from lamina import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--memory-workers", type=int, default=2)
    parser.add_argument("--prefill-workers", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=192, help="of a completion")
    parser.add_argument("--kills", type=int, default=5, help="of each kind of worker")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="append to perf/results")
    args = parser.parse_args()
    options = {
        "memory_workers": args.memory_workers,
        "prefill_workers": args.prefill_workers,
        "pipeline": args.pipeline,
        "transport": args.transport,
        "deterministic": True,
    }
    begun = time.perf_counter()
    with LLM(args.model, max_recoveries=10**6, **options) as llm:
        results = measure(llm, args, time.perf_counter() - begun)
    print(record("bench_recovery", vars(args), results, write=args.write))


def measure(llm: LLM, args: argparse.Namespace, start_s: float) -> dict[str, Any]:
    """Pauses by kind of worker, and completions that are not what they should be."""
    rng = random.Random(args.seed)
    vocabulary = llm.engine.info.vocab_size
    prompts = [[rng.randrange(vocabulary) for _ in range(args.prompt)] for _ in range(args.sequences)]
    params = [params_of(i, args.tokens) for i in range(args.sequences)]
    wanted, _, took = stream(llm, prompts, params, "", 0.0)
    pauses: dict[str, list[float]] = {}
    wrong = late = 0
    for _ in range(args.kills):
        for victim in sorted(llm.pools.pids):
            pause = None
            while pause is None:  # a kill behind the last token says nothing
                found, pause, _ = stream(llm, prompts, params, victim, rng.uniform(0.1, 0.8) * took)
                late += pause is None
                wrong += sum(a != b for a, b in zip(found, wanted, strict=True))
            pauses.setdefault(victim.partition("-")[0], []).append(pause)
    for role, each in pauses.items():
        print(f"{role:8} {len(each):3} kills   pause {median(each):6.2f} s, at most {max(each):6.2f} s")
    print(f"a start of all of them: {start_s:.2f} s; completions that were wrong: {wrong}; kills too late: {late}")
    return {
        "pause_s": {role: spread(each) for role, each in pauses.items()},
        "longest_s": {role: max(each) for role, each in pauses.items()},
        "kills": {role: len(each) for role, each in pauses.items()},
        "too_late": late,
        "start_s": start_s,
        "wrong": wrong,
        "cpu_pressure": cpu_pressure(),
    }


def params_of(number: int, tokens: int) -> SamplingParams:
    """Of all kinds; each with a seed, so that runs are alike."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "frequency_penalty": 0.3},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 1},
    ]
    return SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number, **kinds[number % len(kinds)])


def stream(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], victim: str, after_s: float
) -> tuple[list[list[int]], float | None, float]:
    """The completions, the longest pause behind the kill of ``victim``, and how long it all took. No pause where nobody
    was killed before the last token.
    """
    killed = float("inf")

    def kill() -> None:
        nonlocal killed
        with suppress(ProcessLookupError):
            os.kill(llm.pools.pids[victim], signal.SIGKILL)
            killed = time.perf_counter()

    timer = threading.Timer(after_s, kill)
    outputs: dict[int, Any] = {}
    begun = last = time.perf_counter()
    pause: float | None = None
    if victim:
        timer.start()
    with llm.stream(prompts, params) as found:
        for output in found:
            now = time.perf_counter()
            if now > killed:
                pause = max(pause or 0.0, now - max(last, killed))
            last = now
            outputs[output.request_id] = output.outputs[0].token_ids
        ids = found.request_ids
    timer.cancel()
    return [outputs[i] for i in ids], pause, time.perf_counter() - begun


if __name__ == "__main__":
    main()
