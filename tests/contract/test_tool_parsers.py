"""Every tool parser: the text that a model family writes comes back as the message, however it is divided.

The texts are written by hand as the families' chat templates render an assistant's calls.

Covers: lamina/server/tool_parsers/contract.py, lamina/server/tool_parsers/json_text.py,
lamina/server/tool_parsers/tagged.py, lamina/server/tool_parsers/tagged_formats.py,
lamina/server/tool_parsers/forced.py, lamina/server/tool_parsers/llama3_json.py,
lamina/server/tool_parsers/pythonic.py,
lamina/server/tool_parsers/tagged_parameters.py, lamina/server/tool_parsers/harmony.py,
lamina/server/tool_parsers/openai.py.
"""

# ruff: noqa: RUF001 - the model's marks have wide bars

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from lamina.server.tool_parsers import (
    FORCED,
    TOOL_PARSERS,
    format_of,
    parser_of_template,
)
from lamina.server.tool_parsers.contract import Arguments, CallBegin, Text

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "none": {"type": ["string", "null"]},
        },
    },
    "time.now": {"type": "object", "properties": {}},
}
Call = tuple[str, dict[str, Any]]
ONE: list[Call] = [("weather", {"city": "Zürich", "days": 3})]
HARD: list[Call] = [
    ("weather", {"city": 'a "b" \\ </tool_cal [x] {y} }]\nz 🙂', "where": {"a": [1, {"b": "}"}], "c": {}}}),
    ("time.now", {}),
    ("weather", {"city": "", "exact": True, "none": None}),
]
SENTENCE = "I look: a [list], a < b & {so} on."


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(content: str, calls: list[Call]) -> str:
    tags = [f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(given)}}}\n</tool_call>' for name, given in calls]
    return "\n".join([*[content] * bool(content), *tags])


def xml_value(value: Any) -> str:
    return dumps(value) if isinstance(value, dict | list) else str(value)


def qwen3_coder(content: str, calls: list[Call]) -> str:
    tags = [
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{xml_value(value)}\n</parameter>\n" for key, value in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    ]
    return "\n".join([*[f"{content}\n"] * bool(content), *tags])


def mistral(content: str, calls: list[Call]) -> str:
    return f"{content}[TOOL_CALLS]" + dumps([{"name": name, "arguments": given} for name, given in calls])


def mistral_v11(content: str, calls: list[Call]) -> str:
    return content + "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(given)}" for name, given in calls)


def mistral_v13(content: str, calls: list[Call]) -> str:
    return content + "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{dumps(given)}" for name, given in calls)


def llama3_json(content: str, calls: list[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {dumps(given)}}}' for name, given in calls)


def llama3_tag(content: str, calls: list[Call]) -> str:
    return "<|python_tag|>" + llama3_json(content, calls)


def pythonic(content: str, calls: list[Call]) -> str:
    each = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return f"[{', '.join(each)}]"


def deepseek_v3(content: str, calls: list[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    ]
    return f"{content}<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_v31(content: str, calls: list[Call]) -> str:
    each = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(given)}<｜tool▁call▁end｜>" for name, given in calls]
    return f"{content}<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def glm45(content: str, calls: list[Call]) -> str:
    tags = [
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{xml_value(value)}</arg_value>\n" for key, value in given.items()
        )
        + "</tool_call>"
        for name, given in calls
    ]
    return "\n".join([*[content] * bool(content), *tags])


def kimi_k2(content: str, calls: list[Call]) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumps(given)}<|tool_call_end|>"
        for i, (name, given) in enumerate(calls)
    ]
    return f"{content}<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def minimax_m2(content: str, calls: list[Call]) -> str:
    each = [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{xml_value(value)}</parameter>\n' for key, value in given.items())
        + "</invoke>\n"
        for name, given in calls
    ]
    return f"{content}\n<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>"


def phi4_mini_json(content: str, calls: list[Call]) -> str:
    return content + "functools" + dumps([{"name": name, "arguments": given} for name, given in calls])


def openai(content: str, calls: list[Call]) -> str:
    thought = "<|channel|>analysis<|message|>I call [them].<|end|>"
    said = [f"<|channel|>commentary<|message|>{content}<|end|>"] if content else []
    made = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(given)}<|call|>"
        for name, given in calls
    ]
    return "<|start|>assistant".join([thought, *said, *made])


def openai_by_role(content: str, calls: list[Call]) -> str:
    made = [
        f" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>{dumps(given)}<|call|>"
        for name, given in calls
    ]
    first = f"{content}<|end|><|start|>assistant" if content else ""
    return first + "<|start|>assistant".join(made)


def required(content: str, calls: list[Call]) -> str:
    return json.dumps([{"name": name, "parameters": given} for name, given in calls], ensure_ascii=False, indent=1)


Render = Callable[[str, list[Call]], str]
FORMS: list[tuple[str, Render]] = [
    ("hermes", hermes),
    ("granite4", hermes),
    ("qwen3_coder", qwen3_coder),
    ("mistral", mistral),
    ("mistral", mistral_v11),
    ("mistral", mistral_v13),
    ("llama3_json", llama3_json),
    ("llama3_json", llama3_tag),
    ("pythonic", pythonic),
    ("deepseek_v3", deepseek_v3),
    ("deepseek_v31", deepseek_v31),
    ("glm45", glm45),
    ("kimi_k2", kimi_k2),
    ("minimax_m2", minimax_m2),
    ("phi4_mini_json", phi4_mini_json),
    ("openai", openai),
    ("openai", openai_by_role),
    ("required", required),
]
NO_CONTENT = ("llama3_json", "pythonic", "required", "named")  # calls are the whole text


def parsed(name: str, pieces: Iterable[str], *, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Returns the content, and the calls with their arguments as text."""
    parser = format_of(name).open(TOOLS)
    content, calls = "", list[tuple[str, str]]()
    for event in [*(e for piece in pieces for e in parser.push(piece)), *parser.finish(cut=cut)]:
        if isinstance(event, Text):
            content += event.text
        elif isinstance(event, CallBegin):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return content, calls


def divided(text: str, seed: int) -> list[str]:
    """Returns the text whole, in single characters, or in random pieces."""
    if seed < 2:
        return list(text) if seed else [text]
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 30)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_every_parser_has_a_text() -> None:
    assert {name for name, _ in FORMS} | {"named"} == {*TOOL_PARSERS, *FORCED}


@pytest.mark.parametrize(("name", "render"), FORMS)
@pytest.mark.parametrize("calls", [ONE, HARD], ids=["one", "hard"])
@pytest.mark.parametrize("content", ["", SENTENCE])
def test_what_a_model_writes_comes_back(name: str, render: Render, calls: list[Call], content: str) -> None:
    content = "" if name in NO_CONTENT else content
    text = render(content, calls)
    for seed in range(40):
        said, made = parsed(name, divided(text, seed))
        assert said == content, (seed, text)
        assert [(called, json.loads(given)) for called, given in made] == calls, (seed, text)


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize(
    "text", [SENTENCE, "  two\n\nlines \n", "<tool_cat> <| [TOOL", '{"a": 1}', "[1, 2]", '["weather(x=1)"]', "[f(x=1)]"]
)
def test_text_without_calls_is_content(name: str, text: str) -> None:
    for seed in range(20):
        assert parsed(name, divided(text, seed)) == (text, []), seed


@pytest.mark.parametrize(("name", "render"), FORMS)
def test_a_text_that_is_cut_off_anywhere_shows_no_part_of_a_call(name: str, render: Render) -> None:
    content = "" if name in NO_CONTENT else "Well."
    text = render(content, ONE)
    whole = parsed(name, [text])[1][0][1]
    for end in range(text.index(content) + len(content) + 5, len(text)):
        said, made = parsed(name, list(text[:end]), cut=True)
        assert said.strip() == content, text[:end]
        assert all(called == "weather" and whole.startswith(given) for called, given in made), text[:end]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n["weather"]\n</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", "Well, a \n<tool_call>\n[5]"),
        ("mistral", "[TOOL_CALLS][5]"),
        ("glm45", 'I know <tool_call>{"name": "weather"}</tool_call>'),
        ("minimax_m2", "<invoke name=>"),
        ("phi4_mini_json", "from functools[cache] import"),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("pythonic", "[weather(city=open('x'))]"),
    ],
)
def test_a_call_without_a_name_is_content(name: str, text: str) -> None:
    for seed in range(20):
        assert parsed(name, divided(text, seed)) == (text, []), seed


TIME = "<|tool_call_begin|>functions.time.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
OPEN = '{"city": "a <b", "where": {"a": 1'


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", f'<tool_call>{{"name": "weather", "arguments": {OPEN}</tool_call>', OPEN),
        ("kimi_k2", f"<|tool_call_begin|>weather:0<|tool_call_argument_begin|>{OPEN}<|tool_call_end|>", OPEN),
        ("kimi_k2", "<|tool_call_begin|>weather.0<|tool_call_argument_begin|>{}<|tool_call_end|>", None),
        ("qwen3_coder", "<tool_call>\n<function=weather\n</function>\n</tool_call>\n", None),
        (
            "qwen3_coder",
            "<function=weather>\n<parameter=city>\na\n<parameter=days>\n3\n</parameter>\n</function>",
            '{"city": "a", "days": 3}',
        ),
        (
            "qwen3_coder",
            "<function=weather>\n<parameter=city>\n</function> b\n</function>\n</tool_call>",
            '{"city": "</function> b"}',
        ),
        (
            "qwen3_coder",
            "<function=weather>\n<parameter=city>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            '{"city": "", "days": 3}',
        ),
        ("hermes", f'<tool_call>{{"name": "weather", "arguments": {OPEN}\n', OPEN + "\n"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {}}\n', "{}"),
        ("kimi_k2", "<|tool_call_begin|>weather:0<|tool_call_argument_begin|>{}", "{}"),
        ("qwen3_coder", "<function=weather>\n<parameter=</function>", "{}"),
    ],
)
def test_a_call_that_a_model_writes_wrong_takes_none_of_the_next_one(
    name: str, text: str, arguments: str | None
) -> None:
    next_one = {"hermes": '<tool_call>{"name": "time.now"}</tool_call>', "kimi_k2": TIME}
    for seed in range(20):
        _, made = parsed(name, divided(text + next_one.get(name, "<function=time.now>\n</function>"), seed))
        wrong = [] if arguments is None else [("weather", arguments)]
        assert made == [*wrong, ("time.now", "{}")], seed


def test_a_value_may_have_lines_like_tags() -> None:
    city = "write:\n<parameter=q>\n<parameter=z> in xml\n</function>\nend"
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
    for seed in range(40):
        _, ((name, given),) = parsed("qwen3_coder", divided(text, seed))
        assert (name, json.loads(given)) == ("weather", {"city": city}), seed


def test_arguments_stream_before_they_end() -> None:
    for name, render in FORMS:
        parser, text = format_of(name).open(TOOLS), render("", ONE)
        early = [event for char in text[:-20] for event in parser.push(char)]
        expected = 0 if name == "pythonic" else 3
        assert len([e for e in early if isinstance(e, Arguments)]) >= expected, name


def test_arguments_may_come_first_or_as_text() -> None:
    for given in (
        '{"arguments": {"days": 1}, "name": "weather"}',
        '{"name": "weather", "arguments": "{\\"days\\": 1}"}',
    ):
        assert parsed("hermes", list(f"<tool_call>{given}</tool_call>")) == ("", [("weather", '{"days": 1}')])


def test_a_model_that_numbers_its_calls_gives_their_ids() -> None:
    parser = format_of("kimi_k2").open(TOOLS)
    events = [event for char in kimi_k2("", HARD) for event in parser.push(char)]
    ids = [event.id for event in events if isinstance(event, CallBegin)]
    assert ids == ["functions.weather:0", "functions.time.now:1", "functions.weather:2"]


def test_named_is_all_arguments() -> None:
    assert parsed("named", list('{"city": "x"}')) == ("", [("weather", '{"city": "x"}')])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "qwen3_coder"),
        ("{%- if m.tool_calls %}{{ '[TOOL_CALLS][' }}", "mistral"),
        ("{{'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json'}}", "deepseek_v3"),
        ("{{'<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + arguments}}", "deepseek_v31"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>", "glm45"),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2"),
        (
            '<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="a">1</parameter>\n</invoke>',
            "minimax_m2",
        ),
        ("prefix calls with functools: functools[...]", "phi4_mini_json"),
        ('"<|start|>assistant to=functions." ~ name ~ "<|channel|>commentary <|constrain|>json<|message|>"', "openai"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
    ],
)
def test_a_template_shows_its_parser(template: str, name: str | None) -> None:
    assert parser_of_template(template) == name


def test_special_tokens_are_asked_for_where_marks_are_such_tokens() -> None:
    assert [format_of(name).needs_special for name in ("hermes", "mistral", "named")] == [False, True, False]
