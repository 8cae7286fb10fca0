"""Tools by the real openai client: required and named calls, whole and streamed, and their results in the history.

Covers: lamina/server/response/message_reader.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from openai import OpenAI

pytestmark = pytest.mark.timeout(300)
TALK: Any = [{"role": "user", "content": "Write a class."}]
AREA: dict[str, Any] = {
    "type": "object",
    "properties": {"width": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["width", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["m", "km"]}},
}
FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "area", "description": "an area", "parameters": AREA, "strict": True}},
    {"type": "function", "function": {"name": "switch", "parameters": FLAG}},
]
NAMED: Any = {"type": "function", "function": {"name": "area"}}


def check_call(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "switch":
        assert set(given) == {"on"}
        assert type(given["on"]) is bool
    else:
        assert name == "area"
        assert given["width"] in range(100)
        assert given["unit"] in ("m", "km")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_has_arguments_of_the_schema(openai: OpenAI, choice: Any) -> None:
    chat = openai.chat.completions.create(
        model="tiny", messages=TALK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, n=2, max_tokens=400
    )
    assert len({call.id for one in chat.choices for call in one.message.tool_calls or ()}) == 2
    for one in chat.choices:
        assert one.finish_reason == "tool_calls"
        assert one.message.content is None
        (call,) = one.message.tool_calls or ()
        assert call.type == "function"
        assert choice == "required" or call.function.name == "area"
        check_call(call.function.name, call.function.arguments)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_stream_has_id_and_name_once_and_no_content(openai: OpenAI, choice: Any) -> None:
    same: Any = {"model": "tiny", "messages": TALK, "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    same |= {"parallel_tool_calls": False, "max_tokens": 400}
    pieces, reasons = [], []
    for chunk in openai.chat.completions.create(**same, stream=True):
        (one,) = chunk.choices
        assert not one.delta.content
        pieces += one.delta.tool_calls or []
        reasons.append(one.finish_reason)
    assert reasons[-1] == "tool_calls"
    assert not any(reasons[:-1])
    assert {piece.index for piece in pieces} == {0}
    assert [bool(piece.id) for piece in pieces] == [True, *[False] * (len(pieces) - 1)]
    assert [bool(piece.function.name) for piece in pieces] == [True, *[False] * (len(pieces) - 1)]
    assert len(pieces) > 4, "arguments come in pieces"
    whole = openai.chat.completions.create(**same).choices[0].message.tool_calls[0].function
    assert whole.name == pieces[0].function.name
    assert whole.arguments == "".join(piece.function.arguments for piece in pieces)


def test_a_call_that_is_cut_off_says_length(openai: OpenAI) -> None:
    chat = openai.chat.completions.create(model="tiny", messages=TALK, tools=TOOLS, tool_choice=NAMED, max_tokens=3)
    (one,) = chat.choices
    assert one.finish_reason == "length"
    with pytest.raises(ValueError):
        json.loads(one.message.tool_calls[0].function.arguments)


def test_a_call_and_its_result_are_history(openai: OpenAI) -> None:
    first = openai.chat.completions.create(
        model="tiny", messages=TALK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=400
    )
    message = first.choices[0].message
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5 m"}
    after = openai.chat.completions.create(
        model="tiny", messages=[*TALK, message, result], tools=TOOLS, tool_choice="none", max_tokens=4
    )
    assert after.choices[0].finish_reason == "length"
    assert after.choices[0].message.tool_calls is None
    assert after.choices[0].message.content


def test_a_schema_that_cannot_be_followed_is_refused_by_its_field(openai: OpenAI) -> None:
    from openai import BadRequestError

    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(BadRequestError) as error:
        openai.chat.completions.create(model="tiny", messages=TALK, tools=tools, tool_choice="required")
    assert error.value.param == "tools"
    assert "tools: uniqueItems is not supported" in error.value.message
