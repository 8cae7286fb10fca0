"""Structured output in transformers' ``generate``: a logits processor, for wrapped models and for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor

from lamina.grammar.compiler import source_of
from lamina.grammar.rules import Grammars
from lamina.grammar.vocabulary import special_tokens, vocabulary_of
from lamina.ops.sampling.token_mask import TokenRule
from lamina.request import StructuredOutputsParams


class StructuredOutputsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Keeps each row to a structure, from the first new token on. One processor serves one call of ``generate`` after
    another, but not two at a time.
    """

    def __init__(
        self, tokenizer: Any, structured_outputs: StructuredOutputsParams, *, end_token_ids: Sequence[int] = ()
    ) -> None:
        """``end_token_ids``: of the model; empty: the tokenizer's. Raises ValueError for a structure that cannot be
        enforced.
        """
        self._tokenizer = tokenizer
        self._ends = list(end_token_ids) or [tokenizer.eos_token_id]
        self._source = source_of(structured_outputs, special_tokens(tokenizer))
        self._grammars = Grammars()
        self._prompt, self._length = 0, -1  # tokens before the first new one; those of the last call
        self._rules: list[TokenRule] = []
        self._set_vocabulary(len(tokenizer))
        self._grammars.check(self._source)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores with minus infinity where the structure allows no token. ``input_ids`` [rows, length] and
        ``scores`` [rows, vocabulary], one token longer with each call. Raises ValueError where no token is left.
        """
        rows, length = input_ids.shape
        if length != self._length + 1 or rows != len(self._rules):
            self._prompt = length
            self._set_vocabulary(scores.shape[-1])
            self._rules = [self._grammars.rule_of(self._source) for _ in range(rows)]
        self._length = length
        masked = scores.clone()
        for rule, tokens in zip(self._rules, input_ids[:, self._prompt :].tolist(), strict=True):
            rule.begin(rule.num_tokens, tokens[rule.num_tokens :])
        for rule, row in zip(self._rules, masked, strict=True):
            rule.mask().apply(row)
        if bool((masked == float("-inf")).all(1).any()):
            raise ValueError("structured_outputs: no token continues the text: the grammar has met a limit")
        return masked

    def _set_vocabulary(self, size: int) -> None:
        self._grammars.set_vocabulary(vocabulary_of(self._tokenizer, size, self._ends))
