"""Masks as the sampler applies them: the logits that stay, in a part of the vocabulary too, and ``min_tokens``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.ops.sampling.sampler import change_logits
from lamina.ops.sampling.token_history import LogitChanges, TokenHistories, TokenHistory, logit_changes_of
from lamina.ops.sampling.token_mask import AllowedTokens
from lamina.protocol.control import LogitsUpdate, Penalties, SamplingRequest

NONE: dict[str, Any] = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, "logit_bias": {}, "prompt_token_ids": []}
INF = float("inf")


class Rule(AllowedTokens):
    """A rule that keeps the tokens that it follows, and overrules ``min_tokens``."""

    overrules_min_tokens = True

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__(token_ids)
        self.seen: list[int] = []
        self.began = 0

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return len(self.seen)

    def begin(self, num_known: int, tokens: Sequence[int]) -> None:
        self.began += 1
        self.seen[num_known:] = tokens


def request(**more: Any) -> SamplingRequest:
    return SamplingRequest(row=0, sequence=4, temperature=0.0, top_k=0, top_p=1.0, seed=0, output_index=0, logprobs=-1,
                           **more)  # fmt: skip


def changes(*rules: Rule) -> LogitChanges:
    return LogitChanges(Penalties(**NONE), {}, torch.empty(0, dtype=torch.int64), -1, (), rules)


@pytest.mark.parametrize(("first", "expected"), [(0, [-INF, 1, -INF, 3]), (2, [-INF, 1, -INF, -INF]), (9, [-INF] * 4)])
def test_a_part_of_the_vocabulary_keeps_its_own_tokens(first: int, expected: list[float]) -> None:
    row = torch.arange(4.0)
    AllowedTokens([1, 3] if not first else [3, 6, 1]).apply(row, first)
    assert row.tolist() == expected


@pytest.mark.parametrize(("allowed", "drawn"), [([2], 2), ([2, 3], 3), ([0, 2], 0)])
def test_a_stop_token_is_drawn_early_where_a_rule_leaves_nothing_else(allowed: list[int], drawn: int) -> None:
    row: Tensor = torch.tensor([1.0, 2.0, 9.0, 3.0])
    update = LogitsUpdate(num_known_tokens=0, tokens=[], penalties=Penalties(**NONE))
    change_logits(row, request(banned_token_ids=[2], logits_update=update), {4: changes(Rule(allowed))})
    assert int(row.argmax()) == drawn
    assert row.isneginf().sum() == 3


def test_a_fixed_set_does_not_beat_min_tokens() -> None:
    row: Tensor = torch.tensor([1.0, 2.0, 9.0, 3.0])
    update = LogitsUpdate(num_known_tokens=0, tokens=[], penalties=Penalties(**NONE, allowed_token_ids=[2]))
    draw = request(banned_token_ids=[2], logits_update=update)
    change_logits(row, draw, logit_changes_of(TokenHistories().note([], [draw]), {}))
    assert row.isneginf().all()


def test_a_rule_follows_the_tokens_and_the_pending_one_and_goes_back() -> None:
    rule = Rule([1])
    history = TokenHistory(Penalties(**NONE), [rule])
    history.append([5, 6])
    assert history.logit_changes(1, 6).masks == [rule]
    assert (rule.seen, rule.began) == ([5, 6], 1)
    history.begin(2, 7)
    assert history.logit_changes(2, 7).masks == [rule]
    assert (rule.seen, rule.began) == ([5, 6, 7], 2), "begun once, ahead of its draw"
    history.logit_changes(1, None)
    assert rule.seen == [5]
