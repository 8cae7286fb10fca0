"""Masks along a text: never an end before the grammar is complete, and always a way that leads to one."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from lamina.grammar.compiler import source_of
from lamina.grammar.rules import GrammarMask, Grammars, MaskThread
from lamina.ops.sampling.token_mask import TokenRule
from lamina.protocol.control import Penalties, Vocabulary
from lamina.request import StructuredOutputsParams

ENDS = [1, 2]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": -3, "maximum": 40}, "b": {"enum": ["x", "é😀", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NONE: dict[str, Any] = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, "logit_bias": {}, "prompt_token_ids": []}


def rule_of(vocabulary: Vocabulary, grammars: Grammars | None = None, **asked: Any) -> TokenRule:
    grammars = grammars or Grammars()
    grammars.set_vocabulary(vocabulary)
    (rule,) = grammars.rules_of(Penalties(**NONE, grammar=source_of(StructuredOutputsParams(**asked))))
    return rule


def allowed(rule: TokenRule, size: int = 2050) -> list[int]:
    row = torch.zeros(size)
    rule.mask().apply(row)
    return [int(i) for i in row.isfinite().nonzero()]


def is_complete(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return set(value) == {"a", "b"} and -3 <= value["a"] <= 40 and value["b"] in ("x", "é😀", None)


def walk(rule: TokenRule, vocabulary: Vocabulary, seed: int, most: int = 400) -> tuple[list[int], list[list[int]]]:
    """Take random tokens that the masks allow, up to an end token. Returns them, and the tokens allowed before each."""
    tokens, masks, dice = list[int](), list[list[int]](), random.Random(seed)
    rule.begin(0, [])
    while (choice := allowed(rule)) and len(tokens) < most:
        masks.append(choice)
        token = dice.choice(sorted(choice, key=lambda t: len(vocabulary.tokens[t]))[: max(1, 1 + dice.randrange(40))])
        rule.begin(len(tokens), [token])
        tokens.append(token)
        if token in ENDS:
            break
    return tokens, masks


@pytest.mark.parametrize("seed", range(12))
def test_an_end_is_allowed_exactly_where_the_text_is_complete(vocabulary: Vocabulary, seed: int) -> None:
    tokens, masks = walk(rule_of(vocabulary, json=SCHEMA), vocabulary, seed)
    text = b""
    for token, mask in zip(tokens, masks, strict=True):
        complete = is_complete(text.decode(errors="replace"))
        assert (set(ENDS) <= set(mask)) == complete, text
        assert complete or not set(ENDS) & set(mask), text
        text += b"" if token in ENDS else vocabulary.tokens[token]
    assert tokens[-1] not in ENDS or is_complete(text.decode())
    assert not {token for mask in masks for token in mask} & {0, 3, 2048, 2049}, "special and padded tokens"


@pytest.mark.parametrize("seed", range(6))
def test_a_walk_through_an_expression_matches_it(vocabulary: Vocabulary, seed: int) -> None:
    pattern = r"[a-f]{2,5}(-\d\d){1,3}\.(é|x+y)"
    tokens, _ = walk(rule_of(vocabulary, regex=f"^{pattern}$"), vocabulary, seed)
    assert tokens[-1] in ENDS
    assert re.fullmatch(pattern, b"".join(vocabulary.tokens[t] for t in tokens[:-1]).decode())


def test_after_the_end_only_ends_are_allowed_and_nothing_is_raised(vocabulary: Vocabulary, tokenizer: Any) -> None:
    rule, ids = rule_of(vocabulary, choice=["yes"]), tokenizer.encode("yes", add_special_tokens=False)
    rule.begin(0, ids)
    assert allowed(rule) == ENDS
    rule.begin(len(ids), [2])
    assert allowed(rule) == ENDS, "the row that runs past the end"
    rule.begin(len(ids) + 1, [0, 77])
    assert allowed(rule) == ENDS


def test_a_token_that_breaks_the_grammar_leaves_nothing(vocabulary: Vocabulary, tokenizer: Any) -> None:
    rule = rule_of(vocabulary, choice=["yes"])
    rule.begin(0, tokenizer.encode("no", add_special_tokens=False))
    assert allowed(rule) == []


def test_a_rule_goes_back_and_is_replayed_from_tokens(vocabulary: Vocabulary) -> None:
    grammars = Grammars()
    tokens, masks = walk(rule_of(vocabulary, grammars, json=SCHEMA), vocabulary, 5)
    again = rule_of(vocabulary, grammars, json=SCHEMA)
    for count in (7, 3, 9, 0):
        known = min(again.num_tokens, count)
        again.begin(known, tokens[known:count])
        assert allowed(again) == masks[count]


def test_each_part_of_the_vocabulary_is_masked_alone(vocabulary: Vocabulary) -> None:
    rule = rule_of(vocabulary, json=SCHEMA)
    rule.begin(0, [])
    parts = [torch.zeros(1030), torch.zeros(1030)]  # ten more than there are tokens
    for number, part in enumerate(parts):
        rule.mask().apply(part, number * 1030)
    assert [int(i) for i in torch.cat(parts).isfinite().nonzero()] == allowed(rule)


def test_rules_begun_together_have_their_own_masks(vocabulary: Vocabulary) -> None:
    grammars, words = Grammars(), ["ab", "cd", "ef", "gh"]
    rules = [rule_of(vocabulary, grammars, regex=f"({word}){{9}}") for word in words * 8]
    byte_of = {text: token for token, text in enumerate(vocabulary.tokens) if len(text) == 1}
    for length in range(8):
        for rule, word in zip(rules, words * 8, strict=True):
            rule.begin(rule.num_tokens, [byte_of[word[(length - 1) % 2].encode()]] if length else [])
        for rule, word in zip(rules, words * 8, strict=True):
            first = {vocabulary.tokens[token][:1] for token in allowed(rule)}
            assert first == {word[length % 2].encode()}, length


def test_a_mask_that_fails_leaves_the_others() -> None:
    thread = MaskThread()

    def fail() -> GrammarMask:
        raise RuntimeError("no mask")

    wanted = [GrammarMask(np.zeros(128, dtype=np.uint8)) for _ in range(20)]
    before = [thread.begin(lambda mask=mask: mask) for mask in wanted]  # type: ignore[misc]
    failed, after = thread.begin(fail), thread.begin(lambda: wanted[0])
    assert [made.result(20) for made in (*before, after)] == [*wanted, wanted[0]]
    with pytest.raises(RuntimeError, match="no mask"):
        failed.result(20)
    assert thread.begin(lambda: wanted[1]).result(20) is wanted[1], "the thread goes on"


def test_a_worker_without_the_vocabulary_says_so() -> None:
    with pytest.raises(ValueError, match="this worker has no vocabulary"):
        Grammars().rules_of(Penalties(**NONE, grammar="start: /a/"))
