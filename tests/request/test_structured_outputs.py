"""One form of structured output, within bounds, and the errors that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.request import SamplingParams, StructuredOutputsParams


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "must have exactly one of json, regex, choice, grammar, json_object, structural_tag, not none"),
        ({"json": {}, "regex": "a"}, "must have exactly one of .*, not json, regex"),
        ({"json_object": False}, "must have exactly one of .*, not none"),
        ({"json": "{"}, "structured_outputs.json is no JSON"),
        ({"json": [1]}, "structured_outputs.json must be a JSON schema, which is an object"),
        ({"json": {"a": float("nan")}}, "structured_outputs.json is no JSON"),
        ({"json": deep(64)}, "structured_outputs.json is nested deeper than 64"),
        ({"json": {"description": "x" * 70_000}}, "structured_outputs.json must have at most 65536 bytes"),
        ({"choice": []}, "structured_outputs.choice must be a list of texts"),
        ({"choice": ["a", 1]}, "structured_outputs.choice must be a list of texts"),
        ({"choice": ["x" * 40_000, "y" * 40_000]}, "structured_outputs.choice must have at most 65536 bytes"),
        ({"regex": ""}, "structured_outputs.regex must be text that is not empty"),
        ({"structural_tag": "[]"}, "structured_outputs.structural_tag must be a structural tag, which is an object"),
        ({"shape": 1}, "structured_outputs: .*unexpected keyword argument 'shape'"),
    ],
)
def test_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamplingParams(structured_outputs=given)  # type: ignore[arg-type]


def test_a_schema_becomes_text_and_a_clone_shares_nothing() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "string", "pattern": "é"}))
    assert params.structured_outputs is not None
    assert params.structured_outputs.json == '{"type": "string", "pattern": "é"}'
    clone = params.clone()
    assert clone.structured_outputs == params.structured_outputs
    assert clone.structured_outputs is not params.structured_outputs
    assert params.adjusts_logits
    assert not SamplingParams().adjusts_logits
    assert StructuredOutputsParams(json=deep(62)).json


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="structured_outputs must be a StructuredOutputsParams, not 'json'"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]
