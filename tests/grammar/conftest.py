"""The vocabulary of the model that ships here."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.grammar.vocabulary import vocabulary_of
from lamina.models.tokenizer import load_tokenizer
from lamina.protocol.control import Vocabulary

MODEL = "examples/tiny_lm/model"
END = 1


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return vocabulary_of(tokenizer, 2050, [END, 2])
