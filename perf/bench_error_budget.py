"""Whether an error budget catches a policy that is broken on purpose, and leaves a good one in peace: over tokens of
real shadows, on the demo's language model.

An engine with a shadow for each completion goes on with texts whose KV has lost blocks. What its shadows see, in the
order in which they see it, is cut into runs of so many tokens, and each run is watched as an engine watches it.
`pooled` is the policy as it is; `unpooled` lets a block count for itself alone; `inverted` drops the best blocks.

    python perf/bench_error_budget.py --write
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import numpy as np
from bench_kv_sparsity import MODEL, RECENT, SIZE, held_out_tokens
from common import record

from lamina import LLM, SamplingParams
from lamina.kv import sparsity
from lamina.kv.error_budget import ErrorWatch
from lamina.models.tokens import load_tokenizer
from lamina.protocol.options.sparsity import ErrorBudget

Seen = list[tuple[bool, float]]  # of each token: whether it would have been another, and nats of KL
POLICIES: dict[str, Callable[[Mapping[int, int]], dict[int, int]]] = {
    "pooled": sparsity.pool,
    "unpooled": dict,
    "inverted": lambda scores: {n: -score for n, score in scores.items()},
}


class RecordingWatch(ErrorWatch):
    """Never over budget; what it has seen."""

    def __init__(self) -> None:
        super().__init__(ErrorBudget(top1=1.0, kl=1.0))
        self.seen: Seen = []

    def add(self, *, different: bool, kl: float) -> bool:
        """One more token."""
        self.seen.append((different, kl))
        return super().add(different=different, kl=kl)


def shadows_see(policy: str, prompts: list[list[int]], tokens: int, budget: int) -> Seen:
    """Of completions of ``tokens`` tokens."""
    sparsity.pool = POLICIES[policy]  # type: ignore[assignment]
    options: dict[str, Any] = {"kv_budget": budget, "kv_recent": RECENT, "block_size": SIZE, "max_num_seqs": 16}
    with LLM(str(MODEL), transport="loopback", kv_sparsity="evict", kv_error_budget="shadow=1", **options) as llm:
        shadows, watch = llm.engine.scheduler.shadows, RecordingWatch()
        assert shadows is not None
        shadows.watch = watch
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return watch.seen


def alarms(seen: Seen, budget: ErrorBudget, tokens: int, runs: int) -> tuple[int, int]:
    """Runs with an alarm, and all that there are."""

    def caught(run: Seen) -> bool:
        watch = ErrorWatch(budget)
        return any(watch.add(different=d, kl=k) for d, k in run)

    parts = [seen[at : at + tokens] for at in range(0, len(seen) - tokens + 1, tokens)][:runs]
    return sum(map(caught, parts)), len(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200, help="of a run")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--answer", type=int, default=64, help="tokens")
    parser.add_argument("--budget", type=int, default=256, help="--kv-budget")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--write", action="store_true", help="append to perf/results")
    args = parser.parse_args()
    tokenizer = load_tokenizer(str(MODEL), trust_remote_code=False)
    text = held_out_tokens(tokenizer)
    count = -(-args.runs * args.tokens // (args.answer - 4))
    starts = np.random.default_rng(0).integers(0, len(text) - args.prompt, count)
    prompts = [text[at : at + args.prompt].tolist() for at in starts]
    settings = {name: value for name, value in vars(args).items() if name != "write"}
    good = ErrorBudget()
    for policy in args.policies:
        seen = shadows_see(policy, prompts, args.answer, args.budget)
        top1, kl = fmean(d for d, _ in seen), fmean(min(k, 1.0) for _, k in seen)
        if policy == args.policies[0]:
            good = ErrorBudget(top1=round(2 * top1, 3), kl=round(2 * kl, 3))
        caught, runs = alarms(seen, good, args.tokens, args.runs)
        line = {
            "policy": policy, "top1": top1, "kl": kl, "budget_top1": good.top1, "budget_kl": good.kl,
            "caught": caught, "runs": runs, "shadow_tokens": len(seen),
        }  # fmt: skip
        record("bench_error_budget", settings, line, write=args.write)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
