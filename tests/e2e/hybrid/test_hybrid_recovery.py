"""Workers of hybrid models are killed in the midst of prompts and of steps: every request gets the tokens of
transformers.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.models.hybrids import HYBRIDS, build_hybrid, greedy, prompts

from lamina import LLM, SamplingParams

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.slow, pytest.mark.timeout(300)]
COUNT = 40
TEXTS = prompts(5, 60, 33, 1, 90)


def run(llm: LLM, kill: dict[int, str]) -> list[list[int]]:
    """Serve all prompts. ``kill``: a worker to kill once so many tokens have come, in all. At 1 not all prompts are
    computed.
    """
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    outputs, left, grown = dict[int, Any](), dict(sorted(kill.items())), dict[int, int]()
    with llm.stream([{"prompt_token_ids": text} for text in TEXTS], params) as stream:
        for output in stream:
            outputs[output.request_id] = output
            grown[output.request_id] = len(output.outputs[0].token_ids)
            while left and sum(grown.values()) >= next(iter(left)):
                assert next(iter(left)) > 1 or len(grown) < len(TEXTS), "all prompts are computed"
                os.kill(llm.pools.pids[left.pop(next(iter(left)))], signal.SIGKILL)
        ids = stream.request_ids
    assert not left, "not every worker was killed"
    return [list(outputs[i].outputs[0].token_ids) for i in ids]


@pytest.mark.parametrize("name", sorted(HYBRIDS))
@pytest.mark.parametrize("partition", ["head", "request"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_requests_go_on_after_the_deaths_of_workers(name: str, partition: str, transport: str, tmp_path: Path) -> None:
    model = build_hybrid(name)
    expected = [greedy(model, text, COUNT) for text in TEXTS]
    model.save_pretrained(tmp_path)
    options = {"partition": partition, "transport": transport, "prefill_chunk": 16, "max_model_len": 256}
    with LLM(str(tmp_path), dtype="float32", memory_workers=2, **options) as llm:
        assert run(llm, {1: "memory-1", 60: "compute-0", 90: "memory-0", 130: "memory-1"}) == expected
