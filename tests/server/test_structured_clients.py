"""Structured output by the real openai client: whole, streamed, by a pydantic model, and refused by name."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

if TYPE_CHECKING:
    from openai import OpenAI

pytestmark = pytest.mark.timeout(300)
TALK: Any = [{"role": "user", "content": "Write a class."}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["age", "on"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


class Person(BaseModel):
    age: int
    on: bool


def is_right(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"age", "on"} and type(value["on"]) is bool and type(value["age"]) is int


def test_a_chat_and_a_completion_follow_the_schema(openai: OpenAI) -> None:
    chat = openai.chat.completions.create(model="tiny", messages=TALK, response_format=FORMAT, n=2, max_tokens=300)
    for choice in chat.choices:
        assert choice.finish_reason == "stop"
        assert is_right(choice.message.content or "")
    own = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    done = openai.completions.create(model="tiny", prompt="x", max_tokens=60, extra_body=own)
    assert is_right(done.choices[0].text)
    stream = openai.chat.completions.create(
        model="tiny", messages=TALK, response_format=FORMAT, max_tokens=300, stream=True
    )
    assert is_right("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    plain = openai.chat.completions.create(model="tiny", messages=TALK, max_tokens=60)
    with pytest.raises(ValueError):
        json.loads(plain.choices[0].message.content or "")


def test_the_client_parses_a_model_of_pydantic(openai: OpenAI) -> None:
    found = openai.chat.completions.parse(model="tiny", messages=TALK, response_format=Person, max_tokens=300)
    assert isinstance(found.choices[0].message.parsed, Person)


def test_an_expression_and_a_choice(openai: OpenAI) -> None:
    for own, pattern in (({"regex": r"\d{3}-[a-c]"}, r"\d{3}-[a-c]"), ({"choice": ["ja", "nein"]}, "ja|nein")):
        done = openai.completions.create(
            model="tiny", prompt="x", max_tokens=20, extra_body={"structured_outputs": own}
        )
        assert re.fullmatch(pattern, done.choices[0].text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "uniqueItems": True}, "response_format: uniqueItems is not supported"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "response_format: Unsatisfiable schema"),
    ],
)
def test_refused_by_the_name_of_the_keyword(openai: OpenAI, schema: dict[str, Any], text: str) -> None:
    from openai import BadRequestError

    asked: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(BadRequestError) as error:
        openai.chat.completions.create(model="tiny", messages=TALK, response_format=asked)
    assert text in error.value.message
    assert error.value.param == "response_format"
