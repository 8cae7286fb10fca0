"""The answer to vLLM's fields of SamplingParams: taken, refused by name, or in their order."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import Any

import numpy as np
import pytest

from lamina import SamplingParams
from lamina.request.unsupported_options import ORDER, UNSERVED


class Kind(Enum):
    """An enum with the values of vLLM's RequestOutputKind."""

    CUMULATIVE = 0
    DELTA = 1


def test_arguments_without_names_are_taken_in_their_order() -> None:
    given = SamplingParams(2, 0.5, 0.25, 1.5, 0.75, None, 0.9, 5, 0.1, 7, ["x"], [3], True, 9, 4, 2, 1)  # type: ignore[misc]
    named = SamplingParams(
        n=2, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, temperature=0.75, top_p=0.9, top_k=5,
        min_p=0.1, seed=7, stop=["x"], stop_token_ids=[3], ignore_eos=True, max_tokens=9, min_tokens=4, logprobs=2,
        prompt_logprobs=1,
    )  # fmt: skip
    assert given == named
    with pytest.raises(ValueError, match="^watermarking=0.9 is not served here: lamina.wrap"):
        SamplingParams(1, 0.0, 0.0, 1.0, 0.7, 0.9)  # type: ignore[misc]
    with pytest.raises(TypeError, match="got two values for n"):
        SamplingParams(2, n=2)  # type: ignore[misc]
    with pytest.raises(TypeError, match=f"takes {len(ORDER)} arguments without names, not {len(ORDER) + 1}"):
        SamplingParams(*[None] * (len(ORDER) + 1))  # type: ignore[misc]
    known = {f.name for f in fields(SamplingParams)}
    assert {*ORDER} - known <= UNSERVED.keys()
    assert not known & UNSERVED.keys()


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("guided_decoding", {"regex": "a+"}, "take structured_outputs=StructuredOutputsParams"),
        ("response_format", {"type": "json_object"}, "take structured_outputs=StructuredOutputsParams"),
        ("logits_processors", [print], "lamina.wrap(model).generate takes logits_processor"),
        ("flat_logprobs", 1, "logprobs are a list of mappings"),
        ("output_kind", Kind.DELTA, "outputs are cumulative"),
        ("prompt_logprob_token_ids", np.zeros((2, 2), int), "take prompt_logprobs=-1"),
        ("best_of", 2, "take n"),
    ],
)
def test_a_field_that_asks_for_something_is_refused_by_name(name: str, value: Any, instead: str) -> None:
    with pytest.raises(ValueError) as refused:
        SamplingParams(**{name: value})
    words = str(refused.value)
    assert words.startswith(f"{name}=")
    assert f" is not served here: {instead}" in words
    assert "\n" not in words
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(ValueError, match=f"^{name}=.* is not served here"):
        params.clone()


def test_a_field_that_asks_for_nothing_is_taken() -> None:
    for name, (neutral, _) in UNSERVED.items():
        for value in (None, *neutral):
            assert SamplingParams(**{name: value}) == SamplingParams(), name
    assert SamplingParams(output_kind=Kind.CUMULATIVE) == SamplingParams()  # type: ignore[call-arg]
    params: Any = SamplingParams()
    params.structured_outputs = None
    assert params.clone() == SamplingParams()


def test_a_name_that_is_none_is_told_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"^temprature is no sampling parameter: did you mean temperature\?$"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    params: Any = SamplingParams()
    params.max_token = 5
    with pytest.raises(ValueError, match=r"^max_token is no sampling parameter: did you mean max_tokens\?$"):
        params.clone()


@pytest.mark.parametrize("seed", [1 << 63, -2, 1 << 64])
def test_a_seed_beyond_63_bits_is_refused(seed: int) -> None:
    assert SamplingParams(seed=(1 << 63) - 1).seed == (1 << 63) - 1
    with pytest.raises(ValueError, match=rf"^seed must lie in 0\.\.2\*\*63-1, not {seed}$"):
        SamplingParams(seed=seed)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids is empty: name the tokens"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of token ids, not 5"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids must be an integer, not 1.5"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids must be a list of token ids, not '12'"),
        ({"bad_words": [""]}, "bad_words must not contain an empty string"),
        ({"bad_words": [5]}, "bad_words must be text or a list of texts, not [5]"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids must not contain an empty list"),
        ({"bad_words_token_ids": [5]}, "bad_words_token_ids must be a list of token ids, not 5"),
        ({"logprobs": -2}, "logprobs must be at least 0, or -1 for the whole vocabulary, not -2"),
        ({"prompt_logprobs": 1 << 31}, "prompt_logprobs must be at least 0, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be at least 1, or -1 for as many as fit, not -2"),
    ],
)
def test_bad_choices_of_tokens_are_named(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        SamplingParams(**bad)
    assert str(refused.value).startswith(words)


def test_what_is_given_is_made_plain() -> None:
    params = SamplingParams(bad_words=["a", "b", "a"], logprobs=True, allowed_token_ids=iter((3, 4)))  # type: ignore[arg-type]
    assert (params.bad_words, params.logprobs, params.allowed_token_ids) == (["a", "b"], 1, [3, 4])
    assert type(params.logprobs) is int
    assert SamplingParams(bad_words=None).bad_words == []
    clone = params.clone()
    assert clone.allowed_token_ids is not params.allowed_token_ids
    assert clone.bad_words is not params.bad_words
