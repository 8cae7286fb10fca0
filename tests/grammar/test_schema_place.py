"""The place of an error in a schema, for the errors that llguidance really raises."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.grammar.front_end import GrammarFrontEnd
from lamina.grammar.schema_place import place_of
from lamina.protocol.control import Vocabulary
from lamina.request import SamplingParams
from lamina.request.structured_outputs import StructuredOutputsParams


def within(schema: Any) -> dict[str, Any]:
    """A schema that has ``schema`` as the second of its properties, in a list, next to a name like a keyword."""
    return {
        "type": "object",
        "properties": {
            "not": {"type": "string", "default": {"type": "strng"}},
            "a": {"type": "array", "items": schema},
        },
        "required": ["a"],
    }


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strng"}, "Invalid type: strng"),
        ({"not": {"type": "string"}}, "structured_outputs: not is not supported"),
        ({"$ref": "#/$defs/x"}, "'/$defs/x' does not exist"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "format": "zzz"}, "Unknown format: zzz"),
    ],
)
def test_an_error_names_its_place(schema: dict[str, Any], words: str, vocabulary: Vocabulary) -> None:
    front = GrammarFrontEnd(lambda: vocabulary)
    with pytest.raises(ValueError, match="structured_outputs") as whole:
        front.fill(SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
    assert words in str(whole.value)
    assert "(in " not in str(whole.value), "it is the whole schema"
    with pytest.raises(ValueError, match="structured_outputs") as inner:
        front.fill(SamplingParams(structured_outputs=StructuredOutputsParams(json=within(schema))))
    assert str(inner.value) == f"{whole.value} (in properties.a.items)"


def test_an_error_that_no_schema_explains_has_no_place() -> None:
    assert place_of("no text follows this grammar", within({"type": "string"})) == ""
    assert place_of("Invalid type: strng", within({"enum": ["strng"]})) == ""


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("a(b[", "unclosed character class"),
        ("a{5,2}", "invalid repetition count range, the start must be <= the end"),
        ("(?=x)a", "look-around, including look-ahead and look-behind, is not supported"),
    ],
)
def test_a_wrong_expression_has_the_reason_without_a_drawing(regex: str, words: str, vocabulary: Vocabulary) -> None:
    front = GrammarFrontEnd(lambda: vocabulary)
    with pytest.raises(ValueError, match="structured_outputs") as error:
        front.fill(SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex)))
    assert str(error.value) == f"structured_outputs.regex: {words}"
