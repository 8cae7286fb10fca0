"""Answers of a journal over HTTP: of this server, of one that was killed in the midst of its streams, or of none.

Covers: lamina/server/call.py, lamina/server/journal/fetch_routes.py, lamina/server/journal/resume.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake import FakeClient, http_of, make_service
from running import MODEL, ROOT, Running, alive, eventually

from lamina.request import ErrorOrigin, SamplingParams
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.server import run
from lamina.server.call import Service
from lamina.server.engine_client.engine_client import EngineGoneError
from lamina.server.engine_client.messages import Delta, encode_scores
from lamina.server.engine_client.open_prompts import DeltaObserver, PromptRefusedError
from lamina.server.engine_client.reply_queue import ReplyQueue
from lamina.server.errors import ApiError
from lamina.server.journal.journal import Journal
from lamina.server.journal.journal_records import AcceptedRecord, JournalPrompt
from lamina.server.journal.resume import finish_all

BODY: dict[str, Any] = {"prompt": ["def f(", "import"], "n": 2, "max_tokens": 5, "logprobs": 1, "echo": True,
                        "cache_salt": "mine", "kv_discard": [[128, 256]]}  # fmt: skip


class KeptClient(FakeClient):
    """Tells the journal first, as the real one does. ``error``: what becomes of each prompt instead. A prompt
    ``hangs_at`` is never answered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.journal: Journal
        self.error: Exception | None = None
        self.keys: list[int] = []
        self.hangs_at: int | None = None  # a key
        self.hanging: int | None = None  # the same, once it has come

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        return params

    def add(  # type: ignore[override]
        self, prompt: list[int], params: SamplingParams, replies: ReplyQueue, meter: DeltaObserver, *, key: int,
        received: list[Delta] | None = None, cache_options: CacheOptions = DEFAULT_CACHE_OPTIONS, name: str = "",
    ) -> int:  # fmt: skip
        self.keys.append(key)
        self.cache_options.append(cache_options)
        self.added.append((prompt, params))
        if self.error is not None:
            replies.fail(self.error)
        if key == self.hangs_at:
            self.hanging = key
        for index in range(0 if self.hold or self.error or key == self.hanging else params.n):
            for delta in self.deltas_of(key, index, params, last=index == params.n - 1):
                self.journal.add_deltas([delta])
                replies.push(delta)
        return key


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = next_server(tmp_path)
    yield made
    assert made.journal is not None
    made.journal.close()


def next_server(folder: Path) -> Service:
    """On the journal in ``folder``."""
    client = KeptClient()
    service = make_service(client, journal=str(folder / "j"))
    service.journal = client.journal = Journal(service.config.journal, str(ROOT / MODEL), service.config.journal_bytes)
    return service


def ask(service: Service, method: str, path: str, body: Any = None) -> httpx.Response:
    async def send() -> httpx.Response:
        async with http_of(service) as http:
            return await http.request(method, path, json=body)

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/completions", {**BODY, "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}),
    ],
)
def test_an_answer_is_had_again_by_its_id(service: Service, path: str, body: dict[str, Any]) -> None:
    first = ask(service, "POST", path, body)
    assert first.status_code == 200, first.text
    again = ask(service, "GET", f"{path}/{first.json()['id']}")
    assert (again.status_code, again.json()) == (200, first.json())
    other = "/v1/completions" if "chat" in path else "/v1/chat/completions"
    for wrong in (f"{other}/{first.json()['id']}", f"{path}/cmpl-0"):
        assert ask(service, "GET", wrong).json()["error"]["code"] == "not_found"


def test_without_a_journal_there_is_no_such_route() -> None:
    answer = ask(make_service(), "GET", "/v1/completions/cmpl-0")
    text = "this server does not serve /v1/completions/{answer_id}: start it with --journal DIR"
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, text)


def test_the_answer_is_behind_the_key_of_the_server(service: Service) -> None:
    locked = make_service(service.client, api_key="secret")
    locked.journal = service.journal
    assert ask(locked, "GET", "/v1/completions/cmpl-0").status_code == 401


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system: needs root")
def test_a_full_disk_is_shown_and_refuses_new_requests_until_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], check=False).returncode:
        pytest.skip("mount: not permitted here")
    try:
        service = next_server(place)
        journal = service.journal
        assert journal is not None

        def shown() -> tuple[dict[str, str], bool]:
            return (
                ask(service, "GET", "/health").json(),
                'lamina:journal_unwritable{engine="0",model_name="tiny"} 1.0' in ask(service, "GET", "/metrics").text,
            )

        assert ask(service, "POST", "/v1/completions", BODY).status_code == 200
        assert shown() == ({"status": "ok"}, False)
        fill = place / "others"
        with suppress(OSError), fill.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        line = f"--journal {place}/j cannot be written (No space left on device): new requests are refused"
        full = {"status": "ok", "journal": "cannot be written: No space left on device"}
        for _ in range(20):  # the last page of the journal's file has a little room
            refused = ask(service, "POST", "/v1/completions", BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "journal_unwritable")
        assert shown() == (full, True)
        assert caplog.text.count(line) == 1
        with pytest.raises(OSError, match="^--journal .*/new cannot be opened: No space left on device"):
            Journal(str(place / "new"), str(ROOT / MODEL), 1 << 20)
        journal.close()
        service = next_server(place)  # at the start, too
        journal = service.journal
        assert journal is not None
        assert caplog.text.count(line) == 2
        assert shown() == (full, True)
        fill.unlink()
        journal.retry()
        assert shown() == ({"status": "ok"}, False)
        assert ask(service, "POST", "/v1/completions", BODY).status_code == 200
        journal.close()
    finally:
        subprocess.run(["umount", place], check=True)


def left_behind(service: Service, error: ApiError | None) -> str:
    """A stream that is under way; then its server ends with ``error``, or its client leaves. The id."""

    async def send() -> str:
        assert isinstance(service.client, KeptClient)
        assert service.journal is not None
        service.client.hold = True
        async with http_of(service) as http:
            task = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": True}))
            while not service.active_calls:
                await asyncio.sleep(0)
            (entry,) = service.journal.unfinished()
            under_way = await http.get(f"/v1/completions/{entry.accepted.id}")
            assert (under_way.status_code, under_way.json()["status"]) == (202, "in_progress")
            assert under_way.headers["retry-after"] == "1"
            service.journal.add_deltas(
                [
                    Delta(
                        key=entry.keys[0],
                        index=1,
                        token_ids=[300],
                        text="xy",
                        logprobs=[encode_scores([(300, -1.0, 1)])],
                    )
                ]
            )
            for call in list(service.active_calls):
                call.abort(error) if error else call.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return entry.accepted.id

    return asyncio.run(send())


def handed_over(service: Service, folder: Path) -> tuple[str, Service, Journal, KeptClient]:
    """The id of an answer that ``service`` has left, and the server that comes next."""
    answer_id = left_behind(service, ApiError(503, "the server is shutting down"))
    assert service.journal is not None
    service.journal.close()
    then = next_server(folder)
    assert then.journal is not None
    assert isinstance(then.client, KeptClient)
    return answer_id, then, then.journal, then.client


def test_what_a_server_leaves_is_finished_by_the_next_one(service: Service, tmp_path: Path) -> None:
    answer_id, second, journal, client = handed_over(service, tmp_path)
    (entry,) = journal.unfinished()
    asyncio.run(finish_all(second, journal, [entry]))
    answer = ask(second, "GET", f"/v1/completions/{answer_id}").json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][1]["text"].endswith("xyabcd")
    assert answer["usage"]["completion_tokens"] == 9
    assert client.keys == [0, 1]
    assert isinstance(service.client, KeptClient)
    assert client.cache_options == service.client.cache_options, "whoever shared their KV then may do so now"
    assert all(
        cache_options.salt and cache_options.discard_ranges == ((128, 256),) for cache_options in client.cache_options
    )
    assert [params.seed for _, params in client.added] == [prompt.seed for prompt in entry.accepted.prompts]
    assert second.queue_limit.completions == 0
    journal.close()


def test_what_its_client_has_left_is_not_finished(service: Service) -> None:
    answer_id = left_behind(service, None)
    assert service.journal is not None
    assert not service.journal.unfinished()
    assert ask(service, "GET", f"/v1/completions/{answer_id}").status_code == 404


def test_whose_client_reads_slowly_as_the_engine_is_lost_is_finished(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not read that the engine is gone when its server ends, which breaks off its stream."""
    monkeypatch.setattr(run, "PROGRESS_S", 0.0)

    async def end() -> None:
        assert isinstance(service.client, KeptClient)
        service.client.hold = True
        async with http_of(service) as http:
            task = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": True}))
            while not service.active_calls:
                await asyncio.sleep(0)
            server = run.HttpServer(service, lambda: None)
            service.client.lost.set()
            await server.end_with_engine()
            assert server.should_exit
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(end())
    assert service.journal is not None
    assert len(service.journal.unfinished()) == 1


def test_what_cannot_be_finished_is_said(service: Service, tmp_path: Path) -> None:
    answer_id, gone, journal, client = handed_over(service, tmp_path)
    client.error = EngineGoneError("it died")  # stays for the next one
    asyncio.run(finish_all(gone, journal, journal.unfinished()))
    assert len(journal.unfinished()) == 1
    client.error = PromptRefusedError("max_tokens does not fit", ErrorOrigin.CLIENT)
    asyncio.run(finish_all(gone, journal, journal.unfinished()))
    assert not journal.unfinished()
    assert gone.queue_limit.completions == 0
    journal.close()
    last = next_server(tmp_path)
    answer = ask(last, "GET", f"/v1/completions/{answer_id}")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "max_tokens does not fit")
    assert last.journal is not None
    last.journal.close()


def test_a_request_that_ends_each_server_is_given_up_and_no_other_with_it(service: Service, tmp_path: Path) -> None:
    assert service.journal is not None
    kept = [JournalPrompt(key, [5, 6], "text", 40) for key in service.journal.new_keys(4)]
    fields = {"kind": "cmpl", "model": "tiny", "created": 1, "params": SamplingParams(max_tokens=2)}
    for prompt in kept:
        asyncio.run(service.journal.accept(AcceptedRecord(id=f"cmpl-{prompt.key}", prompts=[prompt], **fields)))
    poison, begun = kept[1].key, list[list[int]]()

    async def live(then: Service, journal: Journal, client: KeptClient) -> None:
        """A server to the end of its list, or until it is killed."""
        task = asyncio.create_task(finish_all(then, journal, journal.unfinished()))
        while not task.done() and client.hanging is None:
            await asyncio.sleep(0)
        journal.close()  # nothing that comes later is written
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    service.journal.close()
    for _ in range(9):
        then = next_server(tmp_path)
        assert then.journal is not None
        assert isinstance(then.client, KeptClient)
        if not then.journal.unfinished():
            break
        then.client.hangs_at, then.client.hold = poison, not begun
        asyncio.run(live(then, then.journal, then.client))
        begun.append(then.client.keys)
    assert begun == [[0, 1, 2, 3], [0, 1], [1], [2, 3]]
    for prompt in kept:
        answer = ask(then, "GET", f"/v1/completions/cmpl-{prompt.key}")
        assert answer.status_code == (500 if prompt.key == poison else 200)
    assert "3 servers have ended while they computed this request" in ask(then, "GET", "/v1/completions/cmpl-1").text
    then.journal.close()


def test_servers_that_end_in_order_are_not_counted(service: Service, tmp_path: Path) -> None:
    _, then, journal, client = handed_over(service, tmp_path)
    client.hold = True

    async def end_in_order() -> None:
        task = asyncio.create_task(finish_all(then, journal, journal.unfinished()))
        while not client.keys:
            await asyncio.sleep(0)
        (entry,) = journal.unfinished()
        assert entry.num_restarts == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(end_in_order())
    journal.close()
    last = next_server(tmp_path)
    assert last.journal is not None
    assert [entry.num_restarts for entry in last.journal.unfinished()] == [0]
    last.journal.close()


STREAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.8, "seed": 2, "n": 2, "presence_penalty": 0.4, "logprobs": 1},
    {"temperature": 0.7, "seed": 3, "stop": ["qqq"], "min_tokens": 8},
    {"temperature": 1.0},  # no seed: it is finished as it began
)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_streams_of_a_server_that_is_killed_are_finished_by_the_next_one(tmp_path: Path) -> None:
    more = {"prompt": "def f(", "max_tokens": 150, "ignore_eos": True}
    flags = ("--dtype=float32", "--journal", f"{tmp_path / 'j'},size=1MiB", "--api-key=k")
    server = Running(tmp_path / "log", *flags)
    received: list[tuple[str, dict[int, str]]] = []

    async def read(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        texts: dict[int, str] = {}
        async with http.stream("POST", "/v1/completions", json={**body, **more, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if not texts:
                        received.append((chunk["id"], texts))
                    for choice in chunk["choices"]:
                        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if len(received) == len(STREAMS) and all(len(t) > 15 for _, each in received for t in each.values()):
                    os.kill(server.process.pid, signal.SIGKILL)

    async def read_all() -> list[BaseException | None]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, headers=KEY) as http:
            return await asyncio.gather(*(read(http, body) for body in STREAMS), return_exceptions=True)

    try:
        assert all(isinstance(end, httpx.HTTPError) for end in asyncio.run(read_all()))
        pids = server.descendants() if server.process.poll() is None else []
    finally:
        server.kill()
    server = Running(tmp_path / "log2", *flags)
    try:
        with httpx.Client(base_url=server.url, timeout=120, headers=KEY) as http:

            def whole(answer_id: str) -> dict[str, Any]:
                answer = http.get(f"/v1/completions/{answer_id}")
                assert answer.status_code in (200, 202), answer.text
                return answer.json() if answer.status_code == 200 else {}

            assert eventually(lambda: all(whole(i) for i, _ in received), 120), (tmp_path / "log2").read_text()
            assert http.get(f"/v1/completions/{received[0][0]}", headers={"authorization": ""}).status_code == 401
            wanted = [http.post("/v1/completions", json={**body, **more}).json() for body in STREAMS]
            for answer_id, texts in received:
                told = whole(answer_id)["choices"]
                assert [c["text"][: len(texts[c["index"]])] for c in told] == [texts[c["index"]] for c in told]
                assert {c["finish_reason"] for c in told} <= {"length", "stop"}
            answers = [whole(i) for i, _ in received]
            for want in wanted[:3]:
                assert any(
                    [(c["text"], c["finish_reason"]) for c in want["choices"]]
                    == [(c["text"], c["finish_reason"]) for c in answer["choices"]]
                    and want["usage"] == answer["usage"]
                    for answer in answers
                )
            assert "--journal: finishing 4 requests of an earlier server" in (tmp_path / "log2").read_text()
    finally:
        pids += server.descendants()
        server.kill()
    assert eventually(lambda: not alive(pids), 30), alive(pids)


KEY = {"authorization": "Bearer k"}
