"""Prompts that begin alike on prefill workers: computed once where their beginning is, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lamina import LLM, SamplingParams
from lamina.engine.conductor import ConductorRules

pytestmark = pytest.mark.usefixtures("no_child_left")
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
DOCUMENT, QUESTION = 64, 40  # tokens; a question is longer than a chunk


def asked(documents: int, count: int) -> list[list[int]]:
    """Questions about documents, each with its own."""
    about = [[2 + (7 * d + 3 * t) % 300 for t in range(DOCUMENT)] for d in range(documents)]
    return [[*about[n % documents], *(2 + (11 * n + 5 * t) % 300 for t in range(QUESTION))] for n in range(count)]


def test_tokens_are_the_same_whoever_has_computed_the_beginning(
    llama_path: Path, reference: Callable[[list[int], int], list[int]]
) -> None:
    """Over policies, bit by bit; and most documents are computed once for each worker at most."""
    prompts, documents, workers = asked(2, 10), 2, 2
    expected = [reference(p, 4) for p in prompts]
    options = {"memory_workers": 2, "partition": "request", "prefill_workers": workers, "prefill_chunk": 32}
    with LLM(str(llama_path), transport="loopback", deterministic=True, **options) as llm:
        before = 0.0
        for policy in ("auto", "load-balance", "random"):
            llm.engine.promises.promise(ConductorRules(policy=policy))
            found = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
            assert found == expected, policy
            stats = llm.stats()
            rows = sum(stats[f"prefill-{w}"]["rows"] for w in range(workers)) - before
            before += rows
            assert rows <= len(prompts) * QUESTION + workers * documents * DOCUMENT, policy
            assert llm.engine.promises.replicas is not None
            llm.reset_prefix_cache()
            assert llm.engine.promises.replicas == 0


def test_completions_of_one_prompt_compute_it_once(llama_path: Path) -> None:
    (prompt,) = asked(1, 1)
    params = SamplingParams(n=4, temperature=0.9, seed=3, max_tokens=4, ignore_eos=True)
    with LLM(str(llama_path), transport="loopback", prefill_workers=1, prefill_chunk=32) as llm:
        assert len({tuple(one.token_ids) for one in llm.generate([prompt], params)[0].outputs}) > 1
        assert llm.stats()["prefill-0"]["rows"] == len(prompt)
