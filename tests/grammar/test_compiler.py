"""Grammars that compile, and the words by which others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.grammar.compiler import GrammarCompiler, GrammarError, source_of
from lamina.protocol.control import Vocabulary
from lamina.request import StructuredOutputsParams


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"json": {"type": "object", "not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "object", "x-guidance": {"lenient": True}, "if": {}}}, "if"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
        ({"json": {"enum": []}}, "Unsatisfiable schema"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text follows this grammar"),
        ({"json": {"$ref": "http://x/y"}}, "retrieving it failed"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"grammar": 'start: "a" x'}, 'unknown name: "x"'),
        ({"grammar": "start: start"}, "no text follows this grammar"),
    ],
)
def test_refused_by_name(compiler: GrammarCompiler, asked: dict[str, Any], named: str) -> None:
    with pytest.raises(GrammarError) as error:
        compiler.compile(source_of(StructuredOutputsParams(**asked)))
    assert named in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("regex", ["^a+$", "a+", "^a+", "a+$", r"^a+\\$", r"a\$", "a/b\nc"])
def test_anchors_at_the_ends_mean_nothing(compiler: GrammarCompiler, regex: str) -> None:
    compiler.compile(source_of(StructuredOutputsParams(regex=regex)))


def test_whitespace_is_bounded(compiler: GrammarCompiler, tokenizer: Any) -> None:
    space = tokenizer.encode(" ", add_special_tokens=False)[0]
    for asked, most in (({}, 32), ({"disable_any_whitespace": True}, 0)):
        matcher = compiler.compile(source_of(StructuredOutputsParams(json={"type": "object"}, **asked)))
        matcher.consume_tokens(tokenizer.encode("{", add_special_tokens=False))
        assert matcher.validate_tokens([space] * 300) == most
