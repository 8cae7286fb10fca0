"""The tokens that workers sample by themselves.

Covers: lamina/api/wrapped/sampling_mapping.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from lamina.api.wrapped.sampling_mapping import repetition_penalty_of

NONE = torch.tensor([[1, 1, 1], [1, 1, 1]])
SOME = torch.tensor([[0, 0, 1], [1, 1, 1]])


@pytest.mark.parametrize(
    ("mask", "ignored", "here"),
    [
        (NONE, None, True),
        (SOME, None, False),  # padding counts there, as in older transformers
        (SOME, torch.tensor([2, 0]), True),
        (SOME, torch.tensor([1, 0]), False),
        (SOME, 2, False),
    ],
)
def test_a_penalty_counts_here_what_it_counts_there_or_is_not_taken(mask: Any, ignored: Any, here: bool) -> None:
    call: Any = SimpleNamespace(mask=mask)
    processor = RepetitionPenaltyLogitsProcessor(1.5)
    processor.prompt_ignore_length = ignored  # older releases take no tensor
    found = repetition_penalty_of(processor, call)
    assert found == ({"repetition_penalty": 1.5} if here else None)
