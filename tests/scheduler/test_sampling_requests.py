"""The sampling request of a step for a sequence: every parameter by its field, and each prompt token's score once."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.protocol.control import LogitsUpdate, Penalties, SamplingRequest
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.sampling_requests import prompt_logprob_requests_of, sampling_request_of
from lamina.scheduler.sequence import Sequence

PROMPT = [11, 12, 13, 11, 14]


def sequence(index: int = 0, **params: Any) -> Sequence:
    made = Sequence(1, SamplingParams(**params), 77, PROMPT, CompletionOutput(index), 99, frozenset([6, 5]))
    made.id, made.num_output_placeholders = 3, 1
    return made


def test_every_parameter_has_its_field() -> None:
    params = {"temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.125, "logprobs": 2}
    order = ("top_p", "min_p", "top_k")
    assert sampling_request_of(sequence(**params, filter_order=order), 9) == SamplingRequest(
        row=9,
        sequence=3,
        **params,
        seed=77,
        output_index=0,
        banned_token_ids=[],
        filter_order=order,
        logits_update=None,
        has_pending_token=False,
    )
    plain = sampling_request_of(sequence(top_k=-1), 0)
    assert (plain.top_k, plain.logprobs, plain.prompt_logprob_token) == (0, -1, -1)


def test_the_index_counts_tokens_known_and_being_drawn() -> None:
    one = sequence()
    one.tokens += [1, 2]
    assert (sampling_request_of(one, 0).output_index, sampling_request_of(one, 0).has_pending_token) == (2, False)
    one.num_output_placeholders = 2
    assert (sampling_request_of(one, 0).output_index, sampling_request_of(one, 0).has_pending_token) == (3, True)


def test_stop_tokens_are_banned_before_there_are_enough() -> None:
    one = sequence(min_tokens=2, max_tokens=5)
    found = []
    for _ in range(3):
        found.append(sampling_request_of(one, 0).banned_token_ids)
        one.tokens.append(1)
    assert found == [[5, 6], [5, 6], []]


PENALISED = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 2.0, "logit_bias": {4: 1.5}}


def test_penalties_are_told_whole_at_first_and_then_what_has_come_since() -> None:
    one = sequence(**PENALISED)
    penalties = Penalties(
        presence=1.0, frequency=0.5, repetition=2.0, logit_bias={4: 1.5}, prompt_token_ids=[11, 12, 13, 14]
    )
    assert sampling_request_of(one, 0).logits_update == LogitsUpdate(num_known_tokens=0, tokens=[], penalties=penalties)
    one.tokens += [21, 22]
    assert sampling_request_of(one, 0).logits_update == LogitsUpdate(
        num_known_tokens=0, tokens=[21, 22], penalties=None
    )
    one.tokens += [23]
    assert sampling_request_of(one, 0, by_prefill_worker=True).logits_update == LogitsUpdate(
        num_known_tokens=0, tokens=[21, 22, 23], penalties=penalties
    )
    assert sampling_request_of(one, 0).logits_update == LogitsUpdate(num_known_tokens=2, tokens=[23], penalties=None)
    assert one.num_tokens_in_penalties == 3


def test_the_prompt_is_told_to_those_alone_who_count_it() -> None:
    adjust = sampling_request_of(sequence(presence_penalty=1.0), 0).logits_update
    assert adjust is not None
    assert adjust.penalties == Penalties(
        presence=1.0, frequency=0.0, repetition=1.0, logit_bias={}, prompt_token_ids=[]
    )


def score(position: int, row: int, wanted: int) -> SamplingRequest:
    """Returns the score of the prompt's token after ``position``."""
    return SamplingRequest(
        row=row, sequence=3, temperature=0.0, top_k=0, top_p=1.0, seed=0, output_index=0, logprobs=wanted,
        prompt_logprob_token=PROMPT[position + 1],
    )  # fmt: skip


def test_each_token_of_a_prompt_is_scored_once() -> None:
    one = sequence(prompt_logprobs=2)
    assert prompt_logprob_requests_of(one, 0, 2, row=5) == [score(0, 5, 2), score(1, 6, 2)]
    assert one.num_scored_prompt_tokens == 2
    assert prompt_logprob_requests_of(one, 0, 3, row=0) == [score(2, 2, 2)], "computed again behind a preemption"
    assert prompt_logprob_requests_of(one, 3, 2, row=1) == [score(3, 1, 2)], (
        "behind the last one there is no token of the prompt"
    )
    assert prompt_logprob_requests_of(one, 5, 1, row=0) == []
    assert one.num_scored_prompt_tokens == 4
    assert prompt_logprob_requests_of(one, 0, 2, row=0) == []
    assert one.num_scored_prompt_tokens == 4


@pytest.mark.parametrize(("index", "wanted"), [(0, None), (1, 2)])
def test_scores_are_for_the_first_completion_of_who_wants_them(index: int, wanted: int | None) -> None:
    one = sequence(index, prompt_logprobs=wanted)
    assert prompt_logprob_requests_of(one, 0, 5, row=0) == []
    assert one.num_scored_prompt_tokens == 0


def test_no_alternatives_are_a_wish_too() -> None:
    assert prompt_logprob_requests_of(sequence(prompt_logprobs=0), 0, 1, row=0) == [score(0, 0, 0)]
    assert sampling_request_of(sequence(logprobs=0), 0).logprobs == 0
