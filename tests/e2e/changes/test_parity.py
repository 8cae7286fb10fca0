"""With --kv-parity a lost memory worker's KV comes back from the others: nothing is computed again, no bit moves."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_faults import gone

from lamina import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("no_child_left")
PARAMS = SamplingParams(temperature=0.8, max_tokens=24, seed=3, logprobs=1, frequency_penalty=0.4, ignore_eos=True)
PROMPTS = [[7 + i % 200 for i in range(n)] for n in (3, 140, 290, 291)]
TOLD = 30, 60  # tokens in all, at which a worker is killed


def run(llm: LLM, kills: Mapping[int, list[str]]) -> list[Any]:
    """Tokens and their log-probabilities, unrounded.

    ``kills``: the workers that are killed once so many tokens have come.
    """
    left, outputs = dict(sorted(kills.items())), dict[int, Any]()
    with llm.stream(PROMPTS, PARAMS) as stream:
        for output in stream:
            outputs[output.request_id] = output
            told = sum(len(one.outputs[0].token_ids) for one in outputs.values())
            while left and told >= next(iter(left)):
                for victim in left.pop(next(iter(left))):
                    os.kill(llm.pools.pids[victim], signal.SIGKILL)
    assert not left, "somebody was not killed"
    each = (outputs[i].outputs[0] for i in sorted(outputs))
    return [(one.token_ids, [(t, p.logprob) for x in one.logprobs for t, p in x.items()]) for one in each]


def count(llm: LLM, name: str) -> float:
    return sum(values.get(name, 0.0) for values in llm.stats().values())


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "victims"),
    [
        ({"spare_memory": 1}, ["memory-1", "memory-2"]),  # the last one keeps the parity
        ({"pipeline": 3, "transport": "tcp", "prefill_workers": 1}, ["memory-2", "memory-0"]),
        pytest.param({"dtype": "bfloat16"}, ["memory-0", "memory-1"], marks=pytest.mark.slow),
    ],
    ids=["spare", "replicas, tcp, prefill workers", "bfloat16"],
)
def test_kv_of_one_that_is_lost_is_back_bit_by_bit(options: dict[str, Any], victims: list[str], tiny_lm: Path) -> None:
    chosen = {"memory_workers": 2, "kv_parity": 1, "deterministic": True, "prefill_chunk": 64, "dtype": "float32"}
    with LLM(str(tiny_lm), **{**chosen, **options}) as llm:
        wanted = run(llm, {})
        rows = count(llm, "rows")
        pids = llm.pools.pids
        assert run(llm, {told: [victim] for told, victim in zip(TOLD, victims, strict=True)}) == wanted
        again = count(llm, "rows") - rows
        assert {w for w, pid in llm.pools.pids.items() if pid != pids[w]} == {*victims}
        assert all(gone(pids[victim]) for victim in victims)
        assert count(llm, "moved_bytes") > 0
        assert again <= sum(map(len, PROMPTS)), "a prompt was computed again"


@pytest.mark.no_retry
def test_of_two_at_once_kv_is_computed_again(tiny_lm: Path) -> None:
    with LLM(str(tiny_lm), memory_workers=2, kv_parity=1, deterministic=True, dtype="float32") as llm:
        wanted = [tokens for tokens, _ in run(llm, {})]
        found = run(llm, {40: ["memory-0", "memory-2"]})
        assert [tokens for tokens, _ in found] == wanted
        assert count(llm, "moved_bytes") == 0
