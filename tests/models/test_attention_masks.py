"""The meaning of a mask rule is read from the rule itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils as rules

from lamina.models.attention_masks import sliding_window_of


def prefix(length: int) -> Any:
    return rules.or_masks(rules.causal_mask_function, lambda b, h, q, k: k < length)


@given(length=st.integers(1, 300), window=st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_windows_are_recognised(length: int, window: int) -> None:
    rule = rules.sliding_window_causal_mask_function(window)
    assert sliding_window_of(rule, length) == (window if window < length else 0)


@given(length=st.integers(1, 300), chunk=st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_chunks_are_causal_only_while_there_is_one(length: int, chunk: int) -> None:
    rule = rules.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    expected = 0 if chunk >= length else 1 if chunk == 1 else None
    assert sliding_window_of(rule, length) == expected


@pytest.mark.parametrize(
    "rule",
    [
        rules.bidirectional_mask_function,
        rules.sliding_window_bidirectional_mask_function(8),
        prefix(4),
        rules.blockwise_overlay(torch.zeros(1, 64, dtype=torch.int64)),
        rules.and_masks(rules.causal_mask_function, lambda b, h, q, k: k % 2 == 0),
        rules.and_masks(rules.causal_mask_function, lambda b, h, q, k: k < q),
        lambda b, h, q, k: q.no_such_method(),
        lambda b, h, q, k: np.ones((1, 1)),
    ],
)
def test_anything_else_is_not_a_window(rule: Any) -> None:
    assert sliding_window_of(rule, 64) is None


def test_a_rule_over_tensors_without_values_is_unknown() -> None:
    rule = rules.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64, device="meta"))
    assert sliding_window_of(rule, 64) is None
