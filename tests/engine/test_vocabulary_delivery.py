"""The vocabulary goes with the first round that has a grammar, once for each receiver, and again after an epoch."""

from __future__ import annotations

from typing import Any

from lamina.engine.vocabulary_delivery import VocabularyDelivery
from lamina.protocol.control import LogitsUpdate, Penalties, RunStep, SamplingRequest, Vocabulary
from lamina.protocol.step_plan import StepPlan

NONE: dict[str, Any] = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, "logit_bias": {}, "prompt_token_ids": []}
WORDS = Vocabulary(tokens=[b"a", b"\xffend"], special_token_ids=[1], end_token_ids=[1])


def step(grammar: str = "", *, first: bool = True) -> RunStep:
    update = LogitsUpdate(
        num_known_tokens=0, tokens=[], penalties=Penalties(**NONE, grammar=grammar) if first else None
    )
    draw = SamplingRequest(row=0, sequence=1, temperature=0.0, top_k=0, top_p=1.0, seed=0, output_index=0, logprobs=-1,
                           logits_update=update)  # fmt: skip
    plan = StepPlan(epoch=0, batch=0, step=0, ops=[], rows=[], send_from=[0], reply_to=[0])
    return RunStep(plan=plan, token_ids=[], sampling_requests=[draw])


def test_once_for_each_receiver_and_epoch() -> None:
    made, without = list[int](), VocabularyDelivery()
    assert not without.is_available
    assert without.attached([step("start: /a/")]) is None
    sent = VocabularyDelivery(lambda: made.append(1) or WORDS)  # type: ignore[func-returns-value]
    assert sent.is_available
    assert sent.attached([step(), step("start: /a/", first=False)]) is None
    assert made == []
    assert sent.attached([step(), step("start: /a/")]) == WORDS
    assert sent.attached([step("start: /b/")]) is None
    assert sent.attached([step("start: /b/")], 1) == WORDS
    sent.begin_epoch()
    assert sent.attached([step("start: /a/")]) == WORDS
    assert made == [1]
