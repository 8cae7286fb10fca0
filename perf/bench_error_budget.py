"""A test of the error budget: it must catch a policy that is broken on purpose, and accept a good one. Its tokens are
those of real reference decodes, on the demo's language model.

An engine with a shadow for each completion goes on with texts whose KV has lost blocks. What its shadows see is cut
into runs of completions of so many tokens together, and each run is watched as an engine watches it. `pooled` is the
policy as it is. `unpooled` lets a block count for itself alone; `inverted` drops the best blocks. The budget is twice
the true rate of the first policy, unless one is given. With --recall so many pairs of key and value stand before each
text and one is asked for after it: what was dropped is missed there.

    python perf/bench_error_budget.py --write
    python perf/bench_error_budget.py --recall 4 --prompt 128 --budget 80 --answer 3 --top1 .1 --kl .1 --write
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import numpy as np
from bench_kv_sparsity import MODEL, RECENT, SIZE, held_out_tokens, recall_prompts
from common import parser_of, record

from lamina import LLM, SamplingParams
from lamina.config.sparsity import ErrorBudget
from lamina.kv import sparsity
from lamina.models.tokenizer import load_tokenizer
from lamina.scheduler.sparsity.error_budget import CompletionErrors, ErrorMonitor
from lamina.scheduler.sparsity.reference_decode import ReferenceDecoder

Seen = list[tuple[CompletionErrors, bool, float]]  # by whom, whether a token would have been another, and nats of KL
POLICIES: dict[str, Callable[[Mapping[int, int]], dict[int, int]]] = {
    "pooled": sparsity.pool_neighbours,
    "unpooled": dict,
    "inverted": lambda scores: {n: -score for n, score in scores.items()},
}


class RecordingWatch(ErrorMonitor):
    """Never over budget; what it has seen."""

    def __init__(self) -> None:
        super().__init__(ErrorBudget(top1=1.0, kl=1.0))
        self.seen: Seen = []

    def add(self, completion: CompletionErrors, *, top1_changed: bool, kl: float) -> bool:
        """One more token."""
        self.seen.append((completion, top1_changed, kl))
        return super().add(completion, top1_changed=top1_changed, kl=kl)


def shadows_see(policy: str, prompts: list[list[int]], tokens: int, budget: int) -> Seen:
    """Returns what reference decodes see of completions of ``tokens`` tokens."""
    sparsity.pool_neighbours = POLICIES[policy]  # type: ignore[assignment]
    options: dict[str, Any] = {"kv_budget": budget, "kv_recent": RECENT, "block_size": SIZE, "max_num_seqs": 64}
    options |= {"prefill_chunk": 1024, "memory_workers": 1, "compute_threads": 1, "memory_threads": 1}
    with LLM(str(MODEL), transport="loopback", kv_sparsity="evict", kv_error_budget="shadow=1", **options) as llm:
        shadows, watch = llm.engine.scheduler.features.get(ReferenceDecoder), RecordingWatch()
        assert shadows is not None
        shadows.monitor = watch
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return watch.seen


def alarms(seen: Seen, budget: ErrorBudget, tokens: int, runs: int) -> tuple[int, int]:
    """Runs with an alarm, and all that there are: each of the next completions, in the order of their first tokens,
    that have so many tokens together at most.
    """
    lengths = Counter(by for by, *_ in seen)
    parts = list[dict[CompletionErrors, CompletionErrors]]()
    for by, length in lengths.items():
        if not parts or sum(w.max_tokens for w in parts[-1].values()) + length > tokens:
            parts.append({})
        parts[-1][by] = CompletionErrors(length)

    def caught(part: dict[CompletionErrors, CompletionErrors]) -> bool:
        watch = ErrorMonitor(budget)
        return any(watch.add(part[by], top1_changed=d, kl=k) for by, d, k in seen if by in part)

    whole = parts[:-1][:runs]
    return sum(map(caught, whole)), len(whole)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200, help="of a run")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--answer", type=int, default=64, help="tokens")
    parser.add_argument("--budget", type=int, default=256, help="--kv-budget")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--recall", type=int, default=0, help="pairs before each text, one of which is asked for")
    parser.add_argument("--top1", type=float, default=0.0, help="budget of errors; 0: twice that of the first policy")
    parser.add_argument("--kl", type=float, default=1.0, help="the same in nats, with --top1")
    args = parser.parse_args()
    tokenizer = load_tokenizer(str(MODEL), trust_remote_code=False)
    text = held_out_tokens(tokenizer)
    count = 4 * (args.runs + 1) * args.tokens // (4 * args.answer - 1)  # shadows miss some of the first tokens
    if args.recall:
        prompts = [p.tokens for p in recall_prompts(tokenizer, text, args.prompt, count=count, pairs=args.recall)]
    else:
        starts = np.random.default_rng(0).integers(0, len(text) - args.prompt, count)
        prompts = [text[at : at + args.prompt].tolist() for at in starts]
    settings = {name: value for name, value in vars(args).items() if name != "write"}
    good = ErrorBudget(top1=args.top1, kl=args.kl)
    for policy in args.policies:
        seen = shadows_see(policy, prompts, args.answer, args.budget)
        top1, kl = fmean(d for _, d, _ in seen), fmean(min(k, 1.0) for *_, k in seen)
        if policy == args.policies[0] and not args.top1:
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
