"""The pause of streams when a memory worker is killed: with the parity of the others' KV (--kv-parity 1), or with KV
computed again. Also the cost of the parity while no worker dies.

Sequences of --prompt tokens decode until each has some; then memory worker 1 is killed, of whose kind a spare is there.
The pause is the longest silence of a stream after that. Every completion is compared with that of a run without a kill.
With parity and without take turns. Where KV is computed again, that is timed from when all have reconnected until each
stream has another token. It is compared, by token, with a prefill of new prompts of the same length ("of_prefill": at
most 1.3 is promised). Prints JSON lines; --write appends them to perf/results/bench_parity.jsonl.

    python perf/bench_parity.py examples/tiny_lm/model --sequences 1 8 32 --write
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from common import cpu_pressure, parser_of, record

from lamina import LLM, SamplingParams
from lamina.protocol.step_plan import SurvivingKv

FIRST = 8  # tokens of each sequence, before the kill
VICTIM = "memory-1"
SPARE_S = 2.0  # for another spare to have loaded


class KilledRun(NamedTuple):
    """The result of a run: seconds of the pause after the kill, of a step before it, and until KV was there again."""

    completions: list[Any]
    pause_s: float
    step_s: float
    rebuilt_s: float


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams, *, kill: bool) -> KilledRun:
    """All prompts at once, to their ends."""
    outputs, killed_at, pause, gaps, last = dict[int, Any](), 0.0, 0.0, list[float](), dict[int, float]()
    watch, again = MeetingWatch(llm), dict[int, float]()
    with llm.stream(prompts, params) as stream:
        for output in stream:
            now = time.perf_counter()
            if killed_at:
                pause = max(pause, now - max(last[output.request_id], killed_at))
            if watch.is_behind:
                again.setdefault(output.request_id, now)
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
    return KilledRun(completions, pause, step_s, max(again.values(), default=watch.met_at) - watch.met_at)


class MeetingWatch:
    """The time when all workers have reconnected, and whether steps have been done since; earlier ones may be reported
    later.
    """

    def __init__(self, llm: LLM) -> None:
        self.met_at, self.is_behind, self._meets = 0.0, False, False
        self._step, self._resume = type(llm.engine).step, type(llm.pools).resume
        llm.engine.step = partial(self._stepped, llm.engine)  # type: ignore[method-assign]
        llm.pools.resume = partial(self._resumed, llm.pools)  # type: ignore[method-assign]

    def _stepped(self, engine: Any) -> Any:
        met, self._meets = self.met_at, False
        outputs = self._step(engine)
        self.is_behind = met > 0.0 and not self._meets
        return outputs

    def _resumed(self, pools: Any, keep: Sequence[SurvivingKv]) -> Any:
        ready = self._resume(pools, keep)
        self.met_at, self._meets = time.perf_counter(), True
        return ready


def prefill_s(llm: LLM, prompts: list[list[int]]) -> float:
    """Seconds until each has its first token."""
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return time.perf_counter() - began


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each (1000)")
    parser.add_argument("--tokens", type=int, default=24, help="of a completion (24)")
    parser.add_argument("--kills", type=int, default=3, help="of each kind (3)")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True, logprobs=1)
    for count in args.sequences:
        options: dict[str, Any] = {"memory_workers": 2, "transport": args.transport, "spare_memory": 1}
        options |= {"deterministic": True, "dtype": args.dtype, "max_recoveries": 10**6, "kv_memory": "256MiB"}
        options["enable_prefix_caching"] = False
        results: dict[str, Any] = {"cpu_pressure": cpu_pressure()}
        with LLM(args.model, **options) as plain, LLM(args.model, **options, kv_parity=1) as guarded:
            vocabulary = plain.engine.worker_info.vocab_size
            prompts = [[rng.randrange(vocabulary) for _ in range(args.prompt)] for _ in range(count)]
            kinds = {"computed again": plain, "parity": guarded}
            wanted = {name: run(llm, prompts, params, kill=False) for name, llm in kinds.items()}
            cold_s = median(prefill_s(plain, prompts) for _ in range(args.kills))
            taken: dict[str, list[Any]] = {name: [] for name in kinds}
            for _ in range(args.kills):
                for name, llm in kinds.items():
                    taken[name].append(run(llm, prompts, params, kill=True))
                    time.sleep(SPARE_S)
            stats = guarded.stats()[VICTIM]
        for name, each in taken.items():
            pairs = [p for one in each for p in zip(one.completions, wanted[name].completions, strict=True)]
            same, tokens = sum(a == b for a, b in pairs), sum(a[0] == b[0] for a, b in pairs)
            results[name] = {
                "pause_s": [round(one.pause_s, 4) for one in each],
                "median_s": round(median(one.pause_s for one in each), 4),
                "step_s": round(median([one.step_s for one in each] + [wanted[name].step_s]), 5),
                "completions": len(each) * count,
                "bitwise": same,
                "token_equal": tokens,
            }
        rebuilt = [one.rebuilt_s for one in taken["computed again"]]
        share = args.prompt / (args.prompt + FIRST)  # by token: the first ones of each completion are computed, too
        results["computed again"] |= {
            "prefill_s": round(cold_s, 4),
            "rebuilt_s": [round(seconds, 4) for seconds in rebuilt],
            "of_prefill": round(median(rebuilt) * share / cold_s, 3),
        }
        results["parity"] |= {"moved_bytes": stats["moved_bytes"], "move_s": stats["move_s"]}
        settings = {**vars(args), "sequences": count}
        print(record("bench_parity", settings, results, write=args.write), flush=True)


if __name__ == "__main__":
    main()
