"""Structural tags in both forms: texts that they allow, texts that they do not, and words of refusals."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lamina.grammar.compiler import GrammarCompiler, GrammarError, source_of
from lamina.protocol.control import Vocabulary
from lamina.request import StructuredOutputsParams

MARKS = {"<end>": 256, "<|call|>": 257, "<|done|>": 258}
WORDS = Vocabulary(
    tokens=[*(bytes([i]) for i in range(256)), *(b"\xff" + mark.encode() for mark in MARKS)],
    special_token_ids=[*MARKS.values()],
    end_token_ids=[256],
)
COMPILER = GrammarCompiler(WORDS)
NUMBER: Any = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"type": "array", "items": NUMBER, "minItems": 1}}
OLD: Any = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=add>", "schema": SCHEMA["json_schema"], "end": "</f>"},
        {"begin": "<f=one>", "schema": NUMBER, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
SPECIAL: Any = {"begin": "<|call|>add:", "content": SCHEMA, "end": "<|done|>"}


def new(kind: str, **fields: Any) -> dict[str, Any]:
    """Returns a tag of the newer form."""
    return {"type": "structural_tag", "format": {"type": kind, **fields}}


def is_whole(tag: dict[str, Any], text: str) -> bool:
    """Returns whether the grammar takes the text, and lets it end there."""
    params = StructuredOutputsParams(structural_tag=tag)
    matcher = COMPILER.compile(source_of(params, COMPILER.specials))
    parts = re.split("(<end>|<\\|call\\|>|<\\|done\\|>)", text)
    tokens = [token for part in parts for token in ([MARKS[part]] if part in MARKS else part.encode())]
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("tag", "right", "wrong"),
    [
        (OLD, ["", "Well < </f> <f", "a<f=add>[1, 2]</f>b<f=one>3</f>"], ["<f=two>", "<f=add>2</f>", "<f=one>3"]),
        (
            new("triggered_tags", triggers=["<|call|>"], tags=[SPECIAL]),
            ["Well [1]", "a<|call|>add:[1]<|done|>b"],
            ["<|call|>sub:", "<|call|>add:1<|done|>", "<|done|>"],
        ),
        (
            new("triggered_tags", triggers=["<|call|>"], tags=[SPECIAL], at_least_one=True, stop_after_first=True),
            ["<|call|>add:[1]<|done|>"],
            ["", "a<|call|>add:[1]<|done|>", "<|call|>add:[1]<|done|>b"],
        ),
        (
            new("tag", begin="<think>", content={"type": "any_text"}, end="</think>"),
            ["<think>a <b\n</think>"],
            ["a", "<think>", "<think></think>b"],
        ),
        (
            new("sequence", elements=[{"type": "const_string", "value": "x:"}, SCHEMA, {"type": "any_text"}]),
            ["x:[1]", "x:[1] and more"],
            ["x:", "x:[10]", "[1]"],
        ),
        (
            new("or", elements=[{"type": "regex", "pattern": "[a-c]+"}, {"type": "const_string", "value": "no"}]),
            ["abc", "no"],
            ["", "d", "ano"],
        ),
        (
            new("tags_with_separator", tags=[{"begin": "(", "content": SCHEMA, "end": [")", "]"]}], separator=", "),
            ["", "([1])", "([1]), ([2]]"],
            ["([1]) ([2])", "([1]),"],
        ),
        (
            new("tag", begin="a", content=new("or", elements=[SCHEMA, SCHEMA])["format"], end=""),
            ["a[1]"],
            ["a", "a[1]b"],
        ),
    ],
)  # fmt: skip
def test_texts_of_a_tag(tag: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert is_whole(tag, text), text
    for text in wrong:
        assert not is_whole(tag, text), text


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({"type": "json"}, 'structural_tag must be an object of type "structural_tag"'),
        ({"type": "structural_tag"}, "structural_tag has the format 'None': take one of const_string"),
        (new("qwen"), "structural_tag has the format 'qwen'"),
        (new("tag", begin=5), "structural_tag: begin must be text, not '5'"),
        (new("json_schema", json_schema=True), "structural_tag: json_schema must be an object, not 'True'"),
        (new("or", elements=[]), "structural_tag: elements must be a list, of objects, that is not empty"),
        ({**OLD, "triggers": ["<g"]}, "structural_tag: the tag '<f=add>' begins with none of the triggers"),
        ({**OLD, "triggers": [1]}, "structural_tag: triggers must be a list, of texts, that is not empty"),
        (new("sequence", elements=[{"type": "any_text"}, SCHEMA]), "structural_tag: any_text must be the content of"),
        (new("sequence", elements=[{"type": "triggered_tags"}, SCHEMA]), "triggered_tags must be the last format"),
        (new("json_schema", json_schema={"not": {}}), 'Unimplemented keys: ["not"]'),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(tag: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError) as error:
        COMPILER.compile(source_of(StructuredOutputsParams(structural_tag=tag), COMPILER.specials))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_formats_may_not_lie_too_deep() -> None:
    deep: Any = {"type": "const_string", "value": "x"}
    for _ in range(17):
        deep = {"type": "or", "elements": [deep]}
    with pytest.raises(GrammarError, match="structural_tag is nested deeper than 16"):
        source_of(StructuredOutputsParams(structural_tag=json.dumps({"format": deep})))
