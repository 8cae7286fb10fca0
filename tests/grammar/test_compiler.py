"""Grammars that compile, and the words by which others are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lamina.grammar.compiler import GrammarCompiler, GrammarError, source_of
from lamina.grammar.lark import up_to
from lamina.protocol.control import Vocabulary
from lamina.request import StructuredOutputsParams

LETTERS = Vocabulary(
    tokens=[*(bytes([i]) for i in range(256)), b"\xff<end>"], end_token_ids=[256], special_token_ids=[256]
)


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


@pytest.mark.parametrize(
    ("asked", "right", "wrong"),
    [
        (
            {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
            '{"a": 1}',
            '{"a":"',
        ),
        ({"regex": "[a-c]/2"}, "b/2", "d"),
        ({"choice": ['ja "x"', "nein"]}, 'ja "x"', "x"),
        ({"grammar": 'start: "ja" end\nend: "."'}, "ja.", "."),
    ],
)
def test_a_structure_begins_after_reasoning(asked: dict[str, Any], right: str, wrong: str) -> None:
    source = source_of(
        StructuredOutputsParams(**asked, before="before: think\n" + up_to("think", ["</think>\n\n"], {}))
    )
    for thought in ("", '<think>\nHm {"b </think\n'):
        matcher = GrammarCompiler(LETTERS).compile(source)
        begun = list(f"{thought}</think>\n\n".encode())
        assert matcher.validate_tokens(begun + list(wrong.encode())) < len(begun) + len(wrong)
        assert matcher.consume_tokens(begun + list(right.encode()))
        assert matcher.is_accepting()


@pytest.mark.parametrize("regex", ["^a+$", "a+", "^a+", "a+$", r"^a+\\$", r"a\$", "a/b\nc"])
def test_anchors_at_the_ends_mean_nothing(compiler: GrammarCompiler, regex: str) -> None:
    compiler.compile(source_of(StructuredOutputsParams(regex=regex)))


@pytest.mark.parametrize("asked", [{"json": {"type": "object"}}, {"json_object": True}])
def test_whitespace_is_a_space_or_a_line_break_with_an_indentation(
    compiler: GrammarCompiler, tokenizer: Any, asked: dict[str, Any]
) -> None:
    def tokens(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    matcher = compiler.compile(source_of(StructuredOutputsParams(**asked)))
    value = {"a": 1, "b": [{"c": []}, {}]}
    for text in (json.dumps(value), *(json.dumps(value, indent=indent) for indent in (0, 1, 4, "\t")), '{ "a" : 1 }'):
        assert matcher.validate_tokens(tokens(text)) == len(tokens(text))
    (end_of_line,), (space,) = tokens("\n"), tokens(" ")
    opened = len(tokens("{"))
    assert matcher.validate_tokens([*tokens("{"), *[end_of_line] * 19]) == opened + 1
    assert matcher.validate_tokens([*tokens("{"), *[space] * 19]) == opened + 1
    assert matcher.validate_tokens([*tokens("{"), end_of_line, *[space] * 300]) == opened + 1 + 32
    compact = compiler.compile(source_of(StructuredOutputsParams(disable_any_whitespace=True, **asked)))
    assert compact.validate_tokens([*tokens("{"), space]) == opened
