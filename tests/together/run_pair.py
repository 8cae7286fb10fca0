"""Runs requests with the options of some features, and returns the tokens and what the run has counted."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .paired_features import GRAMMAR, LONG, PRIORITY, PROMPT_LOGPROBS, SESSIONS, Row, merged

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples" / "tiny_lm" / "model")
SIZE = 512  # tokens of the longest sequence
BASE: Mapping[str, Any] = {
    "dtype": "float32", "memory_workers": 2, "transport": "shm", "max_model_len": SIZE, "max_num_seqs": 16,
    "prefill_chunk": 128,
}  # fmt: skip
TEXT = (ROOT / "lamina" / "protocol" / "step_plan.py").read_text()


class Run(NamedTuple):
    """The tokens of all completions in order, and counts by name."""

    tokens: list[list[int]]
    facts: dict[str, float]


def run(rows: Sequence[Row], uses: frozenset[str], seed: int = 0) -> Run:
    """Run the requests with the options of ``rows``. ``uses``: what the requests have. ``seed``: of those
    that are sampled. Raises ValueError for options or requests that are refused, and WorkerError.
    """
    from lamina.api.llm import CommandLLM
    from lamina.server.engine_client.reports import state_of

    options = merged(rows)
    assert options is not None
    folder = tempfile.mkdtemp(prefix="together-")
    try:
        options = {name: folder if value == "DIR" else value for name, value in options.items()}
        with CommandLLM(MODEL, **{**BASE, **options}) as llm:
            tokens = _requests(llm, uses, seed)
            state = state_of(llm.engine, llm.pools, Counter(s.tier for s in llm.sessions()), 0)
            return Run(tokens, _facts(llm.stats(), state.metrics))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _requests(llm: Any, uses: frozenset[str], seed: int) -> list[list[int]]:
    from lamina import SamplingParams, StructuredOutputsParams

    ids = llm.get_tokenizer().encode(TEXT)
    shared, tails = ids[:100], [ids[200 + 120 * n : 320 + 120 * n] for n in range(5)]
    plain = {"temperature": 0.0, "ignore_eos": True}
    greedy = SamplingParams(max_tokens=64, **plain)
    each: list[Any] = [greedy] * 4 + [SamplingParams(max_tokens=64, n=4, seed=seed, temperature=0.9, ignore_eos=True)]
    if GRAMMAR in uses:
        each[1] = SamplingParams(
            max_tokens=64, temperature=0.0, structured_outputs=StructuredOutputsParams(regex="[a-z]{20}[0-9]{20}")
        )
    if PROMPT_LOGPROBS in uses:
        each[2] = SamplingParams(max_tokens=64, prompt_logprobs=1, **plain)
    order = [2, 0, 1, 0, 1] if PRIORITY in uses else None
    found: list[list[int]] = []

    def round_of(prompts: Sequence[list[int]], params: Sequence[Any]) -> None:
        prompts = [{"prompt_token_ids": p} for p in prompts]
        outputs = llm.generate(prompts, list(params), **({"priority": order[: len(prompts)]} if order else {}))
        found.extend(list(c.token_ids) for output in outputs for c in output.outputs)

    round_of([shared + tail for tail in tails], each)
    with llm.stream({"prompt_token_ids": ids[600:800]}, greedy) as stream:  # dropped after its first tokens
        next(stream)
    round_of([ids[900 + 260 * n : 1160 + 260 * n] for n in range(3)], [greedy] * 3)  # evicts the first round
    round_of([shared + tail for tail in tails], each)
    if SESSIONS in uses:
        turn = ids[2000:2150]
        for added in range(4 if LONG in uses else 2):
            (output,) = llm.generate({"prompt_token_ids": turn}, greedy, session_id="s")
            found.append(list(output.outputs[0].token_ids))
            turn = [*turn, *output.outputs[0].token_ids, *ids[2200 + 90 * added : 2290 + 90 * added]]
    return found


def _facts(stats: Mapping[str, Mapping[str, float]], metrics: Mapping[str, Any]) -> dict[str, float]:
    facts: Counter[str] = Counter()
    for worker, counts in stats.items():
        facts[f"{worker.partition('-')[0]} workers"] += 1
        facts.update(counts)
    for name, value in metrics.items():
        facts[name] += sum(value.values()) if isinstance(value, Mapping) else value
    return dict(facts)
