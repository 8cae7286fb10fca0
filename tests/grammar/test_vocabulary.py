"""The bytes of tokens: a text's tokens join to its bytes; special, padded and broken tokens are no text."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.grammar.vocabulary import vocabulary_of
from lamina.protocol.control import Vocabulary


@pytest.mark.parametrize("text", ["def f(x):\n    return 1", '{"é": "😀"}', " a  b\t"])
def test_the_tokens_of_a_text_join_to_its_bytes(tokenizer: Any, vocabulary: Vocabulary, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(vocabulary.tokens[token] for token in ids) == text.encode()


def test_special_tokens_are_marked_and_padding_is_empty(vocabulary: Vocabulary) -> None:
    assert vocabulary.tokens[1] == b"\xff<|end|>"
    assert vocabulary.special_token_ids == [0, 1, 2, 3]
    assert vocabulary.tokens[2048:] == [b"", b""]
    assert [token for token, text in enumerate(vocabulary.tokens) if text[:1] == b"\xff"] == [0, 1, 2, 3]


def test_a_model_without_an_end_token_has_no_structured_output(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="need a model with an end token"):
        vocabulary_of(tokenizer, 2048, [])
