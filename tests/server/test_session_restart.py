"""A server dies in the midst of a replay, and another one goes on with another number of memory workers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
from running import MODEL, Running

WAIT_S = 120.0
OPENINGS = {
    name: "".join(f"def {name}_{n}(value, other):\n    return value + {n} * other\n\n\n" for n in range(16))
    for name in ("first", "second")
}
MORE = "\n\nclass Parser:\n    def __init__(self"


def ask(server: Running, prompt: str, **more: Any) -> tuple[str, int]:
    """The text behind a prompt, and the tokens whose KV was there."""
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


def test_a_replay_goes_on_with_other_workers(tmp_path: Path) -> None:
    """Its turns are those that a computation without sessions gives, and the KV of both conversations is found."""
    flags, said = ("--dtype", "float32", "--kv-store-dir", str(tmp_path / "kv")), dict[str, str]()
    server = Running(tmp_path / "one.log", *flags, "--memory-workers", "2")
    try:
        for name, opening in OPENINGS.items():
            text, _ = ask(server, opening, session_id=name)
            said[name] = opening + text + MORE
            assert ask(server, said[name], session_id=name)[1] >= 128, "it wakes in the pool"
        begun = broken_off(server, said["first"], "first")
    finally:
        server.kill()
    server = Running(tmp_path / "two.log", *flags, "--memory-workers", "3", "--partition", "token")
    try:
        for name in OPENINGS:
            text, cached = ask(server, said[name], session_id=name)
            assert cached >= 128, "it wakes from the disk, though nobody knows its name"
            assert (text, 0) == ask(server, said[name], cache_salt="computed"), name
            assert name != "first" or text.startswith(begun), "what was told before goes on alike"
            more = said[name] + text + MORE
            assert ask(server, more, session_id=name)[0] == ask(server, more, cache_salt="again")[0]
    finally:
        server.kill()
