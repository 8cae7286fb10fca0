"""A server of a hybrid model loses its engine, workers of both kinds, and itself: streams have transformers' tokens."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import ROOT, Running, alive, eventually
from support.models.hybrids import HYBRIDS, build_hybrid, greedy, greedy_without_states, prompts

from lamina.cli.launch import main

pytestmark = [pytest.mark.timeout(400), pytest.mark.no_retry]
COUNT = 120  # so many that no stream ends before a reader that waits for a core has its first tokens
KEY = "the-operator"
TEXTS = prompts(5, 60, 33)
MODULES = {"engine": "server.engine_client.engine_process"}


def save(name: str, path: Path) -> Any:
    """Save a model, with a tokenizer that decodes its tokens to some text. Returns it."""
    model = build_hybrid(name)
    model.save_pretrained(path)
    for file in (ROOT / "examples" / "tiny_lm" / "model").glob("tokenizer*"):
        shutil.copy(file, path)
    return model


def victim(server: Running, role: str) -> int:
    wanted = f"lamina.{MODULES.get(role, f'workers.{role}.main')}:".encode()
    return next(p for p in server.descendants() if wanted in Path(f"/proc/{p}/cmdline").read_bytes())


def streams(server: Running, after: int, strike: Callable[[], object]) -> list[tuple[str, list[int]]]:
    """Stream all prompts together. Once each has ``after`` tokens, ``strike`` is called. Returns ids and tokens."""
    grown, struck, lock = [0] * len(TEXTS), list[bool](), threading.Lock()

    def read(index: int) -> tuple[str, list[int]]:
        body = {"prompt": TEXTS[index], "max_tokens": COUNT, "ignore_eos": True, "temperature": 0.0, "stream": True}
        answer, tokens = "", list[int]()
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=200
        ) as response:
            try:
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    answer = chunk["id"]
                    tokens += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
                    with lock:
                        grown[index] = len(tokens)
                        if min(grown) >= after and not struck:
                            struck.append(max(grown) < COUNT)
                            strike()
            except httpx.TransportError:  # the server itself is struck
                assert struck, "a stream ended by itself"
        return answer, tokens

    with ThreadPoolExecutor(len(TEXTS)) as threads:
        answers = list(threads.map(read, range(len(TEXTS))))
    assert struck == [True], "nothing was killed in the midst of all streams"
    return answers


def check_deaths(name: str, folder: Path, *flags: str) -> None:
    model = save(name, folder / "model")
    expected = [greedy(model, text, COUNT) for text in TEXTS]
    assert [greedy_without_states(model, text, COUNT) for text in TEXTS] != expected
    words = ["--dtype=float32", "--max-recoveries=20", "--max-model-len=256", "--journal", str(folder / "journal")]
    server = Running(folder / "log", *words, *flags, model=str(folder / "model"))
    try:
        for number, role in enumerate(("engine", "memory", "compute", "engine")):
            found = streams(server, 7 + 5 * number, lambda r=role: os.kill(victim(server, r), signal.SIGKILL))  # type: ignore[misc]
            assert [tokens for _, tokens in found] == expected, f"after the death of {role}"
        found = streams(server, 20, lambda: server.signal(signal.SIGKILL))
        left = server.descendants() if server.process.poll() is None else []
    finally:
        server.kill()
    assert all(tokens == whole[: len(tokens)] != whole for (_, tokens), whole in zip(found, expected, strict=True))
    server = Running(folder / "log2", *words, *flags, model=str(folder / "model"))
    try:

        def answers() -> list[dict[str, Any]]:
            got = [httpx.get(f"{server.url}/v1/completions/{key}", timeout=60) for key, _ in found]
            return [each.json() for each in got if each.status_code == 200]

        assert eventually(lambda: len(answers()) == len(found), 120), (folder / "log2").read_text()
        assert [answer["choices"][0]["token_ids"] for answer in answers()] == expected, "the journal's answers"
    finally:
        left += server.descendants()
        server.kill()
    assert eventually(lambda: not alive(left), 30), alive(left)


@pytest.mark.long
def test_streams_have_their_tokens_after_deaths_of_all_kinds(tmp_path: Path) -> None:
    check_deaths("bamba", tmp_path, "--memory-workers=2", "--partition=head", "--transport=shm")


def check_scaling(name: str, folder: Path, *flags: str) -> None:
    """Scale and drain while streams run. A cordoned and a terminated memory worker leave with their states, too."""
    model, pids = save(name, folder / "model"), list[int]()
    expected = [greedy(model, text, COUNT) for text in TEXTS]
    words = ["--dtype=float32", "--max-recoveries=0", "--max-model-len=256", "--memory-workers=1", *flags]
    server = Running(folder / "log", *words, model=str(folder / "model"), env={"LAMINA_ADMIN_KEY": KEY})
    try:
        for number, order in enumerate(
            (["scale", "--memory-workers", "3"], ["drain", "--memory-worker", "0"], ["scale", "--memory-workers", "1"])
        ):
            status = list[int]()

            def change(given: list[str] = order, told: list[int] = status) -> None:
                told.append(main([given[0], server.url, *given[1:], "--admin-key", KEY]))

            found = streams(server, 5 + 3 * number, change)
            assert [tokens for _, tokens in found] == expected, order
            assert status == [0], order
        found = streams(server, 9, lambda: os.kill(victim(server, "memory"), signal.SIGTERM))
        assert [tokens for _, tokens in found] == expected, "another one took the states of a terminated worker"

        def moved() -> dict[str, float]:
            text = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEY}"}, timeout=60).text
            found = re.findall(r'kv_migrated_bytes_total\{[^}]*reason="(\w+)"\} (\S+)', text)
            return {reason: float(nbytes) for reason, nbytes in found}

        assert eventually(lambda: moved().keys() == {"scale", "leave"}, 60), moved()
        assert moved()["scale"] > 0
    finally:
        pids += server.descendants()
        server.kill()
    assert eventually(lambda: not alive(pids), 30), alive(pids)


@pytest.mark.long(but=["request"])
@pytest.mark.parametrize("partition", ["head", "request"])
def test_streams_have_their_tokens_while_memory_workers_come_and_go(partition: str, tmp_path: Path) -> None:
    check_scaling("bamba", tmp_path, f"--partition={partition}", "--transport=shm")


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["head", "request"])
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_streams_have_their_tokens_after_deaths_in_all_families(name: str, partition: str, tmp_path: Path) -> None:
    check_deaths(
        name, tmp_path, "--memory-workers=2", f"--partition={partition}", "--transport=tcp", "--prefill-chunk=16"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_streams_have_their_tokens_while_memory_workers_of_all_families_come_and_go(name: str, tmp_path: Path) -> None:
    check_scaling(name, tmp_path, "--partition=head", "--transport=tcp", "--prefill-chunk=16")
