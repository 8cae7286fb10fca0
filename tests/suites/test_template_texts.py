"""Tool parsers against what chat templates render for an assistant's calls: templates of vLLM's source package.

They are downloaded (``sources.py``), not committed; without a way to get them all is skipped by name.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import sources
from shipped import MODEL
from test_tool_parsers import TOOLS, divided, parsed
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from lamina.server.tool_parsers import parser_of_template

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Call = tuple[str, dict[str, Any]]
ONE: list[Call] = [("weather", {"city": "Zürich", "days": 3})]
TWO: list[Call] = [
    ("weather", {"city": 'a "b" \\ [x] {y} }]\nz 🙂', "where": {"a": [1, {"b": "}"}]}}),
    ("weather", {"city": "Oslo", "exact": True}),
]
ASKED = {"role": "user", "content": "The weather?"}
FIRST = (  # of the assistant's turn
    r"^(\[/INST\]|<\|im_end\|>|<\|im_start\|>assistant|<\|eot_id\|>|<\|eot\|>|<\|(start_header_id|header_start)\|>assistant"
    r"<\|(end_header_id|header_end)\|>|<｜Assistant｜>|</think>|\s)*"  # noqa: RUF001
)
LAST = (
    r"(<\|start_header_id\|>assistant<\|end_header_id\|>|<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<\|eot\|>"
    r"|<\|python_end\|>|</s>|<｜end▁of▁sentence｜>|\s)*$"  # noqa: RUF001
)
PLAIN: list[Call] = [("weather", {"days": 3, "exact": True})]  # two pythonic templates leave out the quotes of texts
QUOTED: list[Call] = [("weather", {"city": "Oslo"})]  # and one quotes every value
# template -> its parser, and the most calls of a message.
TEMPLATES: dict[str, tuple[str, int]] = {
    "hermes": ("hermes", 2),
    "llama3.1_json": ("llama3_json", 1),
    "llama3.2_json": ("llama3_json", 1),
    "llama3.2_pythonic": ("pythonic", 2),
    "llama4_pythonic": ("pythonic", 2),
    "toolace": ("pythonic", 2),
    "mistral": ("mistral", 2),
    "mistral3": ("mistral", 2),
    "mistral_parallel": ("mistral", 2),
    "qwen3coder": ("qwen3_coder", 2),
    "deepseekv3": ("deepseek_v3", 2),
    "deepseekr1": ("deepseek_v3", 2),
    "deepseekv31": ("deepseek_v31", 2),
}


@functools.cache
def folder() -> Path | str:
    """Returns the templates' folder, or why there is none."""
    try:
        return sources.vllm() / "examples"
    except (ValueError, OSError, subprocess.SubprocessError) as e:
        return f"vLLM's source package cannot be had: {e}"


def template_of(name: str) -> str:
    """Returns a template; skips without it."""
    at = folder()
    if isinstance(at, str):
        pytest.skip(at)
    return (at / f"tool_chat_template_{name}.jinja").read_text()


def rendered(template: str, calls: list[Call]) -> str:
    """Returns what the template writes for the assistant's message, without the marks of its end."""
    made = [
        {"id": f"call{i:05}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(calls)
    ]
    properties = {key: TOOLS["weather"]["properties"][key] for key in ("city", "days", "exact")}
    function = {"name": "weather", "description": "", "parameters": {"type": "object", "properties": properties}}
    known = {"bos_token": "<s>", "eos_token": "</s>", "tools": [{"type": "function", "function": function}]}
    answer = {"role": "assistant", "content": "", "tool_calls": made}
    (texts, _) = render_jinja_template([[ASKED, answer]], chat_template=template, add_generation_prompt=False, **known)
    return re.sub(LAST, "", re.sub(FIRST, "", texts[0].rpartition(ASKED["content"])[2]))


def calls_of(name: str, calls: list[Call]) -> tuple[str, list[Call]]:
    """Returns the text of a template for calls, and these calls."""
    parser, most = TEMPLATES[name]
    simple = QUOTED if name == "llama4_pythonic" else PLAIN
    calls = (simple * len(calls) if parser == "pythonic" else calls)[:most]
    return rendered(template_of(name), calls), calls


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("calls", [ONE, TWO], ids=["one", "two"])
def test_what_a_template_renders_comes_back(name: str, calls: list[Call]) -> None:
    parser, _ = TEMPLATES[name]
    text, calls = calls_of(name, calls)
    tokenizer = Tokenizer.from_file(f"{MODEL}/tokenizer.json")
    ends = [end for _, end in tokenizer.encode(text).offsets]
    tokens = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    for pieces in (tokens, *(divided(text, seed) for seed in range(20))):
        said, made = parsed(parser, pieces)
        assert said.strip() == "", text
        assert [(called, json.loads(given)) for called, given in made] == calls, text


@pytest.mark.parametrize("name", TEMPLATES)
def test_broken_anywhere_nothing_is_raised_and_no_name_is_invented(name: str) -> None:
    parser, _ = TEMPLATES[name]
    text, _ = calls_of(name, ONE)
    whole = parsed(parser, [text])[1][0][1]
    for at in range(1, len(text)):
        _, made = parsed(parser, list(text[:at]), cut=True)
        assert all(called == "weather" and whole.startswith(given) for called, given in made), text[:at]
        _, made = parsed(parser, list(text[:at] + text[at + 1 :]))
        assert len(made) <= 1, "a character is missing"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_shows_its_parser(name: str) -> None:
    found = parser_of_template(template_of(name))
    assert found in (TEMPLATES[name][0], None)
