"""Hybrid models whose KV has too little memory: preempted requests are computed again, or continue from states that
storage has. Either way they get the tokens of transformers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from support.models.hybrids import build_hybrid, each_hybrid, greedy, prompts
from test_hybrid_storage import total

from lamina import LLM, SamplingParams
from lamina.engine.scheduler_stats import SchedulerStats

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
COUNT = 200  # so that sequences begin together, and have no room in the end
TEXTS = prompts(160, 150, 145, 140)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 368,
    "prefill_chunk": 128,
    "kv_memory": "256KiB",
    "memory_workers": 2,
    "transport": "shm",
}


class Served(NamedTuple):
    """Counters of an engine that served all prompts with their tokens. ``again``: rows that were computed once more."""

    stats: SchedulerStats
    again: float
    loaded_bytes: float  # of states


def serve(name: str, **options: Any) -> Served:
    model, params = build_hybrid(name), SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    with LLM(model, **OPTIONS, **options) as llm:
        done = llm.generate([{"prompt_token_ids": text} for text in TEXTS], params)
        assert [list(each.outputs[0].token_ids) for each in done] == [greedy(model, text, COUNT) for text in TEXTS]
        rows = sum(len(text) + COUNT - 1 for text in TEXTS)
        again = total(llm, "rows", "compute") - rows
        return Served(llm.engine.scheduler_stats, again, total(llm, "state_loaded_bytes"))


@each_hybrid("bamba")
def test_preempted_requests_are_computed_again_from_the_first_token(name: str) -> None:
    served = serve(name, max_num_seqs=4, enable_prefix_caching=False)
    assert served.stats.preemptions > 0
    assert served.again >= served.stats.preemptions * min(map(len, TEXTS))


@each_hybrid("bamba")
def test_preempted_requests_continue_from_their_last_stored_states(name: str) -> None:
    served = serve(name, max_num_seqs=3, enable_prefix_caching=True, kv_offloading_size="64MiB")
    assert served.stats.preemptions > 0
    assert served.stats.stored_hit_tokens >= min(map(len, TEXTS))
    assert served.loaded_bytes > 0
