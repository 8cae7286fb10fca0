"""A model whose numbers break for one request: it ends with an error, and the others do not notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import llama

from lamina import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("no_child_left")
BROKEN = 7  # the token whose embedding breaks
GOOD = [[5, 8, 9, 300], [3] * 40, [11, 12]]
BAD = [[5, BROKEN, 9], [BROKEN] * 40]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={BROKEN: -100.0})


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, PARAMS)]


@pytest.mark.parametrize("options", [{}, {"pipeline": 3}, {"prefill_workers": 1}], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_only_the_request_with_such_logits_ends(options: dict[str, Any], value: float) -> None:
    """KV blocks that it leaves behind are used again, and are no harm."""
    model = llama()
    with LLM(model, transport="loopback", kv_memory="1MiB", prefill_chunk=16, max_num_seqs=4, **options) as llm:
        wanted = tokens(llm, GOOD)
        assert [len(t) for t in wanted] == [12, 12, 12]
        with torch.no_grad():
            model.get_input_embeddings().weight[BROKEN] = value
        for _ in range(2):
            found = [o.outputs[0] for o in llm.generate([*GOOD, *BAD], PARAMS)]
            assert [o.token_ids for o in found] == [*wanted, [], []]
            assert [o.finish_reason for o in found] == ["length"] * 3 + ["error"] * 2
            assert "logit is not a finite number" in str(found[-1].stop_reason)
        assert tokens(llm, GOOD) == wanted
