"""Every form of prompt that is taken, and one clear line for all else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lamina import SamplingParams
from lamina.api.frontend import conversation_list, params_list, prompt_list


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ((5, 6), [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ([[5, 6], "a"], [[5, 6], "a"]),
        ({"prompt": "a"}, ["a"]),
        ({"prompt_token_ids": [5]}, [[5]]),
        ([{"prompt": "a"}, {"prompt": "b", "prompt_token_ids": [5]}], ["a", [5]]),
        (np.array([5, 6]), [[5, 6]]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        (torch.tensor([5, 6]), [[5, 6]]),
        ([np.int64(5)], [[5]]),
        ([], []),
    ],
    ids=repr,
)
def test_forms_of_prompts(given: Any, taken: list[Any]) -> None:
    got = prompt_list(given)
    assert got == taken
    assert all(type(t) is int for p in got if isinstance(p, list) for t in p)


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        5.0,
        [[]],
        [5.5],
        [["a"]],
        {"text": "a"},
        {"prompt": None},
        {"prompt": {}},
        [None],
        b"raw",
        np.array([0.5]),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_told_in_one_line(given: Any) -> None:
    with pytest.raises(ValueError, match="prompt") as e:
        prompt_list(given)
    assert "\n" not in str(e.value)


def test_sampling_params_are_one_or_one_for_each() -> None:
    a, b = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert params_list(2, None) == [SamplingParams()] * 2
    assert params_list(2, a) == [a, a]
    assert params_list(2, [a, b]) == [a, b]
    for wrong in ([a], {"temperature": 0}, [a, None], "greedy"):
        with pytest.raises(ValueError, match="sampling_params"):
            params_list(2, wrong)


def test_conversations() -> None:
    one = [{"role": "user", "content": "hi"}]
    assert conversation_list(one) == [one]
    assert conversation_list([one, one]) == [one, one]
    for wrong in ("hello", [], [[]], [{"content": "hi"}], None, {"role": "user"}, ["hello"]):
        with pytest.raises(ValueError, match="messages must be"):
            conversation_list(wrong)
