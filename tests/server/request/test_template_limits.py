"""A chat template that runs without end, or takes all memory, costs its request alone; and a server ends meanwhile."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from running import Running, alive, eventually

from lamina.models.chat_template import MAX_TEMPLATE, read_template

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
SOON_S = 60.0
TEMPLATE = (
    "{% set said = messages[-1].content %}"
    "{% if said == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif said == 'grow' %}{{ 'x' * 10**9 }}{% elif said == 'long' %}{{ 'x ' * 10**6 }}{% endif %}{{ said }}"
)


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Running]:
    (folder / "template").write_text(TEMPLATE)
    words = (f"--chat-template={folder / 'template'}", "--dtype=float32", *flags)
    running = Running(folder / "log", *words)
    try:
        yield running
    finally:
        running.kill()


def chat(running: Running, said: str, timeout_s: float = 120.0) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 1}
    return httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=timeout_s)


def template_processes(running: Running) -> list[int]:
    titles = dict.fromkeys(running.descendants(), b"")
    for pid in titles:
        with suppress(OSError):
            titles[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    return [pid for pid, title in titles.items() if b"template_process" in title]


def test_a_template_without_end_is_a_refusal_and_others_are_served(tmp_path: Path) -> None:
    with serving(tmp_path, "--timeouts=template=5", "--limits=template-memory=64MiB") as running:
        completion = {"prompt": "import os", "max_tokens": 1}
        assert httpx.post(f"{running.url}/v1/completions", json=completion, timeout=60).status_code == 200
        assert template_processes(running) == [], "no prompt needed it"
        for _ in range(2):
            for said, text in (
                ("loop", "the chat template has run for 5 s and was ended: simplify it, or raise --timeouts template="),
                ("grow", "the chat template takes more than 64MiB of memory: simplify it, or raise --limits"),
                ("long", "which cannot fit"),
            ):
                refusal = chat(running, said)
                assert refusal.status_code == 400, refusal.text
                assert text in refusal.json()["error"]["message"]
            assert chat(running, "hi").status_code == 200
        assert len(template_processes(running)) == 1
        tokens = httpx.post(
            f"{running.url}/tokenize", json={"messages": [{"role": "user", "content": "loop"}]}, timeout=60
        )
        assert tokens.status_code == 400
        pids = running.descendants()
        running.signal(signal.SIGTERM)
        assert running.wait(SOON_S) == 0
        assert eventually(lambda: not alive(pids), SOON_S)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_while_its_template_runs(end: signal.Signals, tmp_path: Path) -> None:
    with serving(tmp_path, "--timeouts=template=600", "--shutdown-timeout=1") as running:

        def ask() -> None:
            with suppress(httpx.HTTPError):
                chat(running, "loop", 300)

        thread = threading.Thread(target=ask)
        thread.start()
        assert eventually(lambda: template_processes(running), SOON_S)
        pids = running.descendants()
        running.signal(end)
        running.wait(SOON_S)
        thread.join(SOON_S)
        assert eventually(lambda: not alive(pids), SOON_S)


def test_an_operators_template_is_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "template"
    path.write_text("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}")
    with pytest.raises(ValueError, match=r"^--chat-template .*template: it is nested too deeply$"):
        read_template(str(path))
    path.write_text("x" * (MAX_TEMPLATE + 1))
    with pytest.raises(ValueError, match=f"^--chat-template .*template: it has {MAX_TEMPLATE + 1} characters"):
        read_template(str(path))
