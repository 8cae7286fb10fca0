"""A request that has no token to draw, by broken numbers or by its own bans: it ends with an error that says so, and
the others do not notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import llama, sharpen

from lamina import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("no_child_left")
BROKEN = 7  # the token whose embedding breaks
GOOD = [[5, 8, 9, 300], [3] * 40, [11, 12]]
BAD = [[5, BROKEN, 9], [BROKEN] * 40]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={BROKEN: -100.0})


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, PARAMS)]


@pytest.fixture(scope="module", params=[{}, {"pipeline": 3}, {"prefill_workers": 1}], ids=str)
def breakable(request: pytest.FixtureRequest) -> Iterator[tuple[Any, LLM]]:
    """A model, and an engine that computes with it as it is at the time."""
    model = llama()
    small = {"kv_memory": "1MiB", "prefill_chunk": 16, "max_num_seqs": 4}
    with LLM(model, transport="loopback", **small, **request.param) as llm:
        yield model, llm


@pytest.mark.long(but=["{}-inf"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_only_the_request_with_such_logits_ends(breakable: tuple[Any, LLM], value: float) -> None:
    """The KV blocks that it leaves are used again, and are no harm."""
    model, llm = breakable
    wanted = tokens(llm, GOOD)
    assert [len(t) for t in wanted] == [12, 12, 12]
    row = model.get_input_embeddings().weight[BROKEN]
    whole = row.clone()
    with torch.no_grad():
        row.fill_(value)
    for _ in range(2):
        found = [o.outputs[0] for o in llm.generate([*GOOD, *BAD], PARAMS)]
        assert [o.token_ids for o in found] == [*wanted, [], []]
        assert [o.finish_reason for o in found] == ["length"] * 3 + ["error"] * 2
        assert "logit is not a finite number" in str(found[-1].stop_reason)
    assert tokens(llm, GOOD) == wanted
    with torch.no_grad():
        row.copy_(whole)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"pipeline": 3}, {"prefill_workers": 1}], ids=str)
def test_only_the_request_that_bans_every_token_ends(options: dict[str, Any]) -> None:
    """The model's own bias leaves tokens below 20 alone, and the request bans those until it has three tokens."""
    model = phi()
    banning = SamplingParams(max_tokens=12, min_tokens=3, stop_token_ids=list(range(20)))
    with LLM(model, transport="loopback", max_num_seqs=4, **options) as llm:
        with torch.no_grad():
            model.lm_head.bias[20:] = float("-inf")
        wanted = tokens(llm, GOOD)
        assert [len(t) for t in wanted] == [12, 12, 12]
        found = [o.outputs[0] for o in llm.generate([*GOOD, GOOD[0]], [PARAMS] * 3 + [banning])]
        assert [o.token_ids for o in found] == [*wanted, []]
        assert [o.finish_reason for o in found] == ["length"] * 3 + ["error"]
        assert str(found[-1].stop_reason).startswith("min_tokens 3 bans the stop tokens so far, and the model gives no")
        with pytest.raises(ValueError, match="^min_tokens 3 bans .* all 320 of the vocabulary: leave one out, or"):
            llm.generate(GOOD, SamplingParams(min_tokens=3, stop_token_ids=list(range(320))))
        assert tokens(llm, GOOD) == wanted


def phi() -> Any:
    """Its lm_head has a bias."""
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(3)
    shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return sharpen(PhiForCausalLM(PhiConfig(num_attention_heads=4, max_position_embeddings=128, **shape, **ids)))
