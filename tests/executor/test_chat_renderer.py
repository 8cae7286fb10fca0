"""Chat templates run within bounds of time and memory, and render what transformers renders.

Covers: lamina/models/template_process.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_executor import FakeWire
from forked import launch
from running import alive, eventually
from test_streams import FakeFront
from tokenizer_kinds import tokenizer_of

from lamina import LLM
from lamina.executor.chat_renderer import ChatRenderer, TemplateLimits
from lamina.models.chat_template import MAX_TEMPLATE
from lamina.models.template_process import bounded

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 60.0  # imports on a busy machine
LIMITS = TemplateLimits(timeout_s=8.0, memory=96 << 20)
TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi there"}]
TEXT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"
HELD = "{{ 3 ** 999999999 }}"  # one operation of Python's, which no other thread of the process interrupts
TOO_LONG = r"^the chat template has run for 8 s and was ended: simplify it, or raise template_timeout_s=$"
TOO_LARGE = r"^the chat template takes more than .* of memory: simplify it, or raise template_memory=$"
REFUSES = "^the chat template refuses these messages: "


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    """Template processes are forked, as those of a server are: they start at once."""
    launch("--version")


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatRenderer]:
    made = ChatRenderer(LIMITS)
    yield made
    made.close()


def with_template(template: Any) -> Any:
    tokenizer = tokenizer_of("byte_level")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("template", "why"),
    [
        (NESTED, TOO_LONG),
        (HELD, TOO_LONG),
        ("{% for i in range(10**9) %}{% endfor %}", REFUSES + ".*[Rr]ange"),
        ("{{ 'x' * 10**9 }}", TOO_LARGE),
        ("{{ ['x'] * 10**9 }}", TOO_LARGE),
        (DOUBLED, TOO_LARGE),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", TOO_LARGE),
        ("{{ '%999999999d' % 1 }}", TOO_LARGE),
        ("{% macro r(x) %}{{ r(x) ~ r(x) }}{% endmacro %}{{ r(1) }}", REFUSES + ".*recursion"),
        ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", REFUSES + ".*recursion"),
        ("x" * (MAX_TEMPLATE + 1), f"^the chat template has {MAX_TEMPLATE + 1} characters: at most {MAX_TEMPLATE} are"),
    ],
)
def test_a_template_without_end_is_ended_and_the_next_conversation_is_rendered(
    renderer: ChatRenderer, template: str, why: str
) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=why):
        renderer.render(with_template(template), TALK)
    assert time.monotonic() - began < LIMITS.timeout_s + SOON_S
    assert renderer.render(with_template(TEXT), TALK) == "[system]be brief[user]hi there"


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (TEXT, {}),
        (TEXT + "{{ bos_token }}{% if add_generation_prompt %}[bot]{% endif %}", {"add_generation_prompt": False}),
        (TEXT + "{{ tools | tojson }}{{ n }}", {"tools": [{"type": "function", "function": {"name": "f"}}], "n": 1.5}),
        ({"default": TEXT, "tool_use": TEXT + "T"}, {"tools": [{"a": 1}]}),
        ({"default": TEXT, "other": "O" + TEXT}, {"chat_template": "other"}),
        (None, {"chat_template": "{% for m in messages %}{{ m | length }}{{ m.content }}{% endfor %}"}),
        (TEXT + "\U0001f600{{ '\\ud800' }}", {}),
        (TEXT, {"continue_final_message": True, "add_generation_prompt": False}),
        ("{% for m in messages %}{{ m.reasoning_content }}{{ m.keys() | list }}{{ m.content }}{% endfor %}", {}),
    ],
)
def test_it_renders_what_transformers_renders(renderer: ChatRenderer, template: Any, options: dict[str, Any]) -> None:
    tokenizer = with_template(template)
    talk = [*TALK, {"role": "assistant", "content": "caf\u00e9 \U0001f600", "name": None, "thinking": "hm"}]
    own = {"add_generation_prompt": True, **options}
    assert renderer.render(tokenizer, talk, **options) == tokenizer.apply_chat_template(talk, tokenize=False, **own)


@pytest.mark.parametrize("value", ["\ud800", 1 << 80])
def test_what_has_no_form_of_its_own_is_refused(renderer: ChatRenderer, value: Any) -> None:
    with pytest.raises(ValueError, match="^a conversation must be UTF-8, and its numbers 64 bits: "):
        renderer.render(with_template(TEXT), [{"role": "user", "content": value}])
    assert renderer.render(with_template(TEXT), TALK) == "[system]be brief[user]hi there"


def test_objects_are_to_a_template_what_they_are_in_transformers(renderer: ChatRenderer) -> None:
    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "user", "content": "hi"}

    image = [{"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "hi"}]}]
    tokenizer = with_template("{{ messages | tojson }}{{ more | tojson }}")
    for talk, more, form in ((image, (1, object()), "openai"), (TALK, Model(), "string")):
        wanted = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, more=more)
        assert renderer.render(tokenizer, talk, more=more, content_format=form) == wanted


def test_a_tokenizer_with_a_method_of_its_own_is_asked_itself(renderer: ChatRenderer) -> None:
    class Own:
        chat_template = "none of Jinja"

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return "".join(m["content"] for m in messages) + f" {os.getpid()}"

    assert renderer.render(Own(), TALK) == f"be briefhi there {os.getpid()}"


def test_variables_are_those_that_only_a_request_can_fill(renderer: ChatRenderer) -> None:
    assert renderer.variables("{{ messages }}{{ a }}{% if b %}{{ c.d }}{% endif %}{% set e = 1 %}{{ e }}") == {*"abc"}
    with pytest.raises(ValueError, match="line 1: "):
        renderer.variables("{% if")
    with pytest.raises(ValueError, match="nested too deeply"):
        renderer.variables("{{ " + "(" * 9000)


def test_it_starts_with_the_first_conversation_and_is_replaced_if_somebody_ends_it() -> None:
    renderer, tokenizer = ChatRenderer(LIMITS), with_template(TEXT)
    assert renderer.pid is None
    renderer.render(tokenizer, TALK)
    (first,) = {renderer.pid}
    renderer.render(tokenizer, TALK)
    assert first == renderer.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: not Path(f"/proc/{first}").exists(), SOON_S)
    assert renderer.render(tokenizer, TALK) == "[system]be brief[user]hi there"
    assert renderer.pid not in (None, first)
    second = renderer.pid
    for _ in range(2):
        renderer.close()
    assert second is not None
    assert not alive([second])
    with pytest.raises(ValueError, match="is closed"):
        renderer.render(tokenizer, TALK)


@pytest.mark.parametrize("template", [NESTED, HELD], ids=["nested", "held"])
def test_its_owner_may_end_it_while_a_template_runs(template: str) -> None:
    renderer = ChatRenderer(TemplateLimits(timeout_s=600))
    renderer.render(with_template(TEXT), TALK)
    pid, errors = renderer.pid, list[str]()
    assert pid is not None

    def work() -> None:
        try:
            renderer.render(with_template(template), TALK)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert eventually(lambda: ticks(pid) > 20, SOON_S)
    renderer.close()
    thread.join(SOON_S)
    assert len(errors) == 1
    assert not alive([pid])


def ticks(pid: int) -> int:
    """Hundredths of a second that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


OWNER = """
import sys, threading
sys.path[:0] = [{support!r}]
from tokenizer_kinds import tokenizer_of
from lamina.executor.chat_renderer import ChatRenderer, TemplateLimits
renderer, tokenizer = ChatRenderer(TemplateLimits(timeout_s={limit})), tokenizer_of("byte_level")
tokenizer.chat_template = "{{{{ messages[0].content }}}}"
renderer.render(tokenizer, [dict(role="user", content="hi")])
print(renderer.pid, flush=True)
tokenizer.chat_template = {template!r}
renderer.render(tokenizer, [dict(role="user", content="hi")])
"""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("template", "limit"), [(NESTED, 600), (HELD, 8)], ids=["nested", "held"])
def test_no_template_outlives_its_owner(template: str, limit: int) -> None:
    code = OWNER.format(support=str(ROOT / "tests" / "support" / "models"), template=template, limit=limit)
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert eventually(lambda: ticks(pid) > 150, SOON_S), "its imports take as much"
        owner.kill()
        owner.wait(SOON_S)
        assert eventually(lambda: not alive([pid]), SOON_S)


BOUNDED = """
from lamina.models.template_process import bounded
def fits(n):
    try:
        return bool(bytearray(n))
    except MemoryError:
        return False
with bounded(1.0, 64 << 20):
    print(fits(32 << 20), fits(128 << 20), flush=True)
print(fits(128 << 20), flush=True)
with bounded(1.0, 64 << 20):
    while True:
        pass
"""


@pytest.mark.long
def test_the_kernel_keeps_the_bounds() -> None:
    assert bounded is not None
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["True", "False", "True"]
    assert done.returncode == -signal.SIGXCPU


def test_an_llm_has_the_limits_that_its_user_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.api.llm.Frontend", FakeFront)
    llm = LLM(FakeWire(), template_timeout_s=0.5, template_memory="32MiB")
    for template, why in ((NESTED, "for 0.5 s"), ("{{ 'x' * 10**8 }}", "more than 32MiB")):
        llm.front.tokenizer = with_template(template)
        with pytest.raises(ValueError, match=f"^the chat template .*{why}"):
            llm.chat(TALK)
    pid = llm.renderer.pid or 0
    llm.close()
    assert not alive([pid])
    with pytest.raises(ValueError, match="^template_memory must be a size"):
        LLM(FakeWire(), template_memory="much")


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_is_a_positive_time(limit: float) -> None:
    with pytest.raises(ValueError, match="^template_timeout_s= must be a positive number of seconds, not "):
        TemplateLimits(timeout_s=limit)
