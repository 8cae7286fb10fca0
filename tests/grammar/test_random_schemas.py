"""Random schemas: text that ends is accepted by jsonschema, values that the schema allows pass the masks.

``perf/schema_runs.py`` runs thousands of them, on real workers too.

Covers: perf/schema_runs.py.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from random_schemas import dumped, root_schema
from schema_runs import main

from lamina.grammar.compiler import GrammarCompiler, source_of
from lamina.protocol.control import Vocabulary
from lamina.request import StructuredOutputsParams

MOST = 400  # tokens of a walk


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary)


def walk(matcher: Any, vocabulary: Vocabulary, dice: Random) -> tuple[bytes, bool]:
    """Random tokens that the masks allow. Returns the text, and whether it has ended."""
    text, end = b"", vocabulary.end_token_ids[0]
    for _ in range(MOST):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        choice = np.flatnonzero(bits)
        assert len(choice), text
        if end in choice and (dice.random() < 0.3 or len(choice) == 1):
            return text, True
        token = int(dice.choice(choice[choice != end]))
        assert matcher.consume_token(token)
        text += vocabulary.tokens[token]
    return text, False


@pytest.mark.parametrize("part", range(10))
def test_texts_and_values_of_random_schemas(
    vocabulary: Vocabulary, compiler: GrammarCompiler, tokenizer: Any, part: int
) -> None:
    ended = 0
    for seed in range(part * 20, part * 20 + 20):
        made, dice = root_schema(seed), Random(seed)
        check = jsonschema.Draft202012Validator(made.schema)
        matcher = compiler.compile(source_of(StructuredOutputsParams(json=made.schema)))
        text, is_whole = walk(matcher, vocabulary, dice)
        ended += is_whole
        if is_whole:
            check.validate(json.loads(text))
        for _ in range(3):
            value = made.value(dice)
            check.validate(value)
            matcher.reset()
            tokens = tokenizer.encode(dumped(value), add_special_tokens=False)
            assert matcher.validate_tokens(tokens) == len(tokens), (seed, made.schema, value)
            assert matcher.consume_tokens(tokens)
            assert matcher.is_accepting(), (seed, made.schema, value)
    assert ended > 10, "most of them end"


def test_a_value_that_a_schema_does_not_allow_meets_a_mask(compiler: GrammarCompiler, tokenizer: Any) -> None:
    """The control: the same walk refuses the values of another schema, where jsonschema does."""
    refused = 0
    for seed in range(40):
        made, other = root_schema(seed), root_schema(seed + 1000).value(Random(seed))
        is_right = jsonschema.Draft202012Validator(made.schema).is_valid(other)
        matcher = compiler.compile(source_of(StructuredOutputsParams(json=made.schema)))
        tokens = tokenizer.encode(dumped(other), add_special_tokens=False)
        passes = matcher.validate_tokens(tokens) == len(tokens)
        passes = passes and matcher.consume_tokens(tokens) and matcher.is_accepting()
        assert is_right or not passes, (seed, other)
        refused += not passes
    assert refused > 20


@pytest.mark.long
@pytest.mark.timeout(300)
def test_on_real_workers_that_preempt_and_are_killed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "60", "--kills", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schemas"] == 60
    assert found["ended"] > 20
    assert found["kills"] == 1
    assert found["preemptions"] > 0
