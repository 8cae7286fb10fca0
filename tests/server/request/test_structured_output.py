"""The two fields that ask for a structure: what they become, and the errors that name them."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.request.structured_outputs import StructuredOutputsParams
from lamina.server.errors import ApiError
from lamina.server.request.openai_protocol import ChatRequest
from lamina.server.request.structured_output import structure_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def body(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}, "response_format": {"type": "text"}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
         {"json": SCHEMA, "disable_any_whitespace": True}),
    ],
)  # fmt: skip
def test_what_they_become(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert structure_of(body(**fields)) == (expected and StructuredOutputsParams(**expected))


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type must be text, json"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema must be an"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "shape": 1}}}, "response_format",
         "response_format.json_schema has no field 'shape'"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format",
         "response_format and structured_outputs both ask for a structure"),
        ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"shape": 1}}, "structured_outputs", "structured_outputs has no field 'shape'"),
        ({"structured_outputs": {"compiled": "x"}}, "structured_outputs", "has no field 'compiled'"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "structured_outputs.choice must be a list"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs", "structured_outputs.choice must be a list"),
        ({"structured_outputs": {"json_object": "x"}}, "structured_outputs", "json_object must be true or false"),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": []}},
            "structured_outputs",
            "disable_any_whitespace must be true or false, not []",
        ),
    ],
)  # fmt: skip
def test_refused(fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(ApiError) as error:
        structure_of(body(**fields))
    assert error.value.status == 400
    assert error.value.body["error"]["param"] == param
    assert text in error.value.body["error"]["message"]
