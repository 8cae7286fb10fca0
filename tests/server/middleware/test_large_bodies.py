"""Bodies that cost more than they look: refused, or read in a thread next to the event loop, and never at length in one
go.

Covers: lamina/server/request/json_decoding.py.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake import FakeClient, http_of, make_service
from test_flow import until
from test_layers import JSON, ask, error_of, run

from lamina.models.tokenizer import token_ids
from lamina.server.request import json_decoding, prompt_processing
from lamina.server.request.request_bodies import INLINE_BYTES

SIZE = 8 << 20
STRETCH_S = 0.1  # for which all others may be kept waiting, of a slow processor's time; a fast one needs 0.02 at most
HEAD = b'{"prompt":"x","max_tokens":2,'
USER = b'{"role":"user","content":""}'


def filled(before: bytes, part: bytes, after: bytes) -> bytes:
    return before + part * ((SIZE - len(before) - len(after)) // len(part)) + after


def just(count: int, before: bytes, part: bytes, after: bytes) -> bytes:
    """``count`` parts: as many as are not refused by their number."""
    return before + part * (count - 3) + after


@contextmanager
def calls_timed() -> Iterator[list[float]]:
    """Seconds of the processor's time that each native call takes on the thread for bodies, which begins meanwhile: for
    so long, no other thread has its turn. A call that comes back to Python lets others have theirs.
    """
    took, own = list[float](), threading.local()

    def seen(frame: object, event: str, arg: object) -> None:
        begun: list[float | None] = own.__dict__.setdefault("begun", [])
        if event == "c_call":
            begun.append(time.thread_time())
        elif event.startswith("c_") and begun:
            if (began := begun.pop()) is not None and threading.current_thread().name.startswith("lamina-bodies"):
                took.append(time.thread_time() - began)
        else:
            begun[:] = [None] * len(begun)

    threading.setprofile(seen)
    try:
        yield took
    finally:
        threading.setprofile(None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", filled(HEAD + b'"x":[', b"[],", b"1]}")),
        ("/v1/completions", filled(HEAD + b'"stop":[', b"[],", b"1]}")),
        ("/v1/completions", filled(b"{", b'"":1,', b'"prompt":"x"}')),
        ("/v1/completions", filled(b'{"prompt":[', b"1,", b"1]}")),
        ("/v1/completions", filled(b'{"prompt":[[', b"1,", b"1]]}")),
        ("/v1/completions", filled(b'{"prompt":[', b"[1],", b"[1]]}")),
        ("/v1/completions", filled(b'{"prompt":[', b'"",', b'""]}')),
        ("/v1/completions", filled(b'{"prompt":["a",', b"1,", b"1]}")),
        ("/v1/completions", filled(b'{"prompt":[[1],', b"1,", b"1]}")),
        ("/v1/chat/completions", filled(b'{"messages":[', b"{},", b"{}]}")),
        ("/v1/chat/completions", filled(b'{"messages":[{"role":"user","content":[', b"[],", b"1]}]}")),
        ("/v1/chat/completions", filled(b'{"messages":[{"role":"user","content":"","x":[', b"[],", b"1]}]}")),
        ("/v1/chat/completions", filled(b'{"messages":[', b'{"role":"user","content":""},', b"1]}")),
        ("/detokenize", filled(b'{"tokens":[', b"1,", b"1]}")),
        ("/tokenize", filled(b'{"prompt":"', b"a ", b'"}')),
        ("/tokenize", filled(b'{"prompt":"', rb"\u00e9", b'"}')),
        ("/v1/completions", filled(HEAD + b'"x":"', rb"\n", b'"}')),
        ("/v1/completions", just(json_decoding.MAX_COMMAS, HEAD + b'"x":[', b"{},", b"1]}")),
        ("/v1/completions", just(json_decoding.MAX_COMMAS, b'{"prompt":[', b"[1],", b"[1]]}")),
        ("/v1/completions", just(json_decoding.MAX_TEXTS, b'{"prompt":[', b'"",', b'""]}')),
        ("/v1/chat/completions", just(json_decoding.MAX_TEXTS // 4, b'{"messages":[', USER + b",", USER + b"]}")),
    ],
    ids=lambda x: x[:40].decode() if isinstance(x, bytes) else "",
)
def test_what_costs_more_than_it_is_worth_is_refused_cheaply(path: str, body: bytes) -> None:
    """All of it on the event loop, and each stretch in a thread, takes less than STRETCH_S, whatever else the machine
    does. The least of five counts, as the times depend on caches. 870,000 empty lists took 0.8 s on a fast one.
    """
    for _ in range(5):
        service = make_service()
        with calls_timed() as took:
            began = time.thread_time()
            response = ask("POST", path, service, content=body, headers=JSON)
            here = time.thread_time() - began
        assert response.status_code == 400
        assert len(error_of(response)["message"]) < 300
        if max(here, *took, 0.0) < STRETCH_S:
            break
    assert here < STRETCH_S
    assert max(took, default=0.0) < STRETCH_S


def test_long_bodies_are_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    split: Callable[..., Any] = json_decoding.split_fields

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return split(*given)

    monkeypatch.setattr(json_decoding, "split_fields", watched)
    for length in (10, INLINE_BYTES):
        ask("POST", "/tokenize", json={"prompt": "x " * (length // 2)})
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("lamina-bodies")


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("x" * 20_000, None),
        ([5] * 255, 1),
        ([[5] * 255] * 256, 256),
        (["a\\", '"', '\\"', "é😀[,]"], 4),
        ([[5, 6], [7]], 2),
        (["x"] * 256, 256),
    ],
)  # fmt: skip
def test_large_prompts_that_fit_are_served(prompt: Any, count: int | None) -> None:
    client = FakeClient()
    service = make_service(client, max_num_queued_reqs=1000)
    response = ask("POST", "/v1/completions", service, json={"prompt": prompt, "max_tokens": 1})
    if count is None:
        assert error_of(response)["code"] == "context_length_exceeded"
        return
    assert response.status_code == 200, response.text
    assert len(client.added) == count
    if isinstance(prompt[0], list):
        assert [ids for ids, _ in client.added] == prompt


@pytest.mark.parametrize(
    "text", ["[[1],2]", "[[1] 2]", "[[[1]]]", '[["a"]]', "[1, [2]]", "[[1],[]]", '["a", 1]', "[[1]"]
)
def test_prompts_of_no_form_are_refused(text: str) -> None:
    response = ask("POST", "/v1/completions", content=f'{{"prompt": {text}, "max_tokens": 1}}'.encode(), headers=JSON)
    assert response.status_code == 400, response.text


def test_who_is_refused_is_told_while_others_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is taken before the tokenizer is waited for: of 100 requests, 4 have it."""
    client = FakeClient()
    client.hold = True
    service = make_service(client, max_num_queued_reqs=0)
    free = threading.Event()

    def slowly(*given: Any, **how: Any) -> list[int]:
        assert free.wait(60)
        return token_ids(*given, **how)

    monkeypatch.setattr(prompt_processing, "token_ids", slowly)
    body = {"prompt": "class A: " * 80, "max_tokens": 2}

    async def work() -> None:
        async with http_of(service) as http:
            asked = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(100)]
            await until(lambda: sum(a.done() for a in asked) == 96)
            assert {a.result().status_code for a in asked if a.done()} == {429}
            assert service.queue_limit.completions == 4
            free.set()
            await until(lambda: len(service.active_calls) == 4)
            for one in asked:
                one.cancel()
            await until(lambda: not service.queue_limit.completions)

    try:
        run(work())
    finally:
        free.set()


def test_room_is_given_back_where_the_prompt_is_wrong() -> None:
    service = make_service()
    assert ask("POST", "/v1/completions", service, json={"prompt": "x " * 600}).status_code == 400
    assert ask("POST", "/v1/chat/completions", service, json={"messages": [{"role": "user", "content": "x " * 600}]})
    assert (service.queue_limit.completions, service.queue_limit.tokens) == (0, 0)


def test_texts_are_counted_across_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_decoding, "PIECE", 3)
    for shift in range(4):
        data = b"[" + b" " * shift + rb'"a\"b","\"\"","c\\"' + b"]"
        assert json_decoding.count_texts(data) == 2, "the one that ends with a backslash counts half"


def test_a_scan_has_a_bounded_number_of_values_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_decoding, "MAX_COMMAS", 10)
    bodies = [b'{"prompt":[' + b"1," * n + b'1],"max_tokens":1}' for n in (9, 10)]
    answers = [ask("POST", "/v1/completions", content=b, headers=JSON) for b in bodies]
    assert [a.status_code for a in answers] == [200, 400]
    assert error_of(answers[1])["code"] == "too_many_values"
