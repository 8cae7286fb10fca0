"""Every integer, number, text and list that a client may send has bounds that its model declares."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from fake import make_service
from msgspec import inspect
from test_layers import ask

from lamina.scheduler.sessions.session_table import SessionCopy
from lamina.scheduler.sessions.session_turns import TranscriptDigest
from lamina.server.session_routes import PortedSession

# Trees of any values, whose bytes and depth the decoder bounds: see test_large_bodies.
TREES = {
    "generation_config", "chat_template_kwargs.*", "response_format.*", "structured_outputs.*",
    "messages[].tool_calls[].function.arguments", "tools[].function.parameters.*", "tool_choice.*",
}  # fmt: skip
BODIES = {
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/sessions/import", "/scale", "/drain",
    "/cordon",
}  # fmt: skip


def unbounded(schema: Mapping[str, Any], at: str) -> Iterator[str]:
    """Places in a JSON schema where a value may be as large as it likes."""
    kind = schema.get("type")
    if "enum" in schema or "const" in schema or kind in ("boolean", "null"):
        return
    needs = {"integer": ("minimum", "maximum"), "number": ("minimum", "maximum"), "string": ("maxLength",),
             "array": ("maxItems",)}.get(kind or "", ())  # fmt: skip
    yield from (f"{at}: {kind} without {need}" for need in needs if need not in schema)
    for inner in schema.get("anyOf", ()):
        yield from unbounded(inner, at)
    if kind == "array":
        yield from unbounded(schema["items"], f"{at}[]")
    if kind == "object" and "properties" in schema:
        for name, inner in schema["properties"].items():
            yield from unbounded(inner, f"{at}.{name}".lstrip("."))
    elif kind == "object":
        if "maxProperties" not in schema:
            yield f"{at}: object without maxProperties"
        inner = schema["additionalProperties"]
        yield from unbounded(inner if isinstance(inner, dict) else {}, f"{at}.*")
    if not kind and "anyOf" not in schema and at not in TREES:
        yield f"{at}: anything"


def test_every_field_of_every_body_has_bounds() -> None:
    service = make_service(admin_key="operator")
    paths = ask("GET", "/openapi.json", service).json()["paths"]
    bodies = {
        path: each["post"]["requestBody"] for path, each in paths.items() if "requestBody" in each.get("post", {})
    }
    assert bodies.keys() == BODIES
    for path, body in bodies.items():
        schema = body["content"]["application/json"]["schema"]
        assert list(unbounded(schema, "")) == [], path


def test_the_description_states_the_limits_of_this_server() -> None:
    service = make_service(max_n=3, max_stop=5, max_stop_chars=70, max_logprobs=7, max_logit_bias=11)
    post = ask("GET", "/openapi.json", service).json()["paths"]["/v1/completions"]["post"]
    fields = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    stop, strings = (form for form in fields["stop"]["anyOf"] if form["type"] != "null")
    assert fields["n"]["anyOf"][0] | {"minimum": 1, "maximum": 3} == fields["n"]["anyOf"][0]
    assert (stop["maxLength"], strings["maxItems"], strings["items"]["maxLength"]) == (70, 5, 70)
    assert fields["logprobs"]["anyOf"][0]["maximum"] == fields["prompt_logprobs"]["anyOf"][0]["maximum"] == 7
    assert fields["logit_bias"]["anyOf"][0]["maxProperties"] == fields["stop_token_ids"]["anyOf"][0]["maxItems"] == 11


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "minimum": 0}, ["x: integer without maximum"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["x: string without maxLength"]),
        ({"type": "array", "items": {}, "maxItems": 3}, ["x[]: anything"]),
        ({"type": "object", "additionalProperties": True, "maxProperties": 3}, ["x.*: anything"]),
        ({"type": "object", "properties": {"y": {"type": "number", "maximum": 1}}}, ["x.y: number without minimum"]),
        ({}, ["x: anything"]),
    ],
)
def test_a_field_without_bounds_is_seen(schema: dict[str, Any], said: list[str]) -> None:
    assert list(unbounded(schema, "x")) == said


def loose(kind: inspect.Type, at: str) -> Iterator[str]:
    """The same, of a type that msgspec decodes."""
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from loose(each, at)
    elif isinstance(kind, inspect.StructType | inspect.NamedTupleType):
        for field in kind.fields:
            yield from loose(field.type, f"{at}.{field.name}")
    elif isinstance(kind, inspect.IntType):
        if kind.ge is None or kind.le is None or kind.le >= 1 << 63:
            yield at
    elif isinstance(kind, inspect.StrType | inspect.BytesType):
        if kind.max_length is None:
            yield at
    elif not isinstance(kind, inspect.NoneType | inspect.LiteralType):
        yield f"{at}: {kind}"


def test_every_value_of_an_exported_session_has_bounds() -> None:
    assert list(loose(inspect.type_info(PortedSession), "")) == []


@pytest.mark.parametrize("value", [1, 1 << 40, (1 << 53) - 1])
def test_counts_that_a_float_holds_exactly_are_taken(value: int) -> None:
    copy = SessionCopy(identity=b"i", name="mine", turns=value, salt=b"", tokens=b"")
    assert taken(msgspec.msgpack.encode(PortedSession(copy, TranscriptDigest("text", value, b"d" * 32)))) == 200


@pytest.mark.parametrize("value", [-1, 1 << 53, (1 << 64) - 1])
@pytest.mark.parametrize("of", ["turns", "length"])
def test_counts_out_of_bounds_are_no_export(of: str, value: int) -> None:
    given = {"turns": 1, "length": 1, of: value}
    copy = {"identity": b"i", "name": "mine", "turns": given["turns"], "salt": b"", "tokens": b""}
    spoken = ["text", given["length"], b"d" * 32]
    assert taken(msgspec.msgpack.encode({"copy": copy, "spoken": spoken})) == 400


@pytest.mark.parametrize("depth", [1, 100, 5000, 100_000])
def test_an_export_with_lists_in_lists_is_none(depth: int) -> None:
    """However deep: what is not known is skipped by a parser that calls itself."""
    assert taken(b"\x81\xa4more" + b"\x91" * depth + b"\x01") == 400


def taken(packed: bytes) -> int:
    """The status of an import."""
    service = make_service()
    service.client.ready = msgspec.structs.replace(service.client.ready, max_model_len=1 << 20)
    body = {"session": base64.b64encode(packed).decode()}
    return ask("POST", "/v1/sessions/import", service, json=body).status_code
