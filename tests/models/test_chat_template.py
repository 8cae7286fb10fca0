"""A conversation reaches the model in whatever form its template reads, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import tokenizer_of

from lamina.models.chat_template import render_chat
from lamina.models.errors import ModelError
from lamina.models.tokenizer import load_tokenizer, token_ids

TEXT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
TYPED = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ p['text'] }}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
)
MIXED = "{{ messages[0].content }}[user]{{ messages[1].content[0].text }}"
STRICT = (
    "{% for m in messages %}{% if m.content is string %}{{ raise_exception('parts, please') }}{% endif %}"
    "{{ m.content[0].text }}{% endfor %}"
)
TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi there"}]


def rendered(template: str, messages: list[dict[str, Any]] = TALK, **options: Any) -> str:
    tokenizer = tokenizer_of("byte_level")
    tokenizer.chat_template = template
    return render_chat(tokenizer, messages, **options)


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


@pytest.mark.parametrize("template", [TEXT, PARTS, TYPED, EITHER])
@pytest.mark.parametrize("messages", [TALK, as_parts(TALK)])
def test_a_template_gets_the_form_that_it_shows(template: str, messages: list[dict[str, Any]]) -> None:
    assert rendered(template, messages) == "[system]be brief[user]hi there"


def test_each_role_has_its_own_form() -> None:
    assert rendered(MIXED) == "be brief[user]hi there"
    assert rendered(STRICT) == "be briefhi there"


@pytest.mark.parametrize("template", ["[user]", "{% for m in messages %}{{ m.text }}{% endfor %}", ""])
def test_a_template_that_shows_nothing_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="^the chat template leaves out what the (user|system) says, as text and as p"):
        rendered(template)


def test_a_message_that_a_template_changes_is_not_lost() -> None:
    thinks = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim | upper }}|{% endfor %}"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hm</think> so"}]
    assert rendered(thinks, talk) == "HI|SO|"


def test_the_form_can_be_said() -> None:
    assert rendered(EITHER, content_format="openai") == "[system]<be brief>[user]<hi there>"
    assert rendered(EITHER, as_parts(TALK), content_format="string") == "[system]be brief[user]hi there"
    assert rendered(PARTS, content_format="string") == "[system][user]"


def test_parts_are_lines_of_a_text_and_stay_parts_for_others() -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert rendered(TEXT, talk) == "[user]a\nb"
    assert rendered(PARTS, talk) == "[user]ab"


def test_the_assistant_speaks_next_and_a_template_is_needed() -> None:
    speaks = TEXT + "{% if add_generation_prompt %}[bot]{% endif %}"
    assert rendered(speaks, [{"role": "user", "content": "hi"}]) == "[user]hi[bot]"
    with pytest.raises(ModelError, match="no chat template"):
        render_chat(tokenizer_of("byte_level"), TALK)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1/0 }}", "division by zero"),
        ("{% macro rec(x) %}{{ rec(x) }}{% endmacro %}{{ rec(1) }}", "recursion"),
        ("{% for i in range(10000000000) %}a{% endfor %}", "[Rr]ange"),
        ("{{ 'a'.encode('ascii', 'nope') ~ 'a'.encode('none') }}", "none"),
        ("{{ 'a'.index('b') }}", "substring"),
        ("{{ [1, 'a'] | sort }}", "not supported between"),
        ("{{ raise_exception('no cats') }}", "no cats"),
    ],
)
def test_whatever_a_template_raises_is_the_messages_refusal(template: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^the chat template refuses these messages: .*{why}"):
        rendered(template)


def test_a_text_that_the_template_has_by_itself_is_not_lost() -> None:
    for word in ("user", "s", "["):
        assert rendered(PARTS, [{"role": "user", "content": word}]) == f"[user]{word}"


def test_a_template_runs_a_few_times_however_many_roles_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, runs = tokenizer_of("byte_level"), list[int]()
    tokenizer.chat_template = PARTS
    render = tokenizer.apply_chat_template

    def counted(messages: list[dict[str, Any]], **options: Any) -> Any:
        runs.append(len(messages))
        return render(messages, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    talk = [{"role": f"role {n}", "content": f"text {n}"} for n in range(40)]
    assert render_chat(tokenizer, talk) == "".join(f"[role {n}]text {n}" for n in range(40))
    assert len(runs) <= 4


IMAGES = (
    "{% for m in messages %}{{ m.role | upper }}:{% for p in m.content %}{% if p.type == 'image' %}<image>"
    "{% elif p.type == 'text' %} {{ p.text }}{% endif %}{% endfor %}|{% endfor %}"
)


@pytest.mark.parametrize("own", [None, TEXT])
def test_the_template_of_a_processor_is_read_where_the_tokenizer_has_none(own: str | None, tmp_path: Path) -> None:
    """Older multimodal models have it in a file of its own."""
    tokenizer = tokenizer_of("byte_level")
    tokenizer.chat_template = own
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": IMAGES}))
    expected = "[system]be brief[user]hi there" if own else "SYSTEM: be brief|USER: hi there|"
    assert render_chat(load_tokenizer(tmp_path), TALK) == expected


def test_half_a_character_is_refused() -> None:
    tokenizer = tokenizer_of("byte_level")
    tokenizer.chat_template = TEXT + "{{ '\\ud800' }}"
    with pytest.raises(ValueError, match="is not UTF-8 at character"):
        token_ids(tokenizer, render_chat(tokenizer, TALK))
