"""Masks as the sampler applies them: the logits that stay, in a part of the vocabulary too, and ``min_tokens``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina.grammar.rules import GrammarMask
from lamina.ops.sampling.sampler import Sampler, change_logits
from lamina.ops.sampling.token_history import LogitChanges, TokenHistories, TokenHistory, logit_changes_of
from lamina.ops.sampling.token_mask import AllowedTokens
from lamina.protocol.control import ALL_TOKENS_BANNED, NO_TOKEN, LogitsUpdate, Penalties, SamplingRequest

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


def grammar_mask(allowed: Sequence[int], size: int = 1024) -> GrammarMask:
    kept = np.zeros(size, dtype=bool)
    kept[list(allowed)] = True
    return GrammarMask(np.packbits(kept, bitorder="little"))


def drawn(logits: Tensor, masks: Sequence[GrammarMask], **more: Any) -> list[tuple[int, list[Any]]]:
    """Draws with each row's mask; ``more``: of the penalties."""
    update = LogitsUpdate(num_known_tokens=0, tokens=[], penalties=Penalties(**NONE | more))
    seen = {row: changes(mask)._replace(penalties=update.penalties) for row, mask in enumerate(masks)}  # type: ignore[arg-type]
    draws = [
        SamplingRequest(row=row, sequence=row, temperature=row % 2 * 0.8, top_k=0, top_p=1.0 - row % 3 * 0.1, seed=row,
                        output_index=5, logprobs=1, logits_update=update)
        for row in seen
    ]  # fmt: skip
    return [(token.token_id, token.logprobs) for token in Sampler(1).sample(logits, draws, seen)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_mask_alone_draws_what_it_draws_beside_a_bias_of_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 2500, generator=generator).to(dtype)
    masks = [
        grammar_mask(torch.randperm(2500, generator=generator)[: 1 + 400 * row].tolist(), 3072) for row in range(6)
    ]
    before = logits.clone()
    found = drawn(logits, masks)
    assert found == drawn(logits, masks, logit_bias={7: 0.0}), "the other way, on a copy of the logits"
    assert torch.equal(logits, before)
    assert all(mask.bits[token // 8] >> token % 8 & 1 for mask, (token, _) in zip(masks, found, strict=True))
    assert found != drawn(logits, masks, logit_bias={found[5][0]: -9.0}), "a bias counts"


def test_a_mask_that_leaves_no_token_is_told_from_logits_that_are_no_numbers() -> None:
    logits = torch.tensor([[1.0, 2.0], [1.0, float("nan")], [1.0, float("nan")]])
    found = [token for token, _ in drawn(logits, [grammar_mask([]), grammar_mask([1]), grammar_mask([0])])]
    assert found == [ALL_TOKENS_BANNED, NO_TOKEN, 0]


def test_a_mask_names_its_tokens_where_they_are_few() -> None:
    assert grammar_mask([70, 3]).few_token_ids == [3, 70]
    assert grammar_mask(range(65)).few_token_ids is None
