"""A message that cannot be encoded, or decoded, is an error of its request alone, in both directions."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake import no_restarts
from test_engine_link import READY, Quiet, Silent
from wired import ThreadEngine, WiredServer, over_a_wire

from lamina.models import tokenizer as tokens
from lamina.protocol.control import ControlLink, Stop
from lamina.request import ErrorOrigin, SamplingParams
from lamina.scheduler.kv_manager.session_cache import SessionCache
from lamina.server.engine_client.engine_client import FROM_ENGINE, EngineClient, QueryFailedError
from lamina.server.engine_client.frames import LENGTH, framed, in_place_of
from lamina.server.engine_client.messages import (
    AddPrompt,
    CancelPrompt,
    Delta,
    EngineReady,
    EngineState,
    Outputs,
    PromptRefused,
    ScaleReply,
    SessionsReply,
    SessionsRequest,
)
from lamina.server.engine_client.reply_queue import ReplyQueue

SOON_S = 20.0
NO_UTF8 = "\ud800"
ERROR = OverflowError("too large")
BODY = {"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True}
STATE = EngineState(running=1, waiting=2, free_blocks=[3], steps=5)


class Halves(tokens.Detokenizer):
    """Text of half a character for prompts that begin with token 7: a tokenizer that has a mistake."""

    def __init__(self, tokenizer: Any, prompt: list[int], **how: Any) -> None:
        super().__init__(tokenizer, prompt, **how)
        self._broken = prompt[0] == 7

    def push(self, token_ids: Any) -> str:
        return super().push(token_ids) + NO_UTF8 * self._broken


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[WiredServer]:
    logging.getLogger("lamina").propagate = True
    with over_a_wire():
        yield WiredServer(tmp_path)


def serving(server: WiredServer, work: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await server.open()
        try:
            await asyncio.wait_for(work(), SOON_S)
        finally:
            await server.close()

    asyncio.run(whole())


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_no_frame_holds_ends_its_request_and_not_the_engine(
    wired: WiredServer, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokens, "Detokenizer", Halves)

    async def work() -> None:
        bodies = [{**BODY, "prompt": [first, 6], "stream": stream} for first in (5, 7, 9)]
        good, bad, also = await asyncio.gather(*(wired.http.post("/v1/completions", json=body) for body in bodies))
        assert "the engine's reply cannot be encoded: UnicodeEncodeError" in bad.text
        assert bad.status_code == (200 if stream else 500)
        for answer in (good, also):
            assert answer.status_code == 200
            assert "error" not in answer.text
        assert (await wired.http.post("/v1/completions", json=BODY)).status_code == 200
        assert (await wired.http.get("/health")).json() == {"status": "ok"}
        assert len(wired.engines) == 1

    serving(wired, work)
    assert sum("a reply cannot be encoded" in record.getMessage() for record in caplog.records) == 1


def test_a_question_that_an_engine_cannot_answer_is_an_error_of_that_question(
    wired: WiredServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: SessionCache, tenant: bytes) -> None:
        raise KeyError("a mistake")

    async def work() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(SessionCache, "list_tenant", fail)
            answer = await wired.http.get("/v1/sessions")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        assert "KeyError: 'a mistake'" in answer.json()["error"]["message"]
        assert (await wired.http.get("/v1/sessions")).status_code == 200
        assert len(wired.engines) == 1

    serving(wired, work)


class Raw:
    """The server's end of an engine's link, for any bytes."""

    def __init__(self, server: WiredServer) -> None:
        self.engine = ThreadEngine(server.start)
        self.link = ControlLink(self.engine.sock, FROM_ENGINE)
        self.until(EngineReady)

    def send(self, message: Any) -> None:
        data = msgspec.msgpack.encode(message)
        self.engine.sock.sendall(LENGTH.pack(len(data)) + data)

    def until(self, kind: type) -> Any:
        while not isinstance(message := self.link.recv(SOON_S), kind):
            pass
        return message

    def end(self) -> None:
        self.link.send(Stop())
        self.engine.thread.join(SOON_S)
        assert self.engine.error is None


@pytest.mark.parametrize(
    "bad",
    [{"prompt": ["x"]}, {"params": 5}, {"resumed": [{}]}, {"cache_options": {"priority": "x"}}, {"prompt": None}],
    ids=str,
)
def test_a_request_that_an_engine_cannot_read_is_refused_and_others_go_on(wired: WiredServer, bad: Any) -> None:
    raw = Raw(wired)
    plain = {"type": "add", "prompt": [5, 6], "params": msgspec.to_builtins(SamplingParams(max_tokens=2))}
    raw.send({**plain, "key": 7, **bad})
    refused = raw.until(PromptRefused)
    assert (refused.key, refused.blame) == (7, ErrorOrigin.SERVER)
    assert "the engine cannot read it" in refused.text
    raw.send({**plain, "key": 8})
    assert {delta.key for delta in raw.until(Outputs).deltas} == {8}
    raw.end()


def test_a_question_that_an_engine_cannot_read_is_answered_by_an_error(wired: WiredServer) -> None:
    raw = Raw(wired)
    raw.send({"type": "ask-sessions", "number": 3, "tenant": 5})
    answer = raw.until(SessionsReply)
    assert (answer.number, answer.blame) == (3, ErrorOrigin.SERVER)
    raw.send({"type": "ask-sessions", "number": 4, "tenant": b""})
    assert raw.until(SessionsReply) == SessionsReply(4, [])
    raw.end()


def with_client(work: Callable[[EngineClient, ControlLink, socket.socket], Awaitable[None]]) -> None:
    """``work`` has a client, and the engine's end of its link."""
    ours, theirs = socket.socketpair()
    engine = ControlLink(theirs, AddPrompt | CancelPrompt | SessionsRequest | Stop)

    async def whole() -> None:
        engine.send(READY)
        client = await EngineClient.connect(Silent(ours), lambda progress: None, no_restarts())
        try:
            await asyncio.wait_for(work(client, engine, theirs), SOON_S)
        finally:
            await client.close()

    asyncio.run(whole())
    engine.close()


@pytest.mark.parametrize(
    "params", [SamplingParams(stop=NO_UTF8), SamplingParams(max_tokens=1 << 70)], ids=["no UTF-8", "70 bits"]
)
def test_a_request_that_cannot_be_sent_ends_by_an_error_and_others_go_on(
    params: SamplingParams, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lamina").propagate = True

    async def work(client: EngineClient, engine: ControlLink, sock: socket.socket) -> None:
        bad, good = ReplyQueue(), ReplyQueue()
        client.add([1], params, bad, Quiet(), name="cmpl-0123")
        key = client.add([2], SamplingParams(), good, Quiet())
        (end,) = await bad.get()
        assert (end.finish_reason, end.blame) == ("error", ErrorOrigin.SERVER)
        assert "the request cannot be sent to the engine: it cannot be encoded" in str(end.stop_reason)
        assert (await asyncio.to_thread(engine.recv, SOON_S)).key == key
        with pytest.raises(QueryFailedError, match="cannot be sent"):
            await client.query(SessionsRequest(0, b"", NO_UTF8))
        assert client.failure is None

    with_client(work)
    said = [record.getMessage() for record in caplog.records]
    assert sum("request cmpl-0123 cannot be sent" in line for line in said) == 1


def test_a_message_longer_than_a_frame_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would take it for a broken link, and end."""
    monkeypatch.setattr("lamina.server.engine_client.frames.MAX_FRAME", 1 << 10)

    async def work(client: EngineClient, engine: ControlLink, sock: socket.socket) -> None:
        bad = ReplyQueue()
        client.add([1] * 2000, SamplingParams(), bad, Quiet())
        (end,) = await bad.get()
        assert "more than a frame of 1024" in str(end.stop_reason)

    with_client(work)


def packed(message: Any, *path: Any, value: Any) -> bytes:
    """A frame of a message of which one value is another one."""
    fields: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    *there, last = path
    place = fields
    for name in there:
        place = place[name]
    place[last] = value
    data = msgspec.msgpack.encode(fields)
    return LENGTH.pack(len(data)) + data


def test_an_answer_that_cannot_be_read_ends_its_request_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("lamina").propagate = True

    async def work(client: EngineClient, engine: ControlLink, sock: socket.socket) -> None:
        bad, good = ReplyQueue(), ReplyQueue()
        keys = [client.add([1], SamplingParams(), bad, Quiet()), client.add([1], SamplingParams(), good, Quiet())]
        both = Outputs([Delta(key=key, index=0, token_ids=[1], text="a") for key in keys], 2)
        sock.sendall(packed(both, "deltas", 0, 3, value=5))
        (end,) = await bad.get()
        assert (end.finish_reason, end.blame) == ("error", ErrorOrigin.SERVER)
        assert "the engine's reply cannot be read" in str(end.stop_reason)
        assert [delta.text for delta in await good.get()] == ["a"]
        told = [await asyncio.to_thread(engine.recv, SOON_S) for _ in range(3)]
        assert told[2] == CancelPrompt(keys[0]), "the engine need not go on with it"
        asked = asyncio.create_task(client.query(SessionsRequest(0, b"")))
        question = await asyncio.to_thread(engine.recv, SOON_S)
        sock.sendall(packed(SessionsReply(question.number, []), "sessions", value=5))
        with pytest.raises(QueryFailedError, match="cannot be read"):
            await asked
        assert client.failure is None

    with_client(work)
    assert sum("cannot be read" in record.getMessage() for record in caplog.records) == 2


ANSWERS = [
    (PromptRefused(7, NO_UTF8, ErrorOrigin.CLIENT), lambda m: (m.key, m.blame) == (7, ErrorOrigin.SERVER)),
    (SessionsReply(7, [], refusal=NO_UTF8), lambda m: (m.number, m.blame) == (7, ErrorOrigin.SERVER)),
    (ScaleReply(error=NO_UTF8), lambda m: "cannot be encoded" in m.error),
]


@pytest.mark.parametrize(("answer", "right"), ANSWERS, ids=lambda x: type(x).__name__)
def test_in_place_of_an_answer_that_cannot_be_sent_comes_an_error(answer: Any, right: Any) -> None:
    mended = in_place_of(answer, ERROR)
    assert mended is not None
    assert right(mended.message)
    assert framed(mended.message)


@pytest.mark.parametrize("message", [STATE, READY, ScaleReply(was_requested=False)], ids=lambda m: type(m).__name__)
def test_what_answers_nobody_has_nothing_in_its_place(message: Any) -> None:
    assert in_place_of(message, ERROR) is None
