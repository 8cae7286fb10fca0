"""A server dies in the midst of a replay, and another one goes on with another number of memory workers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import MODEL, START_S, Running

from lamina.cli.launch import main

pytestmark = pytest.mark.timeout(3 * START_S)  # two servers start, on a busy machine
WAIT_S = 120.0
OPENINGS = {
    name: "".join(f"def {name}_{n}(value, other):\n    return value + {n} * other\n\n\n" for n in range(16))
    for name in ("first", "second")
}
MORE = "\n\nclass Parser:\n    def __init__(self"


def ask(server: Running, prompt: str, **more: Any) -> tuple[str, int]:
    """Returns the text after a prompt, and the tokens whose KV was there."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S).raise_for_status().json()
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


def broken_off(server: Running, prompt: str, name: str) -> str:
    """The text of a turn up to its first tokens, in which the server is killed."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "session_id": name}, timeout=WAIT_S) as got:
        first = next(line for line in got.iter_lines() if line.startswith("data: "))
        server.signal(signal.SIGKILL)
        server.wait(WAIT_S)
    text: str = json.loads(first.removeprefix("data: "))["choices"][0]["text"]
    return text


@pytest.mark.long
def test_a_replay_goes_on_with_other_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its turns are those that a computation without sessions gives, and the KV of both conversations is found. The
    name of one has been carried over.
    """
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    ported = ["--file", str(tmp_path / "second.session"), "--key-file", str(key)]
    flags, said = ("--dtype", "float32", "--kv-offload", f"dir={tmp_path / 'kv'}"), dict[str, str]()
    server = Running(tmp_path / "one.log", *flags, "--memory-workers", "2")
    try:
        for name, opening in OPENINGS.items():
            text, _ = ask(server, opening, session_id=name)
            said[name] = opening + text + MORE
            assert ask(server, said[name], session_id=name)[1] >= 128, "it wakes in the pool"
        assert main(["sessions", "export", server.url, "second", *ported]) == 0
        begun = broken_off(server, said["first"], "first")
    finally:
        server.kill()
    server = Running(tmp_path / "two.log", *flags, "--memory-workers", "3", "--partition", "token")
    try:
        assert main(["sessions", "import", server.url, *ported]) == 0
        assert main(["sessions", "import", server.url, *ported]) == 2
        assert "there is a session 'second': drop that first" in capsys.readouterr().err
        assert main(["sessions", "list", server.url]) == 0
        name, turns, tokens, tier = capsys.readouterr().out.splitlines()[1].split()
        assert (name, turns, tier) == ("second", "2", "file")
        assert int(tokens) >= 384, "two turns of three pages"
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            ask(server, "something else", session_id="second")
        for name in OPENINGS:
            text, cached = ask(server, said[name], session_id=name)
            assert cached >= 128, "it wakes from the disk, also where nobody knows its name"
            assert (text, 0) == ask(server, said[name], cache_salt="computed"), name
            assert name != "first" or text.startswith(begun), "what was told before goes on alike"
            more = said[name] + text + MORE
            assert ask(server, more, session_id=name)[0] == ask(server, more, cache_salt="again")[0]
    finally:
        server.kill()
