"""What a step asks of the sampler for a sequence: every parameter by its field, and each prompt token's score once."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.engine.draws import draw_of, scores_of
from lamina.engine.sequence import Sequence
from lamina.protocol.control import Adjust, Draw, Penalties
from lamina.request import CompletionOutput, SamplingParams

PROMPT = [11, 12, 13, 11, 14]


def sequence(index: int = 0, **params: Any) -> Sequence:
    made = Sequence(1, SamplingParams(**params), 77, PROMPT, CompletionOutput(index), 99, frozenset([6, 5]))
    made.id, made.num_drawing = 3, 1
    return made


def test_every_parameter_has_its_field() -> None:
    params = {"temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.125, "logprobs": 2}
    order = ("top_p", "min_p", "top_k")
    assert draw_of(sequence(**params, filter_order=order), 9) == Draw(
        row=9, sequence=3, **params, seed=77, index=0, banned=[], order=order, adjust=None, pending=False
    )
    plain = draw_of(sequence(top_k=-1), 0)
    assert (plain.top_k, plain.logprobs, plain.known) == (0, -1, -1)


def test_the_index_counts_tokens_known_and_being_drawn() -> None:
    one = sequence()
    one.tokens += [1, 2]
    assert (draw_of(one, 0).index, draw_of(one, 0).pending) == (2, False)
    one.num_drawing = 2
    assert (draw_of(one, 0).index, draw_of(one, 0).pending) == (3, True)


def test_stop_tokens_are_banned_before_there_are_enough() -> None:
    one = sequence(min_tokens=2, max_tokens=5)
    found = []
    for _ in range(3):
        found.append(draw_of(one, 0).banned)
        one.tokens.append(1)
    assert found == [[5, 6], [5, 6], []]


PENALISED = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 2.0, "logit_bias": {4: 1.5}}


def test_penalties_are_told_whole_at_first_and_then_what_has_come_since() -> None:
    one = sequence(**PENALISED)
    penalties = Penalties(presence=1.0, frequency=0.5, repetition=2.0, bias={4: 1.5}, prompt=[11, 12, 13, 14])
    assert draw_of(one, 0).adjust == Adjust(since=0, tokens=[], start=penalties)
    one.tokens += [21, 22]
    assert draw_of(one, 0).adjust == Adjust(since=0, tokens=[21, 22], start=None)
    one.tokens += [23]
    assert draw_of(one, 0, apart=True).adjust == Adjust(since=0, tokens=[21, 22, 23], start=penalties)
    assert draw_of(one, 0).adjust == Adjust(since=2, tokens=[23], start=None)
    assert one.num_told == 3


def test_the_prompt_is_told_to_those_alone_who_count_it() -> None:
    adjust = draw_of(sequence(presence_penalty=1.0), 0).adjust
    assert adjust is not None
    assert adjust.start == Penalties(presence=1.0, frequency=0.0, repetition=1.0, bias={}, prompt=[])


def score(position: int, row: int, wanted: int) -> Draw:
    """Of the token behind ``position`` of the prompt."""
    return Draw(
        row=row, sequence=3, temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0, logprobs=wanted,
        known=PROMPT[position + 1],
    )  # fmt: skip


def test_each_token_of_a_prompt_is_scored_once() -> None:
    one = sequence(prompt_logprobs=2)
    assert scores_of(one, 0, 2, row=5) == [score(0, 5, 2), score(1, 6, 2)]
    assert one.num_scored == 2
    assert scores_of(one, 0, 3, row=0) == [score(2, 2, 2)], "computed again behind a preemption"
    assert scores_of(one, 3, 2, row=1) == [score(3, 1, 2)], "behind the last one there is no token of the prompt"
    assert scores_of(one, 5, 1, row=0) == []
    assert one.num_scored == 4
    assert scores_of(one, 0, 2, row=0) == []
    assert one.num_scored == 4


@pytest.mark.parametrize(("index", "wanted"), [(0, None), (1, 2)])
def test_scores_are_for_the_first_completion_of_who_wants_them(index: int, wanted: int | None) -> None:
    one = sequence(index, prompt_logprobs=wanted)
    assert scores_of(one, 0, 5, row=0) == []
    assert one.num_scored == 0


def test_no_alternatives_are_a_wish_too() -> None:
    assert scores_of(sequence(prompt_logprobs=0), 0, 1, row=0) == [score(0, 0, 0)]
    assert draw_of(sequence(logprobs=0), 0).logprobs == 0
